// @ts-check
// The view Wall: texts of neighbouring seeds, written at once on the GPU, or fewer one after the other on the CPU.
import { $, frame, make, number, onSubmit, say } from "./dom.js";
import { encode } from "./checkpoint.js";
import { format } from "./choices.js";
import { MOST_SEED, sampling } from "./state.js";

const TEXTS = { gpu: 1000, browser: 32 };
const LENGTH = 100; // characters, or the window if that is less

export class WallView {
  constructor(page) {
    this.page = page;
    onSubmit("wall-form", (button) => page.measured("wall", button, () => this.run(Number($("wall-count").value))));
  }

  async show() {
    const engine = await this.page.ready();
    if (!engine) return;
    const { why } = await engine.openGpu();
    $("wall-count").value ||= TEXTS[why ? "browser" : "gpu"];
    say("wall-note", why ? `The CPU writes the texts one after the other, as the GPU cannot: ${why}.` : "");
  }

  hide() { this.cancelled = true; }

  async run(count) {
    this.cancelled = false;
    const { page } = this,
      engine = await page.ready();
    if (!engine) return;
    const length = Math.max(1, Math.min(LENGTH, engine.config.block_size - 1)),
      choices = { ...page.choices, length, branches: "", stop: "" };
    const seeds = Array.from({ length: count }, (_, i) => String((BigInt(choices.seed) + BigInt(i)) % MOST_SEED));
    this.nodes = seeds.map((seed) => {
      const href = format("write", { ...choices, seed });
      return make("a", { href, title: `Seed ${seed}: open it in Write` });
    });
    $("texts").replaceChildren(...this.nodes);
    const start = performance.now();
    let { why } = await engine.openGpu();
    why ||= await this.onGpu(engine, seeds, choices);
    if (why) await this.onCpu(engine, seeds, choices);
    if (this.cancelled) return say("wall-status", "Stopped, because another view was shown.");
    const seconds = (performance.now() - start) / 1e3,
      speed = number(Math.round((count * length) / seconds)),
      by = why ? "the CPU" : engine.gpuName;
    return say("wall-status", `${number(count)} texts by ${by}: ${speed} characters a second, with all that is shown.`);
  }

  // Returns why the GPU did not write them, if so. Only the end of a prompt that the window holds is used.
  async onGpu(engine, seeds, choices) {
    const { length } = choices,
      room = Math.max(1, engine.config.block_size - length),
      ids = encode(choices.prompt || "\n", engine.characters).slice(-room),
      ends = engine.config.eos_token_id,
      request = { ids, seeds, sampling: sampling(choices), capacity: Math.min(engine.config.block_size, ids.length + length) };
    const { why } = await engine.call("beginWall", request);
    if (why) return why;
    for (let number = 0, first = 0, isLast = false; !isLast; number++) {
      let texts = 0;
      const ended = new Set();
      for (let done = 0; done < length && !this.cancelled; await frame()) {
        const made = await engine.call("moreWall", { number, most: length - done });
        if (made.why) return made.why;
        ({ texts, isLast } = made);
        const rows = made.tokens.length / texts;
        for (let i = 0; i < texts; i++) {
          let piece = "";
          for (let row = 0; row < rows; row++) {
            const token = made.tokens[row * texts + i];
            if (ends.includes(token)) ended.add(i);
            if (!ended.has(i)) piece += engine.characters[token];
          }
          this.nodes[first + i].append(piece);
        }
        done += rows;
        say("wall-status", `${done} of ${length} characters`);
      }
      if (this.cancelled) return "";
      first += texts;
    }
    return "";
  }

  async onCpu(engine, seeds, choices) {
    for (const [i, seed] of seeds.entries()) {
      this.nodes[i].textContent = "";
      await engine.begin({ ...choices, seed, where: "browser" });
      for (let done = 0, isEnd = false; done < choices.length && !isEnd && !this.cancelled; ) {
        const next = await engine.more(choices.length - done);
        ({ isEnd } = next);
        this.nodes[i].append(next.piece);
        done += next.piece.length;
      }
      if (this.cancelled) return;
      say("wall-status", `${i + 1} of ${number(seeds.length)} texts`);
    }
  }
}
