// The view Race: the parts write the same text one after the other, and are shown at their relative speeds.
import { $, brief, frame, make, number } from "./dom.js";
import { encode } from "./checkpoint.js";

const CASE = { H: 4, N: 1024, d: 32 };
const LONGEST_SHOW = 9; // seconds in which the slowest part is shown
const PROMPT = "GLOUCESTER:\n",
  SEED = 1; // seed of the text that fills the window

export class RaceView {
  constructor(page) {
    this.page = page;
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    for (const id of ["window", "count"]) {
      $(id).addEventListener("change", () => page.choose({ [id]: Number($(id).value) }));
    }
  }

  // The parts of the kernels, as a Session has them.
  offer(parts) {
    if (this.parts) return;
    this.parts = parts;
    this.lanes = Object.fromEntries(parts.map((part) => [part.name, this.newLane(part)]));
  }

  newLane({ name, algorithm }) {
    const lane = {
      time: make("p", { className: "status" }),
      past: make("span", { className: "past" }),
      text: make("span"),
    };
    lane.box = make(
      "div",
      { className: "lane" },
      make("h3", {}, name, make("small", { textContent: algorithm })),
      lane.time,
      make("div", { className: "written" }, lane.past, lane.text),
    );
    $("lanes").append(lane.box);
    return lane;
  }

  fill() {
    for (const id of ["window", "count"]) $(id).value = this.page.choices[id];
  }

  show() {
    this.fill();
  }
  hide() {
    this.cancelled = true;
  }

  async start() {
    const { window: size, count } = this.page.choices,
      mine = {};
    this.current = mine;
    this.cancelled = false;
    this.page.text?.halt(); // it would slow the parts
    let ended = false;
    const going = () => this.current === mine && !this.cancelled;
    const say = (text) => {
      $("race-status").textContent = text;
    };
    $("race-form").querySelector("button").disabled = true;
    try {
      say("Loading shakes1024 …");
      this.engine ??= await this.page.models.engine("shakes1024", "bf16", (share) => this.page.progress(share));
      this.page.progress(1);
      this.offer(this.engine.parts);
      const past = await this.past(size);
      for (const lane of Object.values(this.lanes)) {
        lane.past.textContent = `… ${past.text.slice(-80).replace(/^\S*\s/, "")}`;
        lane.text.textContent = lane.time.textContent = "";
        lane.box.classList.remove("won");
      }
      const runs = {};
      for (const { name: part } of [...this.parts].reverse()) {
        if (!going()) return;
        say(`${part} writes ${count} characters, each after reading ${number(size)} again …`);
        runs[part] = await this.measure(part, past.ids, size, count, going);
      }
      if (!going()) return;
      await this.replay(runs, count, going, say);
      if (!going()) return;
      await this.alone(say);
      ended = true;
    } catch (error) {
      this.page.problem(error);
    } finally {
      if (!ended) say(this.cancelled ? "Stopped, because another view was shown." : "");
      $("race-form").querySelector("button").disabled = false;
    }
  }

  // A text of `length` characters, written with a cache.
  async past(size) {
    const { characters, config } = this.engine,
      ids = encode(PROMPT, characters);
    await this.engine.call("begin", {
      part: "part4",
      ids: [...ids],
      seed: SEED,
      sampling: { temperature: 0.8, topK: 65, topP: 1 },
      context: "slide",
      useCache: true,
      capacity: config.block_size,
    });
    while (ids.length < size) ids.push(...(await this.engine.call("more", { most: size - ids.length })).tokens);
    return { ids, text: ids.map((id) => characters[id]).join("") };
  }

  // {text, milliseconds of each character} of a part that reads the whole window again and again.
  async measure(part, ids, size, count, going) {
    const request = {
      part,
      ids,
      seed: SEED + 1,
      sampling: { temperature: 0.8, topK: 65, topP: 1 },
      context: "slide",
      useCache: false,
      capacity: size,
    };
    for (let i = 0; i < 2; i++) {
      // Browsers optimise a kernel after its first runs.
      await this.engine.call("begin", request);
      await this.engine.call("more", { most: 1, perToken: true });
    }
    await this.engine.call("begin", request);
    const run = { text: "", milliseconds: [] },
      lane = this.lanes[part];
    while (run.milliseconds.length < count && going()) {
      const { tokens, milliseconds } = await this.engine.call("more", { most: 1, perToken: true });
      run.text += this.engine.characters[tokens[0]];
      run.milliseconds.push(milliseconds[0]);
      lane.text.textContent = run.text;
      lane.time.textContent = `${number(run.milliseconds.length)} of ${number(count)}`;
    }
    run.total = run.milliseconds.reduce((sum, x) => sum + x, 0);
    return run;
  }

  // Shows all parts side by side, with the measured times.
  async replay(runs, count, going, say) {
    const slowest = Math.max(...Object.values(runs).map((run) => run.total)) / 1e3;
    const fastest = Math.min(...Object.values(runs).map((run) => run.total));
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const factor = still ? Infinity : Math.max(1, slowest / LONGEST_SHOW);
    say(
      "Measured one after the other; now side by side at their true relative speed" +
        (factor > 1 && !still ? `, ${brief(factor)} times as fast as it was.` : "."),
    );
    const start = performance.now();
    for (let done = false; !done && going(); await frame()) {
      const now = still ? Infinity : (performance.now() - start) * factor;
      done = true;
      for (const { name: part } of this.parts) {
        const run = runs[part],
          lane = this.lanes[part];
        let at = 0,
          spent = 0;
        while (at < count && spent + run.milliseconds[at] <= now) spent += run.milliseconds[at++];
        lane.text.textContent = run.text.slice(0, at);
        lane.box.classList.toggle("won", at === count && run.total === fastest);
        lane.time.textContent =
          at < count
            ? `${brief(Math.min(now, run.total) / 1e3)} s`
            : `${brief(run.total / 1e3)} s, ${brief(run.total / count)} ms a character`;
        done &&= at === count;
      }
    }
    this.runs = runs;
  }

  // Bars with the time of one call of attention.
  async alone(say) {
    const body = $("alone").tBodies[0],
      times = {};
    for (const { name: part } of this.parts) times[part] = await this.engine.call("attention", { part, ...CASE });
    const most = Math.max(...Object.values(times));
    body.replaceChildren(
      ...this.parts.map(({ name: part, algorithm }) => {
        const bar = make("i");
        bar.style.width = `${(100 * times[part]) / most}%`;
        return make(
          "tr",
          {},
          make("th", { scope: "row", textContent: `${part}, ${algorithm}` }),
          make("td", {}, bar),
          make("td", { textContent: brief(times[part]) }),
        );
      }),
    );
    const gain = brief(times.part1 / times.part4);
    say(`${$("race-status").textContent} Attention alone: part4 is ${gain} times as fast as part1 here.`);
  }
}
