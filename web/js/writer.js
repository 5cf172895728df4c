// @ts-check
// Writes a text with a decoder, as generation/writer.py and generation/texts.py do.

export class Writer {
  /** @type {any} */ decoder;
  /** @type {any} */ request;
  capacity = 0;

  // decoder: a CpuDecoder or a GpuDecoder, with a text begun. request: {ids, context: 'slide' or 'reset', useCache,
  // capacity: tokens that the decoder holds, forced: Map from the number of a new token to its id, ends: ids that
  // end the text}.
  constructor(decoder, request) {
    Object.assign(this, { decoder, request, capacity: request.capacity });
    this.last = request.ids.slice(-this.capacity); // the tokens that may be read again
    this.held = 0; // tokens in the decoder; 0 before the prompt is read
    this.written = 0;
  }

  get isFull() { return this.held > this.capacity; }

  // Reads the prompt, or the window again.
  read() {
    let count = this.capacity;
    if (this.isFull && this.request.context === "reset") count = Math.max(1, this.capacity >> 1);
    else if (this.held > 0 && !this.isFull) count = this.held;
    this.load(count);
  }

  load(count) {
    const ids = this.last.slice(-count);
    this.decoder.prefill(ids, this.held > 0);
    this.held = ids.length;
  }

  // Writes 1 to `most` tokens, at most as many as the window has room for: {tokens, logits (tokens, vocabSize),
  // isEnd}. At the end of the text those before the token that ends it.
  async write(most) {
    const { capacity } = this,
      { useCache, forced, ends } = this.request;
    if (this.held === 0 || this.isFull || (!useCache && this.written > 0)) this.read();
    most = Math.min(most, useCache ? capacity + 1 - this.held : 1);
    for (let i = 0; i < most; i++) if (forced?.has(this.written + i)) most = i + 1;
    const { tokens: ids, logits } = await this.decoder.write(most),
      tokens = [...ids];
    this.written += tokens.length;
    this.held += tokens.length;
    const other = forced?.get(this.written - 1);
    if (other !== undefined) tokens[tokens.length - 1] = other;
    this.last.push(...tokens);
    if (other !== undefined && !this.isFull) this.load(this.held);
    if (this.last.length > 4 * capacity) this.last = this.last.slice(-capacity);
    const end = tokens.findIndex((id) => ends.includes(id));
    if (end < 0) return { tokens, logits, isEnd: false };
    const rows = (logits.length / tokens.length) * end;
    return { tokens: tokens.slice(0, end), logits: logits.subarray(0, rows), isEnd: true };
  }
}

// A decoder of the kernels, which begins a text; its own text is dropped.
export class CpuDecoder {
  /** @type {import("./kernels.js").Kernels} */ kernels;
  at = 0;
  vocabSize = 0;

  // at: its address.
  constructor(kernels, at, vocabSize, { seed, sampling }) {
    Object.assign(this, { kernels, at, vocabSize });
    kernels.call("begin_text", at, BigInt(seed), kernels.inOrder(sampling));
  }

  prefill(ids, continues) {
    this.kernels.call("prefill", this.at, Int32Array.from(ids), ids.length, continues ? 1 : 0);
  }

  write(most) {
    const { vocabSize: V } = this,
      ids = new Int32Array(most),
      rows = new Float32Array(most * V),
      count = this.kernels.call("write_tokens", this.at, most, ids, rows);
    return { tokens: ids.subarray(0, count), logits: rows.slice(0, count * V) };
  }
}

// The text before a stop string in it, or null without one. from: the start of the new text.
/** @param {string} text @param {string} stop @param {number} from @returns {string | null} */
export function stopped(text, stop, from) {
  const at = text.indexOf(stop, Math.max(0, from - stop.length + 1));
  return at < 0 ? null : text.slice(0, at);
}
