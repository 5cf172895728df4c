// @ts-check
// A text while it is written: its characters, the logits of each, and the speed. The source is an Engine or a
// Server: begin(choices), then more(most) gives {piece, logits | null, isEnd, elapsed ms}, or null at the end.
import { frame, isStill } from "./dom.js";
import { parseBranches } from "./state.js";
import { stopped } from "./writer.js";

export class Writing {
  /** @type {any} */ source;
  /** @type {Record<string, any>} */ choices;

  // choices: those of state.js.
  constructor(source, choices) {
    Object.assign(this, { source, choices, prompt: choices.prompt });
    this.text = "";
    this.logits = []; // one row for each character of `text`; none by a server
    this.milliseconds = 0;
    this.running = true;
  }

  get written() { return this.text.length; }
  get speed() { return this.written / (this.milliseconds / 1e3); }

  halt() {
    this.running = false;
    this.source.halt();
  }

  // Writes until the end, a stop string or halt(). show(piece) is called for each new piece; true: cut off.
  async run(show) {
    const { source, choices } = this,
      { length } = choices,
      pace = source.isPaced && !isStill() ? Number(choices.pace) : 0,
      hurry = parseBranches(choices.branches).at(-1)?.[0] ?? 0; // the text before a branch was shown already
    try {
      await source.begin(choices);
      let start = performance.now();
      while (this.running && this.written < length) {
        let most = Math.min(length - this.written, 4096);
        if (this.written < hurry) {
          most = Math.min(most, hurry - this.written);
          start = performance.now();
        } else if (pace) {
          const due = hurry + Math.floor(((performance.now() - start) / 1e3) * pace);
          most = Math.min(most, due - this.written);
        }
        if (most > 0) {
          const next = await source.more(most);
          if (!next || !this.running) break;
          this.add(next, show);
        }
        await frame();
      }
    } catch (error) {
      if (this.running) throw error;
    } finally {
      this.running = false;
    }
  }

  add({ piece, logits, isEnd, elapsed }, show) {
    const { stop } = this.choices,
      before = this.text.length;
    this.text += piece;
    this.milliseconds += elapsed;
    const V = (logits?.length ?? 0) / piece.length;
    for (let i = 0; V && i < piece.length; i++) this.logits.push(logits.subarray(i * V, (i + 1) * V));
    if (isEnd) this.running = false;
    const whole = stop ? stopped(this.text, stop, before) : null;
    if (whole !== null) {
      this.text = whole;
      this.logits.length = Math.min(this.logits.length, whole.length);
      this.running = false;
    }
    show(piece, whole !== null);
  }
}
