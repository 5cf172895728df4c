// @ts-check
// The view Tiles: the frames of a part over the text's own Q, K and V, with two small caches.
import { $, bytes, make, number, on, onSubmit, option, say, tableRow } from "./dom.js";
import { draw, drawRow } from "./draw_tiles.js";
import { NESTS, PARTS } from "./facts.js";
import { fill } from "./choices.js";
import { text } from "./files.js";
import { online, results } from "./formulas.js";
import { allHeads, Reading } from "./reading.js";
import { LINE, streams, traffic } from "./traffic.js";

const A_FRAME_MS = 450;

export class TilesView extends Reading {
  N = 0; // queries, and keys
  d = 0;
  /** @type {any[]} see nest.js */ frames;
  /** @type {any} q, k, v of the head */ heads;
  /** @type {{ S: Float64Array, P: Float64Array, O: Float64Array }} */ results;
  /** @type {{ N: number, d: number, Br: number, Bc: number, left: number, rows: number }} */ sizes;
  /** @type {Record<string, number>} of the kernels */ block;
  /** @type {Record<string, number>} each matrix's place in floats */ first;
  /** @type {Record<string, [number, number]>} */ matrices;
  /** @type {boolean} whether S has keys as rows */ isTurned;
  /** @type {string} */ part;
  /** @type {string} */ script;
  /** @type {Record<string, number[]>} the bytes of the parts beside a script's */ parts;
  /** @type {Record<string, string>} the C++ by part */ sources;

  constructor(page) {
    super(page, "tiles");
    this.at = 0;
    onSubmit("tiles-form", () => {});
    on("tiles-part", "change", ({ target }) => {
      page.choose({ frame: 0 });
      if (target.value === "script") page.choices.script ||= this.nest();
      this.make();
    });
    on("script", "input", () => this.make(true));
    on("as-script", "click", () => {
      const script = this.nest();
      page.choose({ part: "script" });
      $("editor").hidden = false;
      $("script").select();
      document.execCommand("insertText", false, script); // as if typed: it can be undone
    });
    on("tiles-n", "change", () => {
      page.choose({ frame: 0 });
      this.load();
    });
    on("tiles-head", "change", ({ target }) => {
      const [layer, head] = target.value.split(",").map(Number);
      page.choose({ layer, head, key: -1 });
      this.load();
    });
    on("tiles-sizes", "input", () => this.make(true));
    on("row", "input", () => this.showRow());
    const go = (at) => {
      this.play(false);
      this.go(at);
    };
    on("tiles-at", "input", ({ target }) => go(Number(target.value)));
    on("tiles-back", "click", () => go(this.at - 1));
    on("tiles-on", "click", () => go(this.at + 1));
    on("tiles-play", "click", () => this.play(!this.isPlaying));
    addEventListener("resize", () => $("tiles").hidden || this.redraw());
  }

  hide() { this.play(false); }

  redraw() { this.go(this.at, false); }

  async read() {
    const { engine } = this;
    this.block ??= await engine.call("block");
    this.sources ??= Object.fromEntries(await Promise.all(PARTS.map(async ({ name, operator }) => [name, await text(`csrc/${operator}.cpp`)])));
    if (!this.isCurrent()) return;
    const { n_layer: layers, n_head } = engine.config;
    const titles = allHeads({ layers, heads: n_head }).map(({ layer, head, title }) => option(`${layer},${head}`, title));
    $("tiles-head").replaceChildren(...titles);
    await this.load();
  }

  // Q, K and V of the text's first N characters.
  async load() {
    const mine = (this.latest = {}),
      seen = await this.observe(this.characters.slice(0, this.page.choices.n)),
      { layer, head } = this.chosen(seen),
      heads = await this.call("heads", { layer, head });
    if (this.latest !== mine) return;
    const { T: N, d } = seen;
    Object.assign(this, { N, d, heads });
    $("tiles-head").value = `${layer},${head}`;
    this.make();
  }

  nest() { return NESTS[this.part] ?? NESTS.part1; }

  // Makes the frames, in the worker. keep: stay at about the same place. Of several calls the last counts.
  async make(keep = false) {
    if (!this.heads) return;
    const { choices } = this.page,
      { N, d, heads, block } = this,
      { script } = choices;
    const { part } = choices,
      Br = Math.min(choices.br, N),
      Bc = Math.min(choices.bc, N),
      left = Math.min(choices.left, N - 1),
      sizes = { N, d, Br, Bc, left, rows: block.rows },
      l1 = 2 ** choices.l1,
      l2 = Math.max(l1, 2 ** choices.l2);
    $("br").max = $("bc").max = N;
    $("left").max = N - 1;
    fill(choices);
    say("br-name", part === "part2" ? "T" : "Br");
    $("br").disabled = !["part2", "part4", "script"].includes(part);
    $("bc").disabled = !["part4", "script"].includes(part);
    for (const [name, shown] of Object.entries({ br: Br, bc: Bc, left: left < N - 1 ? `${left + 1} keys` : "all", l1: bytes(l1), l2: bytes(l2) })) say(`${name}-out`, shown);
    const mine = (this.made = {});
    await Promise.allSettled([this.making]);
    if (this.made !== mine) return;
    this.making = this.call("tiles", { part, script, sizes, l1, l2 });
    const walk = await this.making;
    if (this.heads !== heads) return;
    const share = keep && this.frames ? this.at / this.frames.length : null;
    Object.assign(this, { frames: null, part, script, sizes, results: results(heads, N, d, left) }, walk);
    this.showCode();
    if (part === "script") this.judge(walk);
    if (!this.frames) return;
    const small = { ...block, part2_tile: Br, panel: Br, part4_step: Bc },
      rules = { seen: walk.computed[1] / N, ruled: Number(left < N - 1) },
      counted = streams(part, { ...small, ...rules, Nq: N, Nk: N, d, heads: 1, br: Br, bc: Bc, threads: 1 });
    this.counted = counted && [l1, l2].map((cache) => traffic(counted, cache));
    $("online").hidden = part !== "part4";
    $("row").max = N - 1;
    $("tiles-at").max = this.frames.length - 1;
    if (share === null) this.go(choices.frame, false);
    else this.go(Math.round(share * this.frames.length));
  }

  showCode() {
    const { part } = this,
      isScript = part === "script",
      nest = isScript ? this.script : this.nest();
    this.nestLines = nest.split("\n").map((line, n) => make("li", {}, `${String(n + 1).padStart(2)}  ${line}`));
    $("nest").replaceChildren(...this.nestLines);
    const name = isScript ? "" : `${PARTS.find((row) => row.name === part).operator}.cpp`;
    say("source-title", isScript ? "Your loop nest" : `Our C++: ${name}`);
    this.lines = (this.sources[part] ?? "").split("\n").map((line) => make("span", {}, line || " "));
    $("source").replaceChildren(...this.lines);
    $("source").ariaLabel = name;
    $("source").hidden = isScript;
    $("editor").hidden = !isScript;
    $("as-script").hidden = isScript;
  }

  // Says what is wrong with a script, or what it computes.
  judge({ why, computed }) {
    if (why) this.play(false);
    $("script").ariaInvalid = String(Boolean(why));
    $("script-status").classList.toggle("problem", Boolean(why));
    const [scores, seen, rows, all] = computed?.map((count) => number(count)) ?? [];
    say("script-status", why ?? `It computes ${scores} of ${seen} scores and writes ${rows} of ${all} rows of O.`);
  }

  // Shows a frame. isChosen: a link shows it again.
  go(at, isChosen = true) {
    if (!this.frames) return;
    this.at = Math.max(0, Math.min(at, this.frames.length - 1));
    if (isChosen) this.page.choose({ frame: this.at });
    const now = this.frames[this.at],
      { places, bytes: moved, boxes } = now,
      { N, d, heads, first, matrices, isTurned, sizes: { left } } = this;
    draw($("board"), {
      ...{ N, d, left, heads, matrices, isTurned, boxes, results: this.results },
      ...this.stateAt(this.at),
      place: (m, i, c) => places[Math.floor((first[m] + i * matrices[m][1] + c) / LINE)],
      weightOf: (i, j) => this.weight(now, i, j),
    });
    $("tiles-at").value = this.at;
    $("tiles-at").ariaValueText = `${this.at + 1}: ${now.title}`;
    say("tiles-status", `Frame ${number(this.at + 1)} of ${number(this.frames.length)}`);
    say("frame-title", now.title);
    say("frame-text", now.text);
    this.showBytes(moved);
    this.nestLines.forEach((line, n) => (line.className = now.lines.includes(n + 1) ? "now" : ""));
    const isNow = (line) => now.anchors.some((anchor) => line.textContent.includes(anchor));
    for (const line of this.lines) line.className = isNow(line) ? "now" : "";
    const here = this.lines.find(isNow) ?? this.lines[0];
    $("source").scrollTop = Math.max(0, here.offsetTop - this.lines[0].offsetTop - 90);
    if (now.tile) $("row").value = now.tile[1] - 1;
    this.showRow();
  }

  // The kinds of S's cells and the progress of O's rows after a frame.
  stateAt(at) {
    const { N, sizes: { left } } = this,
      kinds = Array(N * N).fill(""),
      progress = new Float32Array(N);
    let base = [0, 0];
    for (const { frees, makes, area, boxes, base: begins = base } of this.frames.slice(0, at + 1)) {
      base = begins;
      if (frees) kinds.fill("");
      if (makes) {
        const [i0, i1, j0, j1] = area;
        for (let i = i0; i < i1; i++) kinds.fill(makes, i * N + Math.max(j0, i - left), i * N + Math.min(j1, i + 1));
      }
      const { O, V } = boxes; // a row of O is added up as far as V was read for it
      if (O?.w) progress.fill(Math.min(1, (V ? V.r[1] : N) / O.r[1]), ...O.r);
    }
    return { kinds, progress, base };
  }

  // The weight of a cell: the final one, or in part 4 that with the current m.
  weight({ tile }, i, j) {
    const { N, results } = this;
    if (!tile) return results.P[i * N + j];
    const history = online(results.S, i, this.sizes),
      now = Math.min(Math.max(0, tile[2]), history.length - 1);
    return Math.exp(results.S[i * N + j] - history[now].m);
  }

  showBytes(moved) {
    const rows = { "so far": moved, "in all": this.frames.at(-1).bytes };
    if (this.counted) rows["as explain counts"] = this.counted;
    if (this.part === "script") Object.assign(rows, this.parts);
    const cells = Object.entries(rows).map(([name, values]) => tableRow(name, ...values.map(bytes)));
    $("bytes").replaceChildren(...cells);
  }

  showRow() {
    if (!this.frames?.[this.at].tile) return;
    const [i0, i1, tile] = this.frames[this.at].tile;
    const i = Number($("row").value);
    const history = online(this.results.S, i, this.sizes);
    const now = i < i0 ? history.length - 1 : i >= i1 ? -1 : Math.min(tile, history.length - 1);
    say("row-out", `query ${i + 1}`);
    drawRow("ml", history, now);
    if (now < 0) return say("ml-text", "m = −∞, l = 0: this query has not begun.");
    const { m, l, correction } = history[now];
    const moved = correction < 1 ? `m moved, so O is multiplied by ${correction.toFixed(4)}` : "m did not move";
    const values = `m = ${m.toFixed(4)} (line), l = ${l.toFixed(4)} (bars)`;
    return say("ml-text", now === 0 ? values : `${values}; ${moved}.`);
  }

  // Plays from the next frame on, or after the last one from the first; isOn false pauses.
  play(isOn) {
    clearInterval(this.timer);
    this.isPlaying = isOn && Boolean(this.frames);
    $("frame").ariaBusy = String(this.isPlaying); // a screen reader reads the last frame only
    say("tiles-play", this.isPlaying ? "Pause" : "Play");
    if (!this.isPlaying) return;
    const isLast = () => this.at === this.frames.length - 1,
      next = () => {
        this.go(this.at + 1);
        if (isLast()) this.play(false);
      };
    if (isLast()) this.at = -1;
    this.timer = setInterval(next, A_FRAME_MS);
    next();
  }
}
