// The view Tiles: the steps of a part over the text's own Q, K and V, with two small caches.
import { $, bytes, frame, make, number, onTheme } from "./dom.js";
import { encode } from "./checkpoint.js";
import { draw, drawRow } from "./board.js";
import { simulate } from "./caches.js";
import { traffic } from "./costs.js";
import { json } from "./engine.js";
import { online, results } from "./formulas.js";
import { matrices, scoreAt, steps } from "./tiling.js";

const A_STEP_MS = { slow: 1200, normal: 450, fast: 120 };
const OF = "tiles"; // the worker's name for the text of this view
const FIELDS = ["br", "bc", "l1", "l2"];
// In our words: standard attention, and FlashAttention-2's Algorithm 1 (Dao 2023, arXiv:2307.08691) by its line numbers.
const PLAIN = { 1: "S ← scale · Q Kᵀ", 2: "P ← softmax(S), row by row", 3: "O ← P V" };
const FLASH = {
  3: "for each tile i of Br queries:",
  4: "  load Qi",
  5: "  O, l, m ← 0, 0, −∞",
  6: "  for each tile j of Bc keys:",
  7: "    load Kj, Vj",
  8: "    S ← scale · Qi Kjᵀ",
  9: "    m′ ← max(m, S);  P ← exp(S − m′);  l ← exp(m − m′) l + Σ P",
  10: "    O ← exp(m − m′) O + P Vj",
  12: "  O ← O / l",
  13: "  L ← m + log l",
  14: "  write O and L",
};

export class TilesView {
  constructor(page) {
    this.page = page;
    this.at = 0;
    $("tiles-form").addEventListener("submit", (event) => event.preventDefault());
    $("tiles-part").addEventListener("change", () => {
      page.choose({ part: $("tiles-part").value, step: 0 });
      this.make();
    });
    $("tiles-pace").addEventListener("change", () => page.choose({ tempo: $("tiles-pace").value }));
    $("tiles-n").addEventListener("change", () => {
      page.choose({ n: Number($("tiles-n").value), step: 0 });
      this.load();
    });
    $("tiles-head").addEventListener("change", () => {
      const [layer, head] = $("tiles-head").value.split(",").map(Number);
      page.choose({ layer, head, key: -1 });
      this.load();
    });
    for (const id of FIELDS)
      $(id).addEventListener("input", () => {
        page.choose({ [id]: Number($(id).value) });
        this.make(true);
      });
    $("row").addEventListener("input", () => {
      this.pinned = true;
      this.showRow();
    });
    $("tiles-at").addEventListener("input", () => {
      this.pause();
      this.move(Number($("tiles-at").value));
    });
    $("tiles-back").addEventListener("click", () => {
      this.pause();
      this.move(this.at - 1);
    });
    $("tiles-on").addEventListener("click", () => {
      this.pause();
      this.move(this.at + 1);
    });
    $("tiles-play").addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    onTheme(() => this.steps && this.go(this.at));
    addEventListener("resize", () => {
      if (!$("tiles").hidden && this.steps) this.go(this.at);
    });
  }

  hide() {
    this.pause();
  }

  // Reads the text, unless it was read before.
  async show() {
    const { text, engine } = this.page;
    if (!engine || !text?.written) return;
    if (this.of === text && this.written === text.written) {
      if (this.steps) this.go(this.at);
      return;
    }
    const { written } = text;
    Object.assign(this, { of: text, written });
    const current = () => this.of === text && this.written === written && this.page.engine === engine;
    try {
      this.sources ??= await json("sources.json");
      this.block ??= await engine.call("block");
      if (!current()) return;
      const all = [...(text.dropped ? "" : text.prompt || "\n"), ...text.text].slice(
        0,
        engine.config.block_size,
      );
      this.ids = encode(all.join(""), engine.characters);
      $("tiles-part").replaceChildren(
        ...engine.parts.map(({ name, algorithm }) =>
          make("option", { value: name, textContent: `${name}, ${algorithm}` }),
        ),
      );
      $("tiles-pace").value = this.page.choices.tempo;
      const { n_layer, n_head } = engine.config;
      $("tiles-head").replaceChildren(
        ...Array.from({ length: n_layer * n_head }, (_, i) => {
          const layer = Math.floor(i / n_head),
            head = i % n_head;
          return make("option", {
            value: `${layer},${head}`,
            textContent: `layer ${layer + 1}, head ${head + 1}`,
          });
        }),
      );
      await this.load();
    } catch (error) {
      if (!current()) return;
      this.of = null;
      this.page.problem(error);
    }
  }

  // Q, K and V of the text's first N characters.
  async load() {
    const { engine, choices } = this.page,
      { n_layer, n_head } = engine.config;
    const N = Math.min([16, 32, 48].includes(choices.n) ? choices.n : 32, this.ids.length);
    const mine = (this.latest = {});
    await engine.call("observe", { of: OF, ids: this.ids.slice(0, N) });
    const chosen = choices.layer < 0 ? (await engine.call("maps", { of: OF, size: 1 })).telling : choices;
    const layer = Math.min(chosen.layer, n_layer - 1),
      head = Math.max(0, Math.min(chosen.head, n_head - 1));
    const heads = await engine.call("heads", { of: OF, layer, head });
    if (this.latest !== mine) return;
    Object.assign(this, { N, d: heads.d, heads, results: results(heads, N, heads.d) });
    $("tiles-head").value = `${layer},${head}`;
    $("tiles-n").value = choices.n;
    this.make();
  }

  // Makes the steps for the choices. keep: stay at about the same place.
  make(keep = false) {
    if (!this.heads) return;
    const { choices } = this.page,
      { N, d } = this,
      clip = (x) => Math.max(1, Math.min(Math.round(x), N));
    const part = this.page.engine.parts.some(({ name }) => name === choices.part) ? choices.part : "part4";
    this.sizes = { N, d, Br: clip(choices.br), Bc: clip(choices.bc), rows: this.block.rows };
    $("tiles-part").value = part;
    for (const id of FIELDS) $(id).value = choices[id];
    $("br").max = $("bc").max = N;
    $("br-name").textContent = part === "part2" ? "T" : "Br";
    $("br").disabled = part !== "part2" && part !== "part4";
    $("bc").disabled = part !== "part4";
    $("br-out").textContent = this.sizes.Br;
    $("bc-out").textContent = this.sizes.Bc;
    const l1 = 2 ** choices.l1,
      l2 = Math.max(l1, 2 ** choices.l2);
    $("l1-out").textContent = bytes(l1);
    $("l2-out").textContent = bytes(l2);
    const share = keep && this.steps ? this.at / this.steps.length : null;
    this.part = part;
    this.steps = steps(part, this.sizes);
    const memory = matrices(part, this.sizes);
    this.scratch = Object.entries(memory).filter(([m]) => !["Q", "K", "V", "S", "O"].includes(m));
    Object.assign(this, simulate(this.steps, memory, l1, l2));
    const problem = { N, d, heads: 1, causal: true, br: this.sizes.Br, bc: this.sizes.Bc };
    const block = { ...this.block, part2Tile: this.sizes.Br, panel: this.sizes.Br, part4Step: this.sizes.Bc };
    this.counted = [l1, l2].map((cache) =>
      traffic(part, problem, block, cache)?.reduce((sum, s) => sum + s.bytes, 0),
    );
    this.showCode();
    $("online").hidden = part !== "part4";
    $("row").max = N - 1;
    this.pinned &&= keep;
    $("tiles-at").max = this.steps.length - 1;
    if (share === null) this.go(choices.step);
    else this.move(Math.round(share * this.steps.length));
  }

  showCode() {
    const paper = this.part === "part4" ? FLASH : PLAIN;
    this.paper = Object.fromEntries(
      Object.entries(paper).map(([n, text]) => [n, make("li", { textContent: `${n.padStart(2)}  ${text}` })]),
    );
    $("paper").replaceChildren(...Object.values(this.paper));
    const { name, text } = this.sources[this.part];
    $("source-title").textContent = `Our C++: ${name}`;
    this.lines = text.split("\n").map((line) => make("span", { textContent: line || " " }));
    $("source").replaceChildren(...this.lines);
    $("source").setAttribute("aria-label", name);
  }

  // Goes to a chosen step; a link shows it again.
  move(at) {
    this.page.choose({ step: Math.max(0, Math.min(at, this.steps.length - 1)) });
    this.go(this.page.choices.step);
  }

  // Shows a step.
  go(at) {
    this.at = Math.max(0, Math.min(at, this.steps.length - 1));
    const step = this.steps[this.at],
      { places, bytes: moved } = this.after[this.at];
    const { kinds, progress } = this.stateAt(this.at),
      { memory, N } = this;
    draw($("board"), {
      N,
      d: this.d,
      heads: this.heads,
      results: this.results,
      step,
      kinds,
      progress,
      place: (m, i, c) => places[memory.line(m, i, c)],
      scoreAt: (i, j) => scoreAt(this.part, this.sizes, i, j),
      scratch: this.scratch,
      weightOf: (i, j) => this.weight(step, i, j),
    });
    $("tiles-at").value = this.at;
    $("tiles-status").textContent = `Step ${number(this.at + 1)} of ${number(this.steps.length)}`;
    $("tiles-at").setAttribute("aria-valuetext", `${this.at + 1}: ${step.title}`);
    $("step-title").textContent = step.title;
    $("step-text").textContent = step.text;
    this.showBytes(moved);
    for (const [n, line] of Object.entries(this.paper))
      line.className = step.paper.includes(Number(n)) ? "now" : "";
    const now = (line) => step.anchor !== null && line.textContent.includes(step.anchor);
    for (const line of this.lines) line.className = now(line) ? "now" : "";
    const here = this.lines.find(now) ?? this.lines[0];
    $("source").scrollTop = Math.max(0, here.offsetTop - this.lines[0].offsetTop - 90);
    this.showRow();
  }

  // The kinds of S's cells and the progress of O's rows after a step.
  stateAt(at) {
    const { N } = this,
      kinds = new Uint8Array(N * N),
      progress = new Float32Array(N);
    const fill = ([i0, i1, j0, j1], kind) => {
      for (let i = i0; i < i1; i++) for (let j = j0; j < Math.min(j1, i + 1); j++) kinds[i * N + j] = kind;
    };
    for (const step of this.steps.slice(0, at + 1)) {
      if (step.forget) fill(step.forget, 0);
      if (step.scores) fill(step.scores, 1);
      if (step.weights) fill(step.weights, 2);
      if (step.output) for (let i = step.output[0]; i < step.output[1]; i++) progress[i] = step.output[2];
    }
    return { kinds, progress };
  }

  // The weight of a cell: the final one, or in part 4 that with the current m.
  weight(step, i, j) {
    const {
      N,
      results: { S, P },
    } = this;
    if (this.part !== "part4") return P[i * N + j];
    const history = online(S, N, i, this.sizes.Bc),
      tile = Math.min(Math.max(0, step.tile[2]), history.length - 1);
    return Math.exp(S[i * N + j] - history[tile].m);
  }

  showBytes(moved) {
    const rows = [
      ["so far", moved.l1, moved.l2],
      ["in all", ...Object.values(this.after.at(-1).bytes)],
      ...(this.counted[0] === undefined ? [] : [["as explain counts", ...this.counted]]),
    ];
    $("bytes").replaceChildren(
      ...rows.map(([name, ...values]) =>
        make(
          "tr",
          {},
          make("th", { scope: "row", textContent: name }),
          ...values.map((x) => make("td", { textContent: bytes(x) })),
        ),
      ),
    );
  }

  showRow() {
    if (this.part !== "part4" || !this.steps) return;
    const [i0, i1, tile] = this.steps[this.at].tile;
    if (!this.pinned) $("row").value = i1 - 1; // follows the tile until someone chooses a row
    const i = Number($("row").value);
    const history = online(this.results.S, this.N, i, this.sizes.Bc);
    const now = i < i0 ? history.length - 1 : i >= i1 ? -1 : Math.min(tile, history.length - 1);
    $("row-out").textContent = `query ${i + 1}`;
    drawRow($("ml"), history, now);
    if (now < 0) {
      $("ml-text").textContent = "m = −∞, l = 0: this query has not begun.";
      return;
    }
    const { m, l, correction } = history[now];
    $("ml-text").textContent =
      `m = ${m.toFixed(4)} (line), l = ${l.toFixed(4)} (bars)` +
      (now === 0
        ? ""
        : correction < 1
          ? `; m moved, so O is multiplied by ${correction.toFixed(4)}.`
          : "; m did not move.");
  }

  async play() {
    this.playing = true;
    $("step").ariaBusy = "true"; // a screen reader reads the last step only
    $("tiles-play").textContent = "Pause";
    if (this.at === this.steps.length - 1) this.at = -1;
    for (let last = -Infinity; this.playing; await frame()) {
      if (performance.now() - last < A_STEP_MS[this.page.choices.tempo]) continue;
      last = performance.now();
      this.move(this.at + 1);
      if (this.at === this.steps.length - 1) break;
    }
    this.pause();
  }

  pause() {
    this.playing = false;
    $("step").ariaBusy = "false";
    $("tiles-play").textContent = "Play";
  }
}
