// @ts-check
// An instance of the kernels in WebAssembly, and access to its memory.
import { OFF, PARTS } from "./facts.js";
import { check, Problem } from "./problem.js";

// A module with one function: f32x4.relaxed_madd of three constants.
const RELAXED = Uint8Array.from(atob("AGFzbQEAAAABBQFgAAF7AwIBAAoTAREAQQH9EUEB/RFBAf0R/YUCCw=="), (c) => c.charCodeAt(0));

// The build that this browser runs fastest: 'relaxed' has fused multiply-adds.
export const build = () => (WebAssembly.validate(RELAXED) ? "relaxed" : "simd");

const EBADF = 8; // there are no files

export class Kernels {
  /** @type {Record<string, any>} */ c;

  /** @param {WebAssembly.Module} module @returns {Promise<Kernels>} */
  static async of(module) {
    const kernels = new Kernels();
    const imports = {
      page: {
        refuse: (text) => { throw new Problem(kernels.string(text)); },
      },
      wasi_snapshot_preview1: {
        // The steady clock, in nanoseconds. The decoder reads it; no result depends on it.
        clock_time_get: (clock, precision, to) => {
          kernels.view(BigUint64Array, to, 1)[0] = BigInt(Math.round(performance.now() * 1e6));
          return 0;
        },
        fd_close: () => EBADF,
        fd_seek: () => EBADF,
        fd_write: () => EBADF,
      },
    };
    kernels.c = (await WebAssembly.instantiate(module, imports)).exports;
    kernels.c._initialize();
    return kernels;
  }

  // Settings of sampling, {name: value}, in the kernels' order; a missing one is off.
  byName(sampling) {
    return Object.fromEntries(Object.entries(OFF).map(([name, off]) => [name, Number(sampling[name] ?? off)]));
  }

  inOrder(sampling) { return Float64Array.from(Object.values(this.byName(sampling))); }

  // The row of a part's name. Raises Problem if there is none.
  part(name) {
    const row = PARTS.findIndex((part) => part.name === name);
    check(row >= 0, `part is ${name}; the kernels have no such part`);
    return row;
  }

  // Numbers in memory, which moves when it grows: each use makes a new view.
  view(Type, at, count) { return new Type(this.c.memory.buffer, at, count); }

  string(at) {
    const bytes = this.view(Uint8Array, at);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  // Calls use(address) with newly allocated bytes and releases them afterwards.
  with(bytes, use) {
    const at = this.c.page_allocate(bytes);
    check(at, `no memory for ${bytes} bytes`);
    const result = use(at);
    this.c.page_release(at);
    return result;
  }

  // Calls a function of the kernels; typed arrays are copied to their memory and back.
  call(name, ...given) {
    const n = given.findIndex(ArrayBuffer.isView);
    if (n < 0) return this.c[`page_${name}`](...given);
    const array = given[n];
    return this.with(array.byteLength, (at) => {
      const copy = () => this.view(array.constructor, at, array.length);
      copy().set(array);
      const result = this.call(name, ...given.slice(0, n), at, ...given.slice(n + 1));
      array.set(copy());
      return result;
    });
  }

  // A checkpoint's address; its tensors are copied.
  openCheckpoint({ config, tensors }) {
    const { block_size, vocab_size, n_layer, n_head, n_embd, window } = config;
    const made = this.call("open_checkpoint", block_size, vocab_size, n_layer, n_head, n_embd, window ?? 0);
    for (const [name, { data }] of tensors) {
      const at = this.call("add_tensor", made, new TextEncoder().encode(`${name}\0`), data.length);
      this.view(Float32Array, at, data.length).set(data);
    }
    return made;
  }
}
