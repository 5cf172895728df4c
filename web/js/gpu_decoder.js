// The decoder on a GPU, generation/csrc/webgpu/decoder.wgsl, whose header describes the buffers.
import { Unfit } from "./gpu.js";

const INVOCATIONS = 256; // of a workgroup
const TILES = [256, 128, 64, 32, 16]; // keys of attention's, the largest that fits
const STORAGE = 8; // buffers; the portable least too
const [FIRST, PROMPT] = [1, 2]; // flags of a text
const TEXT = 5; // words of a text
const DISPATCH_MS = 30; // no watchdog ends it

const quads = (numbers) => Math.ceil(numbers / 4);

// The numbers in [0, 1) of a seed, as Uniforms in generation/csrc/sampling.h has them: std::mt19937.
export class Uniforms {
  constructor(seed) {
    this.words = new Uint32Array(624);
    this.words[0] = Number(BigInt.asUintN(32, BigInt(seed)));
    for (let i = 1; i < 624; i++) {
      const before = this.words[i - 1];
      this.words[i] = Math.imul(before ^ (before >>> 30), 1812433253) + i;
    }
    this.at = 0;
  }

  bits() {
    const { words, at } = this,
      next = (at + 1) % 624,
      y = (words[at] & 0x80000000) | (words[next] & 0x7fffffff);
    words[at] = words[(at + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    let x = words[at];
    this.at = next;
    x ^= x >>> 11;
    x ^= (x << 7) & 0x9d2c5680;
    x ^= (x << 15) & 0xefc60000;
    return (x ^ (x >>> 18)) >>> 0;
  }

  next() {
    const upper = this.bits() & 0x1fffff;
    return (upper * 2 ** 32 + this.bits()) / 2 ** 53;
  }
}

// The compiled decoder and the weights of a checkpoint on a GPU.
export class GpuModel {
  // shaders: texts of WGSL by name. Raises Unfit.
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
    if (A > INVOCATIONS || !tiles.length) throw new Unfit("the model is too wide for a workgroup of this GPU");
    if (gpu.limits.maxStorageBuffersPerShaderStage < STORAGE) throw new Unfit(`${gpu.name} has too few buffers`);
    const constants = {
      ...{ LAYERS: n_layer, HEADS: n_head, HEAD_DIM: d, VOCAB: vocab_size, BIAS: Number(bias) },
      TILE: tiles.findLast((tile) => tile >= block_size) ?? tiles[0],
    };
    const pipeline = await gpu.pipeline([shaders["cache_fp32.wgsl"], shaders["decoder.wgsl"]], "decode", { constants });
    return Object.assign(new GpuModel(), { gpu, config, pipeline, A, weights: gpu.buffer(packed(config, tensors, precision)) });
  }

  // Bytes of a text's keys, and of its values.
  cached(capacity) {
    return 16 * this.config.n_layer * this.A * capacity;
  }
}

// The weights in the decoder's order. precision: 'bf16' rounds the head, as the kernels do; the file has it in float32,
// because it is the tokens' table too.
export function packed({ n_layer, n_head, n_embd: C, vocab_size: V, bias = true }, tensors, precision) {
  const d = C / n_head,
    W = quads(C),
    D = 4 * quads(d),
    A = (n_head * D) / 4,
    parts = [],
    data = (name) => tensors.get(name).data,
    straight = (i) => i,
    byHead = (i) => Math.floor(i / d) * D + (i % d), // each head begins a quad
    qkv = (i) => Math.floor(i / C) * 4 * A + byHead(i % C);
  // rows x columns numbers, each at its place of K x N quads
  const place = (K, N, rows, columns, at, value) => {
    const made = new Float32Array(K * N);
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) made[at(r, c)] = value(r, c);
    parts.push(made);
  };
  const vector = (name, count, N, to) => place(1, 4 * N, 1, count, (_, c) => to(c), (_, c) => data(name)[c]);
  const matrix = (name, inputs, K, from, outputs, N, to) => {
    const w = data(`${name}.weight`);
    place(4 * K, 4 * N, inputs, outputs, (r, c) => from(r) * 4 * N + to(c), (r, c) => w[c * inputs + r]);
    if (bias) vector(`${name}.bias`, outputs, N, to);
  };
  const norm = (name) => {
    for (const kind of bias ? ["weight", "bias"] : ["weight"]) vector(`${name}.${kind}`, C, W, straight);
  };
  const table = (name) => {
    const w = data(name);
    place(w.length / C, 4 * W, w.length / C, C, (r, c) => r * 4 * W + c, (r, c) => w[r * C + c]);
  };
  table("transformer.wte.weight");
  for (let l = 0; l < n_layer; l++) {
    const block = `transformer.h.${l}`;
    norm(`${block}.ln_1`);
    matrix(`${block}.attn.c_attn`, C, W, straight, 3 * C, 3 * A, qkv);
    matrix(`${block}.attn.c_proj`, C, A, byHead, C, W, straight);
    norm(`${block}.ln_2`);
    matrix(`${block}.mlp.c_fc`, C, W, straight, 4 * C, C, straight);
    matrix(`${block}.mlp.c_proj`, 4 * C, C, straight, C, W, straight);
  }
  norm("transformer.ln_f");
  const wte = data("transformer.wte.weight"),
    round = precision === "bf16" ? rounded : straight,
    N = 4 * quads(V);
  place(4 * W, N, C, V, (r, c) => r * N + c, (r, c) => round(wte[c * C + r]));
  table("transformer.wpe.weight");
  const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

// Texts that are written together, of the same length: a decoder of Writer in writer.js.
export class GpuDecoder {
  // keepsLogits: whether write() returns those of the tokens. Raises Unfit.
  constructor(model, seeds, settings, capacity, keepsLogits = true) {
    Object.assign(this, { model, keepsLogits, capacity, count: seeds.length, held: 0, ids: [] });
    const { gpu, config } = model,
      V = config.vocab_size,
      cache = model.cached(capacity) * this.count;
    this.uniforms = seeds.map((seed) => new Uniforms(seed));
    const rows = new Float32Array(this.count * (10 + V));
    for (let i = 0; i < this.count; i++) rows.set(settings, 10 * i);
    this.params = gpu.buffer(32, GPUBufferUsage.UNIFORM);
    this.buffers = [cache, cache, 4 * V * this.count, 8 * V * this.count, rows].map((of) => gpu.buffer(of));
    this.milliseconds = 1 + this.count / 10; // of a token of each text
  }

  // The tokens that all texts read next, in place of those that they hold.
  prefill(ids, continues) {
    this.ids = Array(this.count).fill(ids);
    this.held = 0;
    this.flags = PROMPT + (continues ? 0 : FIRST);
  }

  // Writes 1 to `most` tokens of each text: {tokens (rows, texts), logits (rows, texts, vocab_size) or null}. Raises Lost.
  async write(most) {
    const { model, count, ids, uniforms, keepsLogits } = this,
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
    const halves = new Float32Array(work.buffer, 4 * uniformsAt);
    for (let i = 0; i < rows * count; i++) halves.set(halved(uniforms[i % count].next()), 2 * i);
    const sizes = [count, rows, this.capacity, count, uniformsAt, Number(keepsLogits), 0, 0],
      params = Uint32Array.from(sizes);
    new Float32Array(params.buffer)[6] = Math.LOG2E / Math.sqrt(config.n_embd / config.n_head);
    gpu.write(this.params, params);
    const size = 4 * rows * count * (1 + (keepsLogits ? V : 0)),
      own = [gpu.buffer(work), gpu.buffer(size)],
      all = [this.params, model.weights, ...this.buffers, ...own],
      out = await gpu.run(model.pipeline, all, [count], size);
    for (const buffer of own) buffer.destroy();
    const tokens = new Int32Array(out, 0, rows * count);
    if (tokens.some((token) => token < 0)) throw new Error("the model's logits hold NaN or infinity");
    this.held += read + rows - 1;
    this.ids = Array.from({ length: count }, (_, i) => [tokens[(rows - 1) * count + i]]);
    this.flags = 0;
    this.milliseconds = (performance.now() - start) / (read + rows - 1);
    return { tokens, logits: keepsLogits ? new Float32Array(out.slice(4 * rows * count)) : null };
  }

  close() {
    for (const buffer of [this.params, ...this.buffers]) buffer.destroy();
  }
}

// A float32 as the nearest bfloat16, ties to even.
function rounded(x) {
  const bits = new Uint32Array(new Float32Array([x]).buffer);
  bits[0] = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000;
  return new Float32Array(bits.buffer)[0];
}

// A number as the nearest float32 below it, and the rest.
function halved(x) {
  const upper = new Float32Array([x]);
  if (upper[0] > x) new Uint32Array(upper.buffer)[0]--;
  return [upper[0], x - upper[0]];
}

const NOTHING = [1, 0, 1, 0, 1, 1, 0, 0]; // settings that change nothing, in the kernels' order

// What the decoder is told of the choice of tokens. numbers: the settings in the kernels' order, NaN for none.
export function settingsOf(numbers) {
  const own = Array.from(numbers, (x, i) => (Number.isNaN(x) ? NOTHING[i] : x)),
    [temperature, , , , , repetition, presence, frequency] = own,
    adjusts = repetition !== 1 || presence !== 0 || frequency !== 0;
  if (temperature > 0) own[0] = Math.max(temperature, 1e-30);
  return [...own, Number(adjusts), Math.min(1e30, 1 / Math.max(temperature, 1e-300))];
}
