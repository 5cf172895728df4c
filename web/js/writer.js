// Writes a text with a decoder, as generation/writer.py and generation/generate.py do.
export class Writer {
  // decoder: its address; its text is dropped. request: {ids, seed, sampling, context: 'slide' or 'reset',
  // useCache, capacity: tokens that the decoder holds, forced: Map from the number of a new token to its id}.
  constructor(kernels, decoder, vocabSize, request) {
    Object.assign(this, { kernels, decoder, vocabSize, request, capacity: request.capacity });
    const { temperature, topK: top_k, topP: top_p } = request.sampling,
      sampling = { temperature, top_k, top_p };
    const names = kernels.string(kernels.c.sampling_names()).trim().split("\n");
    kernels.with(8 * names.length, (numbers) => {
      kernels.doubles(numbers, names.length).set(names.map((name) => sampling[name] ?? NaN));
      kernels.c.begin_text(decoder, BigInt(request.seed), numbers);
    });
    this.last = request.ids.slice(-this.capacity); // the tokens that may be read again
    this.held = 0; // tokens in the decoder; 0 before the prompt is read
    this.written = 0;
  }

  get isStale() {
    return this.held === 0 || (!this.request.useCache && this.written > 0) || this.held > this.capacity;
  }

  // Reads the prompt, or the window again.
  read() {
    let count = this.capacity;
    if (this.held > this.capacity && this.request.context === "reset") count = Math.max(1, this.capacity >> 1);
    else if (this.held > 0 && this.held <= this.capacity) count = this.held;
    this.load(this.last.slice(-count));
  }

  load(ids) {
    this.kernels.withInts(ids, (at) =>
      this.kernels.c.prefill(this.decoder, at, ids.length, this.held > 0 ? 1 : 0),
    );
    this.held = ids.length;
  }

  // Writes 1 to `most` tokens, as many as the window has room for: {tokens, logits (tokens, vocabSize)}.
  write(most) {
    if (this.isStale) this.read();
    const room = this.request.useCache ? this.capacity + 1 - this.held : 1;
    let count = Math.min(most, room);
    for (let i = 0; i < count; i++) if (this.request.forced?.has(this.written + i)) count = i + 1;
    const { kernels, vocabSize: V } = this;
    const result = kernels.with(count * /* tokens */ (4 + /* logits */ 4 * V), (tokens) => {
      const logits = tokens + 4 * count;
      kernels.c.write_tokens(this.decoder, count, tokens, logits);
      return { tokens: kernels.ints(tokens, count).slice(), logits: kernels.floats(logits, count * V).slice() };
    });
    this.written += count;
    const forced = this.request.forced?.get(this.written - 1);
    if (forced !== undefined) result.tokens[count - 1] = forced;
    this.last.push(...result.tokens);
    this.held += count;
    if (forced !== undefined && this.held <= this.capacity) this.load(this.last.slice(-this.held));
    if (this.last.length > 4 * this.capacity) this.last = this.last.slice(-this.capacity);
    return result;
  }
}

// The text before the first stop string in it, or null without one. from: the start of the new text.
export function stopped(text, stops, from = 0) {
  const longest = Math.max(0, ...stops.map((s) => s.length));
  const found = stops.map((s) => text.indexOf(s, Math.max(0, from - longest + 1))).filter((at) => at >= 0);
  return found.length ? text.slice(0, Math.min(...found)) : null;
}
