// The view Race: the parts write the same text one after the other, and are shown at their relative speeds.
import { $, brief, copy, frame, isStill, make, number, onSubmit, say, tableRow } from "./dom.js";
import { encode } from "./checkpoint.js";
import { FASTEST } from "./facts.js";

const CASE = { heads: 4, N: 1024, d: 32 };
const MODEL = "shakes1024"; // has the long window
const LONGEST_SHOW = 9; // seconds in which the slowest part is shown
const PROMPT = "GLOUCESTER:\n",
  SEED = 1; // seed of the text that fills the window
const WARM_UPS = 2; // browsers optimise a kernel after its first runs

export class RaceView {
  constructor(page) {
    this.page = page;
    onSubmit("race-form", (button) => {
      page.measured("race", button, () => this.run(page.choices.window, page.choices.count));
    });
  }

  // The parts of the kernels, as a Session has them.
  offer(parts) {
    if (this.parts) return;
    this.parts = parts;
    this.lanes = Object.fromEntries(parts.map((part) => [part.name, this.newLane(part)]));
  }

  newLane({ name, algorithm }) {
    const box = copy("lane"),
      [title, time, { children }] = box.children,
      [past, text] = children;
    title.append(name, make("small", {}, algorithm));
    $("lanes").append(box);
    return { box, time, past, text };
  }

  hide() {
    this.cancelled = true;
  }

  async run(size, count) {
    this.cancelled = false;
    say("race-status", `Loading ${MODEL} …`);
    this.engine ??= await this.page.models.engine(MODEL, "bf16", (share) => this.page.progress(share));
    this.page.progress(1);
    this.offer(this.engine.parts);
    const past = await this.past(size);
    for (const lane of Object.values(this.lanes)) {
      lane.past.textContent = `… ${this.written(past.slice(-80)).replace(/^\S*\s/, "")}`;
      lane.text.textContent = lane.time.textContent = "";
      lane.box.classList.remove("won");
    }
    const runs = {};
    for (const { name: part } of [...this.parts].reverse()) {
      if (this.cancelled) break;
      say("race-status", `${part} writes ${count} characters, each after reading ${number(size)} again …`);
      runs[part] = await this.measure(part, past, count);
    }
    if (!this.cancelled) await this.replay(runs, count);
    if (!this.cancelled) await this.alone();
    if (this.cancelled) say("race-status", "Stopped, because another view was shown.");
  }

  written(tokens) {
    return tokens.map((id) => this.engine.characters[id]).join("");
  }

  begin(ids, part, seed, capacity, useCache) {
    const sampling = { temperature: 0.8 };
    return this.engine.call("begin", { ids, part, seed, capacity, useCache, sampling, context: "slide" });
  }

  // The tokens of a text of a length, written with a cache.
  async past(size) {
    const { characters, config } = this.engine,
      ids = encode(PROMPT, characters);
    await this.begin([...ids], "part4", SEED, config.block_size, true);
    while (ids.length < size) ids.push(...(await this.engine.call("more", { most: size - ids.length })).tokens);
    return ids;
  }

  // {text, ends: milliseconds at which each character is there} of a part that reads the whole window again and again.
  async measure(part, past, count) {
    const begin = () => this.begin(past, part, SEED + 1, past.length, false),
      more = () => this.engine.call("more", { most: 1 });
    for (let i = 0; i < WARM_UPS; i++) {
      await begin();
      await more();
    }
    await begin();
    const run = { text: "", ends: [] },
      lane = this.lanes[part];
    while (run.ends.length < count && !this.cancelled) {
      const { tokens, elapsed } = await more();
      run.text += this.written(tokens);
      run.ends.push((run.ends.at(-1) ?? 0) + elapsed);
      lane.text.textContent = run.text;
      lane.time.textContent = `${number(run.ends.length)} of ${number(count)}`;
    }
    return run;
  }

  // Shows all parts side by side, with the measured times.
  async replay(runs, count) {
    const totals = Object.values(runs).map(({ ends }) => ends.at(-1)),
      fastest = Math.min(...totals),
      atOnce = isStill(),
      factor = Math.max(1, Math.max(...totals) / 1e3 / LONGEST_SHOW);
    const faster = factor > 1 && !atOnce ? `, ${brief(factor)} times as fast as it was` : "";
    say("race-status", `Measured one after the other; now side by side at their true relative speed${faster}.`);
    const start = performance.now();
    for (let done = false; !done && !this.cancelled; await frame()) {
      const now = atOnce ? Infinity : (performance.now() - start) * factor;
      done = true;
      for (const [part, { text, ends }] of Object.entries(runs)) {
        const { box, text: shown, time } = this.lanes[part],
          at = ends.filter((end) => end <= now).length,
          total = ends.at(-1);
        shown.textContent = text.slice(0, at);
        box.classList.toggle("won", at === count && total === fastest);
        const each = at < count ? "" : `, ${brief(total / count)} ms a character`;
        time.textContent = `${brief((at < count ? now : total) / 1e3)} s${each}`;
        done &&= at === count;
      }
    }
  }

  // Bars with the time of one call of attention.
  async alone() {
    const calls = [];
    for (const { name: part, algorithm } of this.parts) {
      const { milliseconds } = await this.engine.call("attention", { part, ...CASE });
      calls.push({ part, title: `${part}, ${algorithm}`, milliseconds });
    }
    const timeOf = (name) => calls.find(({ part }) => part === name).milliseconds,
      gain = brief(timeOf("part1") / timeOf("part4")),
      gpu = await this.onGpu();
    if (gpu) calls.push({ title: `part4 in WGSL, ${gpu.name}`, ...gpu });
    const most = Math.max(...calls.map(({ milliseconds }) => milliseconds));
    const rows = calls.map(({ title, milliseconds }) => {
      const bar = make("i");
      bar.style.width = `${(100 * milliseconds) / most}%`;
      return tableRow(title, bar, brief(milliseconds));
    });
    $("alone").tBodies[0].replaceChildren(...rows);
    const slow = gpu?.isCpu ? ` ${gpu.name} is a driver on the CPU, so it is slow.` : "";
    $("race-status").append(` Attention alone: part4 is ${gain} times as fast as part1 here.${slow}`);
  }

  // A call of the fastest step that the GPU runs, {name, isCpu, milliseconds}; undefined without one.
  async onGpu() {
    for (const step of FASTEST) {
      const call = await this.engine.callWithShaders("gpuAttention", { step, ...CASE });
      if (call.isRight) return call;
    }
  }
}
