// @ts-check
// The view Race: the parts write the same text one after the other.
import { $, algorithmOf, brief, copy, make, number, onSubmit, say, tableRow } from "./dom.js";
import { encode } from "./checkpoint.js";
import { FASTEST, PARTS } from "./facts.js";
import { CALL } from "./measure.js";
import { openModel } from "./models.js";

const MODEL = "shakes1024"; // has the long window
const PROMPT = "GLOUCESTER:\n";
const SEED = 1; // of the text that fills the window
const WARM_UPS = 2; // browsers optimise a kernel after its first runs

export class RaceView {
  /** @type {import("./engine.js").Engine | undefined} */ engine;
  /** @type {Promise<any> | undefined} the engine of MODEL */
  usual;

  constructor(page) {
    this.page = page;
    this.lanes = Object.fromEntries(PARTS.map(this.newLane));
    onSubmit("race-form", (button) => {
      page.measured("race", button, () => this.run(page.choices.window, page.choices.count));
    });
  }

  newLane({ name, operator }) {
    const box = copy("lane"),
      [title, time, text] = box.children;
    title.append(name, make("small", {}, algorithmOf(operator)));
    $("lanes").append(box);
    return [name, { box, time, text }];
  }

  hide() { this.cancelled = true; }

  async run(size, count) {
    this.cancelled = false;
    say("race-status", `Loading ${MODEL} …`);
    this.engine = this.page.own ? this.page.engine : await (this.usual ??= openModel(MODEL, "bf16"));
    const past = await this.past(Math.min(size, this.engine.config.block_size));
    for (const lane of Object.values(this.lanes)) {
      lane.text.textContent = lane.time.textContent = "";
      lane.box.classList.remove("won");
    }
    const totals = {};
    for (const { name: part } of [...PARTS].reverse()) {
      if (this.cancelled) break;
      say("race-status", `${part} writes ${count} characters, each after reading ${number(past.length)} again …`);
      totals[part] = await this.measure(part, past, count);
    }
    if (this.cancelled) return say("race-status", "Stopped, because another view was shown.");
    const fastest = Math.min(...Object.values(totals));
    for (const [part, { box }] of Object.entries(this.lanes)) box.classList.toggle("won", totals[part] === fastest);
    return this.alone();
  }

  written(tokens) { return tokens.map((id) => this.engine.characters[id]).join(""); }

  begin(ids, part, seed, capacity, useCache) {
    const sampling = { temperature: 0.8 };
    return this.engine.call("begin", { ids, part, seed, capacity, useCache, sampling, context: "slide" });
  }

  // The tokens of a text of a length, written with a cache.
  async past(size) {
    const { characters, config } = this.engine,
      ids = this.page.own ? [0] : encode(PROMPT, characters);
    await this.begin([...ids], "part4", SEED, config.block_size, true);
    while (ids.length < size) ids.push(...(await this.engine.call("more", { most: size - ids.length })).tokens);
    return ids;
  }

  // A part's milliseconds for a text; each token reads the whole window again.
  async measure(part, past, count) {
    const begin = () => this.begin(past, part, SEED + 1, past.length, false),
      more = () => this.engine.call("more", { most: 1 }),
      { text, time } = this.lanes[part];
    for (let i = 0; i < WARM_UPS; i++) {
      await begin();
      await more();
    }
    await begin();
    let total = 0;
    for (let at = 1; at <= count && !this.cancelled; at++) {
      const { tokens, elapsed } = await more();
      total += elapsed;
      text.append(this.written(tokens));
      time.textContent = `${number(at)} of ${number(count)}: ${brief(total / 1e3)} s, ${brief(total / at)} ms a character`;
    }
    return total;
  }

  // Bars with the time of one call of attention.
  async alone() {
    const calls = [];
    for (const { name: part, operator } of PARTS) {
      const { milliseconds } = await this.engine.call("attention", { part, ...CALL });
      calls.push({ part, title: `${part}, ${algorithmOf(operator)}`, milliseconds });
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
    say("race-status", `Attention alone: part4 is ${gain} times as fast as part1 here.${slow}`);
  }

  // A call of the fastest step that the GPU runs, {name, isCpu, milliseconds}; undefined without one.
  async onGpu() {
    for (const step of FASTEST) {
      const call = await this.engine.call("gpuAttention", { step, ...CALL });
      if (call.isRight) return call;
    }
  }
}
