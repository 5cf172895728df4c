// @ts-check
// The view Write: a text, the distribution of each of its characters, branches.
import { $, brief, copy, number, on, onSubmit, say, shown } from "./dom.js";
import { Closed } from "./engine.js";
import { fill, randomSeed } from "./choices.js";
import { softmax } from "./formulas.js";
import { encode } from "./checkpoint.js";
import { findGpu } from "./gpu.js";
import { Server } from "./server.js";
import { commandFor, formatBranches, parseBranches, sampling, SETTINGS } from "./state.js";
import { Writing } from "./text.js";

const BARS = 10;
const BARS_EVERY_MS = 100; // while a text is written

export class WriteView {
  /** @type {any} the Page */ page;
  /** @type {Record<string, any>} */ choices;
  /** @type {Text} the new text */ node;
  /** @type {Record<string, any>[]} those of the bars */ rows;

  constructor(page) {
    // selected: the chosen position.
    Object.assign(this, { page, choices: page.choices, selected: null, drawn: 0, node: new Text("") });
    $("text-new").append(this.node);
    onSubmit("write-form", () => this.restart());
    on("prompt", "keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.restart();
    });
    on("halt", "click", () => this.text?.halt());
    on("another", "click", () => {
      page.choose({ seed: randomSeed() });
      this.restart();
    });
    on("unbranch", "click", () => this.write({ branches: formatBranches(this.branches.slice(0, -1)) }));
    on("settings", "input", () => {
      this.showSettings();
      this.drawBars();
    });
    on("settings", "change", ({ target: { id, files } }) => {
      if (id === "file") return page.openFiles([...files]);
      if (id === "pace") return this.write(); // the same text, with its branches
      if (id === "model" || id === "weights") page.own = false;
      return this.restart();
    });
    on("position", "input", () => this.select(Number($("position").value)));
    on("text", "click", (event) => this.touch(event));
    on("file", "click", () => {
      $("file").value = ""; // the same file, repaired, is a choice too
    });
  }

  get text() { return this.page.text; }
  get vocabulary() { return this.page.engine?.config.vocab_size ?? 65; }
  get branches() { return parseBranches(this.choices.branches); }

  showSettings() {
    for (const { choice, whole, slider } of SETTINGS) {
      const value = this.choices[choice];
      const isAll = slider[1] === null && value >= this.vocabulary;
      say(`${choice}-out`, isAll ? "all" : whole ? value : twoDigits(value));
    }
  }

  fill() {
    for (const { choice, slider } of SETTINGS) $(choice).max = slider[1] ?? this.vocabulary;
    $("prompt").value = this.choices.prompt;
    fill(this.choices);
    this.showSettings();
  }

  restart() { return this.write({ prompt: $("prompt").value, branches: "", query: -1, key: -1, frame: 0 }); }

  async write(changes = {}) {
    const { page } = this,
      mine = (this.latest = {});
    page.choose(changes);
    this.text?.halt();
    this.selected = null;
    delete document.documentElement.dataset.written;
    const engine = await page.ready();
    if (!engine || this.latest !== mine) return;
    // A text by the CPU does not wait for the GPU.
    const { window } = engine.config;
    if (window || this.choices.where === "gpu") this.gpu = await engine.openGpu();
    if (this.latest !== mine) return;
    page.offerWriters(this.gpu);
    if (!window && (!this.gpu || this.gpu.why)) findGpu().then((gpu) => page.offerWriters((this.gpu = gpu)));
    const byServer = this.choices.where === "server";
    if (byServer) page.choose({ branches: "" });
    this.fill();
    const text = new Writing(byServer ? new Server(page.server) : engine, { ...this.choices });
    page.text = text;
    $("next").hidden = byServer; // the server sends no logits
    this.clear(text);
    this.showRunning(true);
    $("unbranch").hidden = !this.choices.branches;
    try {
      await text.run((piece, isCut) => this.text === text && this.append(piece, isCut));
    } catch (error) {
      if (error instanceof Closed) return; // the text of another model follows
      if (this.latest === mine) page.problem(error);
    }
    if (this.text !== text) return;
    this.showRunning(false);
    if (page.engine !== engine) return; // the next text's model
    this.drawBars();
    this.status();
    if (this.latest === mine) page.written();
  }

  showRunning(isRunning) {
    $("halt").disabled = !isRunning;
    $("write-status").ariaBusy = String(isRunning); // a screen reader reads the status at the end only
  }

  clear(text) {
    this.page.problem(null);
    say("text-prompt", text.prompt || "\n");
    this.node.data = "";
    this.mark();
    this.showCommand();
    this.status();
  }

  append(piece, isCut) {
    const box = $("text"),
      follows = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
    if (isCut) this.node.data = this.text.text;
    else this.node.appendData(piece);
    if (follows) box.scrollTop = box.scrollHeight;
    const now = performance.now();
    if (now - this.drawn < BARS_EVERY_MS) return;
    this.drawn = now;
    if (this.selected === null) this.drawBars();
    say("write-status", `${number(this.text.written)} characters`);
  }

  status() {
    const { text } = this;
    if (!text || text.running || !text.written) return say("write-status", "");
    const speed = text.speed < 1000 ? brief(text.speed) : number(Math.round(text.speed / 100) * 100),
      isTimed = text.milliseconds >= 10; // a browser's clock may tick once in a millisecond
    const said = `${number(text.written)} characters ${text.source.by}`;
    return say("write-status", isTimed ? `${said}, ${speed} a second without the pace` : said);
  }

  showCommand() {
    const { command, why } = commandFor(this.choices, this.page.own);
    $("command-note").firstChild.data = why ?? "The command that writes the same text: ";
    say("command", command ?? "");
  }

  touch({ clientX, clientY }) {
    const { node } = this,
      caret = document.caretPositionFromPoint(clientX, clientY);
    if (caret?.offsetNode !== node) return;
    let at = caret.offset;
    // The caret is before or after the letter.
    if (at > 0 && (at >= node.length || clientX < letter(node, at).getBoundingClientRect().left)) at--;
    this.select(Math.min(at, node.length - 1));
  }

  select(at) {
    this.selected = at;
    this.drawBars();
  }

  // Underlines branches and marks the chosen letter.
  mark(at = -1) {
    const highlight = (name, places) => {
      const inside = places.filter((i) => i >= 0 && i < this.node.length);
      CSS.highlights.set(name, new Highlight(...inside.map((i) => letter(this.node, i))));
    };
    highlight("chosen", [at]);
    highlight("branch", this.branches.map(([i]) => i));
  }

  async drawBars() {
    const { text } = this;
    if (!text?.logits.length) return;
    const last = text.logits.length - 1,
      at = Math.min(this.selected ?? last, last),
      logits = text.logits[at],
      chosen = text.text[at],
      { source } = text;
    $("position").max = last;
    $("position").value = at;
    say("position-out", number(at + 1));
    this.mark(this.selected === null && text.running ? -1 : at);
    const latest = (this.bars = {}),
      prompt = text.prompt || "\n",
      ids = encode(prompt + text.text.slice(0, at), source.characters),
      request = { logits, ids, prompt: [...prompt].length, sampling: sampling(this.choices) };
    $("bars").ariaBusy = "true";
    const filtered = await source.call("distribution", request);
    if (this.bars !== latest) return;
    this.showBars(softmax(logits), filtered, source.characters, chosen);
    $("bars").ariaBusy = "false";
  }

  // p, filtered: the probabilities of the characters before and after the filters.
  showBars(p, filtered, characters, chosen) {
    const order = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, BARS),
      index = characters.indexOf(chosen);
    if (!order.includes(index)) order[BARS - 1] = index;
    const most = Math.max(...order.map((i) => Math.max(p[i], filtered[i])));
    this.rows ??= Array.from({ length: BARS }, () => this.newBar());
    this.rows.forEach((row, rank) => {
      const i = order[rank];
      row.item.hidden = i === undefined;
      if (i === undefined) return;
      row.character = characters[i];
      row.name.textContent = shown(characters[i]);
      row.spoken.textContent = spoken(characters[i]);
      row.before.style.transform = `scaleX(${p[i] / most})`;
      row.after.style.transform = `scaleX(${filtered[i] / most})`;
      row.left.textContent = percent(p[i]);
      row.right.textContent = percent(filtered[i]);
      row.button.ariaCurrent = i === index ? "true" : null;
    });
  }

  newBar() {
    const item = copy("bar"),
      button = item.firstChild,
      [name, spoken, track, left, , right] = button.children,
      [before, after] = track.children,
      row = { item, button, name, spoken, before, after, left, right };
    button.addEventListener("click", () => this.branch(row.character));
    $("bars").append(item);
    return row;
  }

  // Continues from the chosen position with another character.
  branch(character) {
    const { text } = this,
      at = Number($("position").value);
    if (text.text[at] === character) return;
    const kept = this.branches.filter(([i]) => i < at);
    this.write({ branches: formatBranches([...kept, [at, character]]) });
  }
}

function letter(node, i) {
  const range = document.createRange();
  range.setStart(node, i);
  range.setEnd(node, i + 1);
  return range;
}

const percent = (p) =>
  p >= 0.9995 ? "100 %" : p >= 0.0005 ? `${(100 * p).toFixed(1)} %` : p > 0 ? "< 0.1 %" : "–";
// Two digits after the point, or more if the number has more.
const twoDigits = (x) => (Number(x.toFixed(2)) === x ? x.toFixed(2) : String(x));
const spoken = (c) => ({ "\n": "line end", " ": "space" })[c] ?? c;
