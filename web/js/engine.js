// @ts-check
// The page's side of the worker.
import { encode } from "./checkpoint.js";
import { parseBranches, sampling } from "./state.js";

// The error of a call after the Engine was closed.
export class Closed extends Error {}

// A Session in a worker; call() calls a method of it. With a model it is a source of Writing in text.js.
export class Engine {
  isPaced = true;
  /** @type {import("./facts.js").Config} */ config;
  /** @type {string[]} the vocabulary */ characters;
  /** @type {string} */ gpuName;
  /** @type {string | undefined} why the CPU writes in place of the GPU */ why;

  static open() { return new Engine(new Worker(new URL("./worker.js", import.meta.url), { type: "module" })); }

  constructor(worker) {
    this.worker = worker;
    this.waiting = new Map();
    this.calls = 0;
    this.worker.onmessage = ({ data: { id, result, error } }) => {
      const call = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) call?.resolve(result);
      else call?.reject(new Error(error));
    };
    this.worker.onerror = (event) => this.fail(new Error(event.message || "the worker did not start"));
  }

  fail(error) {
    for (const { reject } of this.waiting.values()) reject(error);
    this.waiting.clear();
  }

  call(method, argument = {}) {
    if (this.closed) return Promise.reject(new Closed("the engine is closed"));
    const id = this.calls++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, method, argument });
    });
  }

  // The GPU for this model: {name, isCpu}, or {why}, a sentence.
  async openGpu() {
    if (this.config.window) return { why: "it takes no model whose texts have no end" };
    const gpu = await this.call("openGpu");
    this.gpuName = gpu.name;
    return gpu;
  }

  async begin({ prompt, length, branches, where, ...choices }) {
    const { characters, config } = this,
      ids = encode(prompt || "\n", characters),
      forced = parseBranches(branches).map(([at, c]) => [at, characters.indexOf(c)]);
    this.onGpu = where === "gpu";
    const { why } = await this.call("begin", {
      ...{ part: "part4", ids, seed: choices.seed, context: choices.context, useCache: true, onGpu: this.onGpu },
      sampling: sampling(choices),
      capacity: Math.min(config.block_size, ids.length + length),
      forced: forced.filter(([, id]) => id >= 0),
    });
    this.why = why; // the CPU writes what the GPU was to write, if so
  }

  async more(most) {
    const { tokens, logits, isEnd, elapsed, why } = await this.call("more", { most });
    this.why ??= why;
    return { piece: tokens.map((token) => this.characters[token]).join(""), logits, isEnd, elapsed };
  }

  // Who writes, as a part of a sentence.
  get by() {
    if (this.why) return `with part4 on the CPU: ${this.why}`;
    return this.onGpu ? `on ${this.gpuName}` : "with part4";
  }

  halt() {} // the page asks for no more

  close() {
    this.closed = true;
    this.worker.terminate();
    this.fail(new Closed("the engine is closed"));
  }
}
