// @ts-check
// The decoder on a GPU, generation/csrc/webgpu/decoder.wgsl, whose header describes the buffers.
import { EMBEDDING, PLACES, shapes } from "./checkpoint.js";
import { DECODER, TILES } from "./facts.js";
import { check } from "./problem.js";

const { INVOCATIONS, FIRST, PROMPT, TEXT } = DECODER;
const DISPATCH_MS = 30; // no watchdog ends it

const quads = (numbers) => Math.ceil(numbers / 4);

// The compiled decoder and the weights of a checkpoint on a GPU.
export class GpuModel {
  /** @type {import("./gpu.js").Gpu} */ gpu;
  /** @type {import("./facts.js").Config} */ config;
  /** @type {GPUComputePipeline} */ pipeline;
  /** @type {GPUBuffer} */ weights;
  /** @type {number} quads of all heads' numbers */ A;

  // shaders: WGSL. Raises Problem.
  static async of(gpu, shaders, { config, tensors }, precision) {
    const { n_layer, n_head, n_embd, vocab_size, block_size, bias = true } = config,
      d = n_embd / n_head,
      A = n_head * quads(d),
      W = quads(n_embd),
      room = gpu.limits.maxComputeWorkgroupStorageSize;
    const shared = (tile) =>
      16 * (W + Math.max(W, A) + Math.max(n_embd, A) + INVOCATIONS) +
      4 * (Math.max(n_head * tile, 2 * vocab_size, INVOCATIONS) + n_head) +
      192;
    const tiles = TILES.filter((tile) => shared(tile) <= room);
    check(A <= INVOCATIONS && tiles.length, "the model is too wide for a workgroup of this GPU");
    const constants = {
      ...{ LAYERS: n_layer, HEADS: n_head, HEAD_DIM: d, VOCAB: vocab_size, BIAS: Number(bias) },
      TILE: tiles.findLast((tile) => tile >= block_size) ?? tiles[0],
    };
    const lines = Object.entries(constants).map(([name, value]) => `const ${name}: u32 = ${value}u;`),
      pipeline = await gpu.pipeline([...lines, shaders.decoder].join("\n"), "decode");
    const weights = gpu.buffer(await packed(config, tensors, precision));
    return Object.assign(new GpuModel(), { gpu, config, pipeline, A, weights });
  }

  // Bytes of a text's keys, and of its values.
  cached(capacity) { return 16 * this.config.n_layer * this.A * capacity; }
}

// The weights in the decoder's order, matrices as (in, out), each row and vector in whole quads. bf16 rounds the head:
// files hold it in float32, as the tokens' table.
async function packed(config, tensors, precision) {
  const { n_head, n_embd: C, vocab_size: V } = config,
    d = C / n_head,
    D = 4 * quads(d),
    A = n_head * D,
    straight = (i) => i,
    byHead = (i) => Math.floor(i / d) * D + (i % d), // each head begins a quad
    qkv = (i) => Math.floor(i / C) * A + byHead(i % C),
    whole = (numbers) => [4 * quads(numbers), straight],
    parts = [];
  // rows x columns numbers value(r, c), each at its place in K x N
  /** @type {(rows: number, columns: number, value: (r: number, c: number) => number, inRows: any[], inColumns: any[]) => void} */
  const place = (rows, columns, value, [K, row], [N, column]) => {
    const made = new Float32Array(K * N);
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) made[row(r) * N + column(c)] = value(r, c);
    parts.push(made);
  };
  const table = (name) => {
    const { shape: [rows, columns], data } = tensors.get(name);
    place(rows, columns, (r, c) => data[r * columns + c], [rows, straight], whole(columns));
  };
  table(EMBEDDING);
  for (const [name, [outputs, inputs = 1]] of shapes(config)) {
    const { data } = tensors.get(name),
      places = name.includes("c_attn") ? [3 * A, qkv] : whole(outputs),
      rows = name.includes("attn.c_proj") ? [A, byHead] : whole(inputs);
    if (![EMBEDDING, PLACES].includes(name))
      place(inputs, outputs, (r, c) => data[c * inputs + r], inputs === 1 ? [1, straight] : rows, places);
  }
  const { data } = tensors.get(EMBEDDING),
    round = precision === "bf16" ? rounded : straight;
  place(C, V, (r, c) => round(data[c * C + r]), whole(C), whole(V));
  table(PLACES);
  return new Float32Array(await new Blob(parts).arrayBuffer());
}

// A decoder for Writer in writer.js, of texts of the same length that are written together.
export class GpuDecoder {
  /** @type {GpuModel} */ model;
  /** @type {import("./kernels.js").Kernels} */ kernels;
  /** @type {string[]} */ seeds;
  /** @type {boolean} */ keepsLogits;
  /** @type {number} */ capacity;
  count = 0; // of texts
  written = 0; // tokens of each

  // kernels: those in WebAssembly. keepsLogits: whether write() returns those of the tokens. Raises Problem.
  constructor(model, kernels, { seeds, sampling, capacity, keepsLogits = true }) {
    Object.assign(this, { model, kernels, seeds, keepsLogits, capacity, count: seeds.length, held: 0, written: 0, ids: [] });
    const { gpu, config } = model,
      V = config.vocab_size,
      cache = model.cached(capacity) * this.count;
    const settings = settingsOf(kernels.byName(sampling)),
      rows = new Float32Array(this.count * (settings.length + V));
    for (let i = 0; i < this.count; i++) rows.set(settings, settings.length * i);
    this.params = gpu.buffer(32, GPUBufferUsage.UNIFORM);
    this.buffers = [cache, cache, 4 * V * this.count, 8 * V * this.count, rows].map((of) => gpu.buffer(of));
    this.milliseconds = 1 + this.count / 10; // of a token of each text
  }

  // All texts read these tokens next, in place of those that they hold.
  prefill(ids, continues) {
    this.ids = Array(this.count).fill(ids);
    this.held = 0;
    this.flags = PROMPT + (continues ? 0 : FIRST);
  }

  // Writes 1 to `most` tokens a text: {tokens (rows, texts), logits (rows, texts, V) | null}. Raises Problem.
  async write(most) {
    const { model, kernels, count, ids, keepsLogits } = this,
      { gpu, config } = model,
      V = config.vocab_size,
      read = ids[0].length,
      rows = Math.min(most, Math.max(1, Math.floor(DISPATCH_MS / this.milliseconds))),
      uniformsAt = count * (TEXT + read),
      work = new Uint32Array(uniformsAt + 2 * rows * count),
      start = performance.now();
    for (let i = 0; i < count; i++) {
      work.set([i, this.held, count * TEXT + i * read, read, this.flags], TEXT * i);
      work.set(ids[i], count * TEXT + i * read);
    }
    const uniforms = new Float32Array(work.buffer, 4 * uniformsAt), // (rows, texts, 2)
      own = new Float32Array(2 * rows);
    this.seeds.forEach((seed, i) => {
      kernels.call("uniforms", BigInt(seed), this.written, rows, own);
      for (let row = 0; row < rows; row++) uniforms.set(own.subarray(2 * row, 2 * row + 2), 2 * (row * count + i));
    });
    const params = Uint32Array.of(count, rows, this.capacity, count, uniformsAt, Number(keepsLogits), 0, 0);
    new Float32Array(params.buffer)[6] = Math.LOG2E / Math.sqrt(config.n_embd / config.n_head);
    gpu.write(this.params, params);
    const size = 4 * rows * count * (1 + (keepsLogits ? V : 0)),
      passing = [gpu.buffer(work), gpu.buffer(size)],
      all = [this.params, model.weights, ...this.buffers, ...passing],
      out = await gpu.run(model.pipeline, all, [count], size);
    for (const buffer of passing) buffer.destroy();
    const tokens = new Int32Array(out, 0, rows * count);
    check(tokens.every((token) => token >= 0), "the model's logits hold NaN or infinity");
    this.held += read + rows - 1;
    this.written += rows;
    this.ids = Array.from({ length: count }, (_, i) => [tokens[(rows - 1) * count + i]]);
    this.flags = 0;
    this.milliseconds = (performance.now() - start) / (read + rows - 1);
    return { tokens, logits: keepsLogits ? new Float32Array(out.slice(4 * rows * count)) : null };
  }

  close() { for (const buffer of [this.params, ...this.buffers]) buffer.destroy(); }
}

// A float32 as the nearest bfloat16, ties to even.
function rounded(x) {
  const bits = new Uint32Array(new Float32Array([x]).buffer);
  bits[0] = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000;
  return new Float32Array(bits.buffer)[0];
}

// The decoder's settings, from {name: value} in the kernels' order.
function settingsOf(sampling) {
  const { temperature, repetition_penalty, presence_penalty, frequency_penalty } = sampling,
    adjusts = repetition_penalty !== 1 || presence_penalty !== 0 || frequency_penalty !== 0,
    inFloat32 = temperature > 0 ? Math.max(temperature, 1e-30) : 0,
    numbers = Object.values({ ...sampling, temperature: inFloat32 });
  return [...numbers, Number(adjusts), Math.min(1e30, 1 / Math.max(temperature, 1e-300))];
}
