// @ts-check
// A GPU through WebGPU: adapter, device, shaders, buffers and dispatches, as in attention_ext/webgpu/driver.py.
import { check, Problem } from "./problem.js";

/** @type {GPUFeatureName[]} */
const OPTIONAL = ["subgroups"]; // features that are asked for where they exist
const LIMITS = [
  ...["maxBufferSize", "maxStorageBufferBindingSize"],
  ...["maxComputeWorkgroupStorageSize", "maxComputeInvocationsPerWorkgroup"],
];

// Raises Problem.
async function findAdapter() {
  check(globalThis.isSecureContext, "browsers give a page their GPU by https only");
  const { gpu } = navigator;
  check(gpu, "this browser has no WebGPU, or has it switched off");
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  check(adapter, "this browser finds no GPU that it trusts");
  return adapter;
}

// isCpu: a driver runs it on the CPU.
function described({ vendor, architecture, description, isFallbackAdapter }) {
  const name = description || [vendor, architecture].filter(Boolean).join(" ") || "the GPU";
  return { name, isCpu: Boolean(isFallbackAdapter) };
}

// What Gpu.open() would take, without opening it: {name, isCpu}, or {why}, a sentence.
export async function findGpu() {
  try {
    return described((await findAdapter()).info);
  } catch (error) {
    return { why: error.message };
  }
}

export class Gpu {
  /** @type {GPUDevice} */ device;
  /** @type {Record<string, number>} */ limits;
  /** @type {GPUFeatureName[]} that it has, of OPTIONAL */ features;
  name = "";
  isCpu = false; // whether a driver runs it on the CPU
  isLost = false;

  // Raises Problem.
  static async open() {
    const adapter = await findAdapter(),
      features = OPTIONAL.filter((name) => adapter.features.has(name)),
      limits = Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]])),
      device = await adapter.requestDevice({ requiredFeatures: features, requiredLimits: limits }),
      opened = Object.assign(new Gpu(), { device, limits, features }, described(adapter.info));
    device.lost.then(() => (opened.isLost = true));
    return opened;
  }

  // A compiled entry point of WGSL. Raises Problem with the compiler's message.
  async pipeline(code, entryPoint) {
    const module = this.device.createShaderModule({ code });
    try {
      return await this.device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint } });
    } catch (error) {
      this.check();
      const { messages } = await module.getCompilationInfo();
      throw new Problem(`the shader was refused: ${messages[0]?.message ?? error.message}`);
    }
  }

  // content: an array, or a number of zero bytes. Raises Problem if the buffer is too large.
  buffer(content, usage = GPUBufferUsage.STORAGE) {
    const size = Math.max(16, 4 * Math.ceil((content.byteLength ?? content) / 4)),
      most = Math.min(this.limits.maxStorageBufferBindingSize, this.limits.maxBufferSize);
    check(size <= most, `${this.name} allows ${most} bytes in a buffer, and ${size} are needed`);
    const made = this.device.createBuffer({ size, usage: usage | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST });
    if (ArrayBuffer.isView(content)) this.write(made, content);
    return made;
  }

  write(buffer, array) { this.device.queue.writeBuffer(buffer, 0, array); }

  // Dispatches `times` times; buffers are bindings 0, 1 ... Returns the first `bytes` of `from`. Raises Problem if the driver was reset.
  /** @type {(pipeline: GPUComputePipeline, buffers: GPUBuffer[], groups: [number], bytes: number, more?: any) => Promise<ArrayBuffer>} */
  async run(pipeline, buffers, groups, bytes, { times = 1, from = buffers.at(-1) } = {}) {
    this.check();
    const { device } = this,
      entries = buffers.map((buffer, binding) => ({ binding, resource: { buffer } })),
      usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
      back = device.createBuffer({ size: bytes, usage }),
      encoder = device.createCommandEncoder(),
      pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
    for (let i = 0; i < times; i++) pass.dispatchWorkgroups(...groups);
    pass.end();
    encoder.copyBufferToBuffer(from, 0, back, 0, bytes);
    device.queue.submit([encoder.finish()]);
    try {
      await back.mapAsync(GPUMapMode.READ);
    } catch (error) {
      throw new Problem(`the GPU was lost: ${error.message}`);
    }
    const result = back.getMappedRange().slice(0);
    back.destroy();
    this.check(); // a lost device maps zeros
    return result;
  }

  check() { check(!this.isLost, "the GPU was lost"); }
}
