// A text while it is written: tokens, the logits of each, and the speed.
import { encode } from "./checkpoint.js";
import { frame } from "./dom.js";
import { stopped } from "./writer.js";

const KEPT = 8192; // characters of an endless text that remain

export class Text {
  // choices: those of state.js. branches: [[position, character], ...].
  constructor(engine, choices, branches) {
    Object.assign(this, { engine, choices, branches });
    this.prompt = choices.prompt;
    this.text = "";
    this.logits = []; // one row for each character of `text`, from `dropped` on
    this.dropped = 0; // characters that were removed
    this.milliseconds = 0;
    this.running = true;
  }

  get written() {
    return this.dropped + this.text.length;
  }
  get speed() {
    return this.written / (this.milliseconds / 1e3);
  }

  halt() {
    this.running = false;
  }

  // Writes until the end, a stop string or halt(). shown(piece) is called for each new piece; true: cut off.
  async run(show) {
    const { engine, choices } = this,
      { characters, config } = engine,
      V = config.vocab_size;
    const endless = choices.endless === 1,
      stops = choices.stop ? [choices.stop] : [];
    const ids = encode(this.prompt || "\n", characters);
    const index = new Map(characters.map((c, i) => [c, i]));
    const known = this.branches.filter(([, c]) => index.has(c));
    await engine.call("begin", {
      part: "part4",
      ids,
      seed: BigInt(choices.seed),
      context: endless || choices.context === "reset" ? "reset" : "slide",
      useCache: true,
      sampling: { temperature: choices.temperature, topK: choices.topk, topP: choices.topp },
      capacity: endless ? config.block_size : Math.min(config.block_size, ids.length + choices.length),
      forced: known.map(([at, c]) => [at, index.get(c)]),
    });
    // At its pace an endless text moves least.
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches && !endless;
    const pace = isStill ? 0 : choices.pace;
    const hurry = this.branches.at(-1)?.[0] ?? 0; // the text before a branch was shown already
    let start = performance.now();
    while (this.running && (endless || this.written < choices.length)) {
      const left = endless ? Infinity : choices.length - this.written;
      let most = Math.min(left, 4096);
      if (this.written < hurry) most = Math.min(most, hurry - this.written);
      else if (pace)
        most = Math.min(most, Math.floor(((performance.now() - start) / 1e3) * pace) - this.written + hurry);
      if (most < 1) {
        await frame();
        continue;
      }
      const { tokens, logits, elapsed } = await engine.call("more", { most });
      if (!this.running) return;
      if (this.written < hurry) start = performance.now();
      this.milliseconds += elapsed;
      const piece = tokens.map((token) => characters[token]).join("");
      for (let i = 0; i < tokens.length; i++) this.logits.push(logits.subarray(i * V, (i + 1) * V));
      const before = this.text.length;
      this.text += piece;
      const whole = stops.length ? stopped(this.text, stops, before) : null;
      if (whole !== null) {
        this.text = whole;
        this.logits.length = whole.length;
        this.running = false;
        show("", true);
        return;
      }
      if (endless && this.text.length > KEPT) {
        const much = this.text.length - KEPT / 2;
        this.text = this.text.slice(much);
        this.logits.splice(0, much);
        this.dropped += much;
        show("", true);
      } else {
        show(piece, false);
      }
      await frame();
    }
    this.running = false;
  }
}
