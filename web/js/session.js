// The work of the page's worker: it holds a checkpoint and answers calls by name. It uses no DOM, so it runs in node.
import { Kernels, PRECISIONS, Refused } from "./kernels.js";
import { readCheckpoint } from "./checkpoint.js";
import { Writer } from "./writer.js";

const LONGEST_MS = 8; // limit of a call that writes: half a frame
const BR = 192,
  BC = 256; // part4's tile; no text depends on it
const LEAST_TICKS_MS = 10; // shortest time that is measured
const FAR = 16; // characters

export class Session {
  // wasm: the bytes of a build.
  async compile({ wasm }) {
    this.module = await WebAssembly.compile(wasm);
  }

  // {config, characters, parts of the kernels}. Raises CheckpointError if the files are not a checkpoint's.
  async load({ config, characters, weights, precision }) {
    const checkpoint = readCheckpoint({ config, characters, weights });
    this.precision = PRECISIONS.indexOf(precision);
    this.checkpoint = checkpoint;
    await this.restart();
    return { config, characters, parts: this.kernels.parts };
  }

  // A fresh instance: after a refusal the old one has lost its stack.
  async restart() {
    this.writer = this.decoder = null;
    this.observations = {};
    this.kernels = await Kernels.of(this.module);
    this.handle = this.kernels.openCheckpoint(this.checkpoint);
  }

  // Begins a text; see Writer for the request, whose `part` is a name and `forced` a list of pairs here.
  begin(request) {
    const { block_size, vocab_size } = this.checkpoint.config,
      { ids, capacity } = request;
    if (!(capacity >= 1 && capacity <= block_size)) {
      throw new Refused(`capacity is ${capacity}; it must be from 1 to the block size, ${block_size}`);
    }
    if (!ids.length || !ids.every((id) => id >= 0 && id < vocab_size))
      throw new Refused("the prompt has no tokens of the model");
    this.writer = null;
    this.open(this.kernels.part(request.part), capacity);
    this.writer = new Writer(this.kernels, this.decoder.at, vocab_size, {
      ...request,
      forced: new Map(request.forced ?? []),
    });
  }

  // Keeps the decoder for the next text, because it packs and rounds the weights.
  open(part, capacity) {
    if (this.decoder?.part === part && this.decoder.capacity === capacity) return;
    const { c } = this.kernels;
    if (this.decoder) c.close_decoder(this.decoder.at);
    this.decoder = null;
    const at = c.open_decoder(this.handle, this.precision, part, BR, BC, capacity);
    this.decoder = { at, part, capacity };
  }

  // Writes 1 to `most` tokens, for half a frame at most: {tokens, logits, seconds of each token}.
  more({ most, perToken = false }) {
    const start = performance.now(),
      V = this.checkpoint.config.vocab_size;
    const tokens = [],
      blocks = [],
      milliseconds = [];
    while (tokens.length < most && (tokens.length === 0 || performance.now() - start < LONGEST_MS)) {
      const before = performance.now();
      const written = this.writer.write(perToken ? 1 : Math.min(16, most - tokens.length));
      const each = (performance.now() - before) / written.tokens.length;
      written.tokens.forEach((token) => {
        tokens.push(token);
        milliseconds.push(each);
      });
      blocks.push(written.logits);
    }
    const logits = new Float32Array(tokens.length * V);
    let at = 0;
    for (const block of blocks) {
      logits.set(block, at);
      at += block.length;
    }
    return { tokens, logits, milliseconds, elapsed: performance.now() - start };
  }

  // Reads a text of at most block_size tokens. Later calls refer to it by its name `of`; a name holds one text.
  observe({ of = "text", ids }) {
    const { kernels } = this;
    if (this.observations[of]) kernels.c.close_observation(this.observations[of].at);
    delete this.observations[of];
    const at = kernels.withInts(ids, (list) =>
      kernels.c.observe(this.handle, this.precision, list, ids.length),
    );
    this.observations[of] = { at, T: ids.length };
    const { n_layer, n_head, n_embd } = this.checkpoint.config;
    return { T: ids.length, layers: n_layer, heads: n_head, d: n_embd / n_head };
  }

  // Attention's weights (T, T) of a head: query by key.
  weights({ of = "text", layer, head }) {
    const { at, T } = this.observations[of],
      { kernels } = this;
    return kernels.with(4 * T * T, (to) => {
      kernels.c.observed_weights(at, layer, head, to);
      return kernels.floats(to, T * T).slice();
    });
  }

  // maps: each head's weights, the largest of each cell of a size x size map: Float32Array for layer * heads + head.
  // telling: {layer, head} of the head that looks back furthest (reach), for the views to begin with.
  maps({ of = "text", size }) {
    const { T } = this.observations[of],
      { n_layer, n_head } = this.checkpoint.config,
      maps = [];
    let telling = null,
      most = -1;
    for (let layer = 0; layer < n_layer; layer++) {
      for (let head = 0; head < n_head; head++) {
        const P = this.weights({ of, layer, head }),
          far = reach(P, T);
        maps.push(shrunk(P, T, Math.min(size, T)));
        if (far > most) [most, telling] = [far, { layer, head }];
      }
    }
    return { maps, telling };
  }

  // q, k and v (T, d) of a head.
  heads({ of = "text", layer, head }) {
    const { at, T } = this.observations[of],
      { kernels } = this,
      { n_embd, n_head } = this.checkpoint.config;
    const d = n_embd / n_head;
    const copy = (which) =>
      kernels.with(4 * T * d, (to) => {
        kernels.c.observed(at, layer, head, which, to);
        return kernels.floats(to, T * d).slice();
      });
    return { q: copy(0), k: copy(1), v: copy(2), T, d };
  }

  // The time of a call of each part over noise, in milliseconds: the least of calls that fill `ms`.
  attention({ part, H, N, d, br = 192, bc = 256, causal = false, ms = 150 }) {
    const { c } = this.kernels,
      call = c.open_call(this.kernels.part(part), H, N, d, br, bc, causal ? 1 : 0);
    c.run_call(call); // touches all memory
    const least = timed(() => c.run_call(call), ms);
    c.close_call(call);
    return least;
  }

  // Operations per second of multiply-adds in registers.
  peak({ ms = 200 } = {}) {
    const steps = 200_000;
    let work = 0;
    const least = timed(() => {
      work = this.kernels.c.multiply_adds(steps);
    }, ms);
    return work / (least / 1e3);
  }

  // Bytes per second of sequential reads from a buffer.
  bandwidth({ bytes, ms = 150 }) {
    const floats = Math.floor(bytes / 64) * 16,
      passes = Math.max(1, Math.ceil(2 ** 24 / bytes));
    return this.kernels.with(4 * floats, (data) => {
      this.kernels.floats(data, floats).fill(1);
      let moved = 0;
      const least = timed(() => {
        moved = this.kernels.c.read_floats(data, floats, passes);
      }, ms);
      return moved / (least / 1e3);
    });
  }

  // The sizes that the kernels are compiled with, as costs.js takes them.
  block() {
    const { c } = this.kernels;
    return {
      lanes: c.lanes(),
      panel: c.panel(),
      rows: c.rows(),
      part2Tile: c.part2_tile(),
      part2Depth: c.part2_depth(),
      part4Step: c.part4_step(),
    };
  }

  scratch({ part, H, N, d, br, bc }) {
    return 4 * this.kernels.c.scratch_floats(this.kernels.part(part), H, N, d, br, bc);
  }
}

// The least milliseconds of a call. Calls that are short are timed together: a browser's clock may tick once in 1 ms.
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

// The largest weight of each query on a key at least FAR characters back, added up. It is small for a head that looks
// at its neighbours, a bare diagonal, and for one that looks at everything alike, a grey triangle.
export function reach(P, T) {
  let sum = 0;
  for (let i = FAR; i < T; i++) {
    let largest = 0;
    for (let j = 0; j <= i - FAR; j++) largest = Math.max(largest, P[i * T + j]);
    sum += largest;
  }
  return sum;
}

// The largest of each cell, where P (T, T) is divided into size x size cells.
export function shrunk(P, T, size) {
  const map = new Float32Array(size * size);
  for (let i = 0; i < T; i++) {
    const row = Math.floor((i * size) / T) * size;
    for (let j = 0; j <= i; j++) {
      const cell = row + Math.floor((j * size) / T);
      if (P[i * T + j] > map[cell]) map[cell] = P[i * T + j];
    }
  }
  return map;
}
