// @ts-check
// The work of the page's worker: it holds a checkpoint and answers calls by name. It uses no DOM, so it runs in node.
import { BLOCK, NESTS, PRECISIONS, TILE } from "./facts.js";
import { simulate } from "./caches.js";
import { readCheckpoint } from "./checkpoint.js";
import { Kernels } from "./kernels.js";
import { Nest } from "./nest.js";
import { PartNest } from "./part_nests.js";
import { Gpu } from "./gpu.js";
import { Problem } from "./problem.js";
import { timedStep } from "./gpu_attention.js";
import { Training } from "./training.js";
import { GpuDecoder, GpuModel } from "./gpu_decoder.js";
import { CpuDecoder, Writer } from "./writer.js";

const AT_ONCE = 128; // most tokens of a call
const LEAST_TICKS_MS = 10; // shortest time that is measured
const FAR = 16; // characters
const ENDLESS = 2 ** 31 - 1; // tokens of a text of a model with a window

export class Session {
  // module: of a build. {config, characters}. Raises Problem if the files are not a
  // checkpoint's.
  async load({ config, characters, weights, precision, module }) {
    this.module = module;
    this.checkpoint = readCheckpoint({ config, characters, weights });
    this.precision = PRECISIONS.indexOf(precision);
    await this.restart();
    return { config: this.checkpoint.config, characters };
  }

  // Begins a run of Training; its more() and files() follow.
  async openTraining(request) {
    this.training = await Training.of(request);
    return this.training.state();
  }

  moreTraining(request) { return this.training.more(request); }

  trained() { return this.training.files(); }

  // A fresh instance: after a refusal the old one has lost its stack.
  async restart() {
    this.writer = this.decoder = this.wall = null;
    this.observations = {};
    this.kernels = await Kernels.of(this.module);
    this.handle = this.kernels.openCheckpoint(this.checkpoint);
  }

  // Opens the GPU, for the checkpoint. {name, isCpu} or {why}, a sentence.
  async openGpu() {
    try {
      if (!this.gpu || this.gpu.gpu.isLost) {
        const precision = PRECISIONS[this.precision];
        this.gpu = await GpuModel.of(await Gpu.open(), await shaders(), this.checkpoint, precision);
      }
      return { name: this.gpu.gpu.name, isCpu: this.gpu.gpu.isCpu };
    } catch (error) {
      return { why: error.message };
    }
  }

  // Begins a text. request: as Writer's, with `part`, a name, `forced` as pairs, seed, sampling {name: value}
  // and onGpu, after an openGpu() without `why`. {why}: the CPU writes it. With a window, capacity has no effect.
  begin(request) {
    const { window, eos_token_id: ends } = this.checkpoint.config,
      capacity = window ? ENDLESS : request.capacity;
    this.request = { ...request, capacity, ends, forced: new Map(request.forced) };
    this.onGpu?.close();
    this.onGpu = null;
    if (!request.onGpu) return this.beginOnCpu();
    try {
      this.onGpu = new GpuDecoder(this.gpu, this.kernels, { ...request, seeds: [request.seed] });
      this.writer = new Writer(this.onGpu, this.request);
      return {};
    } catch (error) {
      return { ...this.beginOnCpu(), ...reason(error) };
    }
  }

  beginOnCpu() {
    const { request } = this,
      { vocab_size } = this.checkpoint.config;
    this.open(this.kernels.part(request.part), request.capacity);
    this.writer = new Writer(new CpuDecoder(this.kernels, this.decoder.at, vocab_size, request), request);
    return {};
  }

  // Begins texts of the same prompt and settings on the GPU, after openGpu(). {why} if it does not take them.
  async beginWall({ ids, seeds, sampling, capacity }) {
    for (const decoder of this.wall ?? []) decoder.close();
    this.wall = [];
    const { gpu, config } = this.gpu,
      { maxStorageBufferBindingSize: most } = gpu.limits,
      together = Math.max(1, Math.floor(most / Math.max(this.gpu.cached(capacity), 8 * config.vocab_size)));
    let why;
    gpu.device.pushErrorScope("out-of-memory");
    try {
      for (let i = 0; i < seeds.length; i += together) {
        const texts = { seeds: seeds.slice(i, i + together), sampling, capacity, keepsLogits: false };
        this.wall.push(new GpuDecoder(this.gpu, this.kernels, texts));
        this.wall.at(-1).prefill(ids, false);
      }
    } catch (error) {
      ({ why } = reason(error));
    }
    if (await gpu.device.popErrorScope()) why = `${gpu.name} has too little memory for so many texts`;
    return { why };
  }

  // Writes 1 to `most` tokens of each of some of those texts: {tokens (rows, texts), texts, isLast}, or {why}.
  async moreWall({ number, most }) {
    try {
      const { tokens } = await this.wall[number].write(most);
      return { tokens, texts: this.wall[number].count, isLast: number === this.wall.length - 1 };
    } catch (error) {
      return reason(error);
    }
  }

  // Keeps the decoder for the next text, because it packs and rounds the weights.
  open(part, capacity) {
    if (this.decoder?.part === part && this.decoder.capacity === capacity) return;
    if (this.decoder) this.kernels.call("close_decoder", this.decoder.at);
    this.decoder = null;
    const at = this.kernels.call("open_decoder", this.handle, this.precision, part, ...TILE, capacity);
    this.decoder = { at, part, capacity };
  }

  // Writes 1 to `most` tokens, for half a frame: {tokens, logits of each, isEnd, elapsed milliseconds}.
  // After the loss of the GPU the CPU writes the text again from its seed and goes on: then `why` says so.
  async more({ most }) {
    const start = performance.now(),
      count = Math.min(most, AT_ONCE),
      write = async () => ({ ...(await this.writer.write(count)), elapsed: performance.now() - start });
    try {
      return await write();
    } catch (error) {
      if (!this.onGpu) throw error;
      const lost = reason(error),
        { written } = this.writer;
      this.onGpu = null;
      this.beginOnCpu();
      while (this.writer.written < written) await this.writer.write(written - this.writer.written);
      return { ...(await write()), ...lost };
    }
  }

  // The probabilities from which a token is drawn. ids: the tokens before it, of which the first `prompt` were given.
  distribution({ logits, ids, prompt, sampling }) {
    const { kernels } = this,
      row = Float32Array.from(logits),
      text = Int32Array.from(ids),
      made = new Float64Array(row.length);
    kernels.call("distribution", row, row.length, text, text.length, prompt, kernels.inOrder(sampling), made);
    return made;
  }

  // Reads a text of at most block_size tokens, named `of`. maps: for layer * heads + head a Float32Array
  // (size, size), each cell's largest weight. telling: {layer, head} with the largest reach().
  observe({ of = "text", ids, size = 1 }) {
    const { kernels } = this,
      { n_layer: layers, n_head: heads, n_embd } = this.checkpoint.config,
      T = ids.length;
    if (this.observations[of]) kernels.call("close_observation", this.observations[of].at);
    delete this.observations[of];
    const at = kernels.call("observe", this.handle, this.precision, Int32Array.from(ids), T);
    this.observations[of] = { at, T, d: n_embd / heads };
    const maps = [];
    let telling = { far: -1 };
    for (let layer = 0; layer < layers; layer++) {
      for (let head = 0; head < heads; head++) {
        const P = this.weights({ of, layer, head }),
          far = reach(P, T);
        maps.push(shrunk(P, T, Math.min(size, T)));
        if (far > telling.far) telling = { layer, head, far };
      }
    }
    return { T, layers, heads, d: n_embd / heads, maps, telling };
  }

  // Attention's weights (T, T) of a head: query by key.
  weights({ of = "text", layer, head }) {
    const { at, T } = this.observations[of],
      P = new Float32Array(T * T);
    this.kernels.call("observed_weights", at, layer, head, P);
    return P;
  }

  // q, k and v (T, d) of a head, and ALiBi's slope.
  heads({ of = "text", layer, head }) {
    const { at, T, d } = this.observations[of],
      all = new Float32Array(3 * T * d);
    this.kernels.call("observed", at, layer, head, all);
    const [q, k, v] = [0, 1, 2].map((i) => all.slice(i * T * d, (i + 1) * T * d));
    return { q, k, v, T, d, slope: this.kernels.call("observed_slope", at, head) };
  }

  // The walk (nest.js) of a part, or of a script (part "script"), behind caches (caches.js): {frames, first,
  // matrices, isTurned}. A script's has `computed` and the bytes of our `parts` too, or is {why}, a sentence.
  tiles({ part, script, sizes, l1, l2 }) {
    const walked = (nest) => {
      const walk = simulate(nest.frames(), nest.matrices, l1, l2);
      return { ...walk, matrices: nest.matrices, isTurned: nest.isTurned, computed: nest.computed() };
    };
    const own = (name) => walked(new PartNest(name, sizes));
    if (part !== "script") return own(part);
    try {
      const walk = walked(new Nest(script, sizes)),
        parts = Object.fromEntries(Object.keys(NESTS).map((name) => [name, own(name).frames.at(-1).bytes]));
      return { ...walk, parts };
    } catch (error) {
      return reason(error);
    }
  }

  // Calls a part on noise: q, k, v and the output (heads, N, d), one after the other at the address `data`.
  // Then use(again, data, scratch): again() repeats the call, scratch is a number of floats.
  /** @type {(call: any, use: (again: () => void, data: number, scratch: number) => any) => any} */
  called({ part, heads, N, d }, use) {
    const { kernels } = this,
      sizes = [kernels.part(part), heads, N, d, ...TILE],
      inputs = 3 * heads * N * d,
      scratch = kernels.call("scratch_floats", ...sizes);
    return kernels.with(4 * (inputs + heads * N * d + scratch), (data) => {
      const again = () => kernels.call("attend", ...sizes, data);
      kernels.view(Float32Array, data, inputs).set(Array.from({ length: inputs }, () => 2 * Math.random() - 1));
      again(); // touches all memory
      return use(again, data, scratch);
    });
  }

  // The least milliseconds of a part's calls, which fill `ms`, and its bytes of scratch.
  attention({ ms = 150, ...call }) {
    return this.called(call, (again, _, scratch) => ({ milliseconds: timed(again, ms), scratch: 4 * scratch }));
  }

  // A step in WGSL, compared with part 4: {name, isCpu, milliseconds, isRight}, or {why} it does not run.
  /** @param {any} call */
  async gpuAttention({ step, ...sizes }) {
    try {
      if (!this.measured || this.measured.isLost) this.measured = await Gpu.open();
      const floats = 4 * sizes.heads * sizes.N * sizes.d,
        copy = (_, data) => this.kernels.view(Float32Array, data, floats).slice(),
        example = this.called({ part: "part4", ...sizes }, copy);
      return await timedStep(this.measured, (await shaders()).steps[step], sizes, example);
    } catch (error) {
      return reason(error);
    }
  }

  // Operations per second of multiply-adds in registers.
  peak({ ms = 200 } = {}) {
    const steps = 200_000,
      multiply = () => this.kernels.call("multiply_adds", steps);
    return (multiply() / timed(multiply, ms)) * 1e3;
  }

  // Bytes per second of sequential reads from a buffer.
  bandwidth({ bytes, ms = 150 }) {
    const floats = Math.floor(bytes / 64) * 16;
    return this.kernels.with(4 * floats, (data) => {
      this.kernels.view(Float32Array, data, floats).fill(1);
      const read = () => this.kernels.call("read_floats", data, floats);
      return (read() / timed(read, ms)) * 1e3;
    });
  }

  // The sizes that the kernels are compiled with, as traffic.js takes them.
  block() {
    const sizes = new Float64Array(BLOCK.length);
    this.kernels.call("block", sizes);
    return Object.fromEntries(BLOCK.map((name, n) => [name, sizes[n]]));
  }
}

const shaders = async () => (await fetch(new URL("../shaders.json", import.meta.url))).json();

// {why} of a Problem; throws others again.
function reason(error) {
  if (error instanceof Problem) return { why: error.message };
  throw error;
}

// The least milliseconds of a call. Short calls are timed together: a browser's clock may tick once in 1 ms.
function timed(call, ms) {
  const clock = () => performance.now(),
    start = clock();
  let together = 1,
    least = Infinity;
  do {
    const begin = clock();
    for (let i = 0; i < together; i++) call();
    const elapsed = clock() - begin;
    if (elapsed < LEAST_TICKS_MS) together *= 2;
    else least = Math.min(least, elapsed / together);
  } while (least === Infinity || clock() - start < ms);
  return least;
}

// The sum over queries of the largest weight on a key at least FAR characters back. It is small for heads
// that attend to neighbours only and for heads that attend to all keys alike.
export function reach(P, T) {
  let sum = 0;
  for (let i = FAR; i < T; i++) {
    let largest = 0;
    for (let j = 0; j <= i - FAR; j++) largest = Math.max(largest, P[i * T + j]);
    sum += largest;
  }
  return sum;
}

// P (T, T) as size x size cells, each its largest weight.
export function shrunk(P, T, size) {
  const map = new Float32Array(size * size);
  for (let i = 0; i < T; i++) {
    const row = Math.floor((i * size) / T) * size;
    for (let j = 0; j <= i; j++) {
      const cell = row + Math.floor((j * size) / T);
      map[cell] = Math.max(map[cell], P[i * T + j]);
    }
  }
  return map;
}
