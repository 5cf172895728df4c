// An instance of the kernels in WebAssembly, and access to its memory.

export const PRECISIONS = ["fp32", "bf16"]; // the first rows of model/csrc/precision.h

// An error of the kernels, with their message.
export class Refused extends Error {}

// A module with one function: f32x4.relaxed_madd of three constants.
const RELAXED = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 19, 1, 17, 0, 65, 1, 253, 17, 65, 1, 253,
  17, 65, 1, 253, 17, 253, 133, 2, 11,
]);

// The build that this browser runs fastest: 'relaxed' has fused multiply-adds.
export function build() {
  return WebAssembly.validate(RELAXED) ? "relaxed" : "simd";
}

export class Kernels {
  // bytes: those of a build. Raises WebAssembly.CompileError if the browser has no SIMD.
  static async load(bytes) {
    return Kernels.of(await WebAssembly.compile(bytes));
  }

  static async of(module) {
    const kernels = new Kernels();
    kernels.module = module;
    const instance = await WebAssembly.instantiate(module, {
      page: {
        refuse: (text) => {
          throw new Refused(kernels.string(text));
        },
      },
      wasi_snapshot_preview1: {
        // The steady clock, in nanoseconds. The decoder reads it; no result depends on it.
        clock_time_get: (clock, precision, to) => {
          kernels.view().setBigUint64(to, BigInt(Math.round(performance.now() * 1e6)), true);
          return 0;
        },
        fd_close: () => 8, // EBADF: there are no files
        fd_seek: () => 8,
        fd_write: () => 8,
      },
    });
    kernels.c = instance.exports;
    kernels.c._initialize();
    // The rows of csrc/parts.h, whose operators are a name and an algorithm: part4_flash.
    const operators = kernels.string(kernels.c.part_names()).trim().split("\n");
    kernels.parts = operators.map((operator) => {
      const [name, ...algorithm] = operator.split("_");
      return { name, algorithm: algorithm.join(" ") };
    });
    return kernels;
  }

  // The row of a part's name. Raises Refused if there is none.
  part(name) {
    const row = this.parts.findIndex((part) => part.name === name);
    if (row < 0) throw new Refused(`part is ${name}; it must be one of ${this.parts.map((part) => part.name).join(", ")}`);
    return row;
  }

  // Memory moves when it grows, so each use makes a new view.
  view() {
    return new DataView(this.c.memory.buffer);
  }
  floats(at, count) {
    return new Float32Array(this.c.memory.buffer, at, count);
  }
  ints(at, count) {
    return new Int32Array(this.c.memory.buffer, at, count);
  }
  doubles(at, count) {
    return new Float64Array(this.c.memory.buffer, at, count);
  }

  string(at) {
    const bytes = new Uint8Array(this.c.memory.buffer, at);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  // Calls use(address) with newly allocated bytes and releases them afterwards.
  with(bytes, use) {
    const at = this.c.allocate(bytes);
    if (!at) throw new Refused(`no memory for ${bytes} bytes`);
    const result = use(at);
    this.c.release(at);
    return result;
  }

  withInts(values, use) {
    return this.with(4 * values.length, (at) => {
      this.ints(at, values.length).set(values);
      return use(at);
    });
  }

  withString(text, use) {
    const bytes = new TextEncoder().encode(`${text}\0`);
    return this.with(bytes.length, (at) => {
      new Uint8Array(this.c.memory.buffer, at, bytes.length).set(bytes);
      return use(at);
    });
  }

  // A checkpoint's address; its tensors are copied.
  openCheckpoint({ config, tensors }) {
    const { block_size, vocab_size, n_layer, n_head, n_embd } = config;
    const made = this.c.open_checkpoint(block_size, vocab_size, n_layer, n_head, n_embd);
    for (const [name, { data }] of tensors) {
      const at = this.withString(name, (text) => this.c.add_tensor(made, text, data.length));
      this.floats(at, data.length).set(data);
    }
    return made;
  }
}
