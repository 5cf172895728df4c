// The view Write: a text, the distribution of each of its characters, branches.
import { $, make, number, shown } from "./dom.js";
import { Closed } from "./engine.js";
import { after, before } from "./sampling.js";
import { commandFor } from "./command.js";
import { ServerText } from "./server.js";
import { formatBranches, isSeed, parseBranches } from "./state.js";
import { Text } from "./text.js";

const BARS = 10;
const FIELDS = [
  "model",
  "weights",
  "where",
  "prompt",
  "seed",
  "length",
  "context",
  "stop",
  "pace",
  "temperature",
  "topk",
  "topp",
];
const NUMBERS = ["length", "pace", "temperature", "topk", "topp"];

export class WriteView {
  constructor(page) {
    this.page = page;
    this.selected = null; // the chosen position
    this.drawn = 0;
    $("text-new").append("");
    this.bind();
  }

  get choices() {
    return this.page.choices;
  }
  get text() {
    return this.page.text;
  }

  bind() {
    $("write-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.restart();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.restart();
    });
    $("halt").addEventListener("click", () => this.text?.halt());
    $("another").addEventListener("click", () => {
      $("seed").value = String(Math.floor(Math.random() * 1e6));
      this.restart();
    });
    $("unbranch").addEventListener("click", () => {
      const branches = parseBranches(this.choices.branches).slice(0, -1);
      this.write({ branches: formatBranches(branches) });
    });
    for (const id of ["temperature", "topk", "topp"]) {
      $(id).addEventListener("input", () => {
        this.showSettings();
        this.read();
        this.drawBars();
      });
      $(id).addEventListener("change", () => this.restart());
    }
    for (const id of ["model", "weights"]) {
      $(id).addEventListener("change", () => {
        this.page.own = false;
        this.restart();
      });
    }
    for (const id of ["where", "seed", "length", "context", "stop", "endless"])
      $(id).addEventListener("change", () => this.restart());
    $("pace").addEventListener("change", () => {
      this.read();
      this.write(); // the same text, with its branches
    });
    $("position").addEventListener("input", () => this.select(Number($("position").value)));
    $("text").addEventListener("click", (event) => this.touch(event));
    $("file").addEventListener("click", () => {
      $("file").value = ""; // the same file, repaired, is a choice too
    });
    $("file").addEventListener("change", () => this.page.openFiles([...$("file").files]));
  }

  // Sets the fields to the choices.
  fill() {
    this.offerPace();
    $("topk").max = this.page.engine?.config.vocab_size ?? 65;
    this.filled = {};
    for (const id of FIELDS) {
      $(id).value = this.choices[id];
      this.filled[id] = $(id).value;
    }
    $("endless").checked = this.choices.endless === 1;
    this.showSettings();
  }

  // A link may have a pace that the list lacks.
  offerPace() {
    const { pace } = this.choices;
    if ([...$("pace").options].some((option) => option.value === String(pace))) return;
    $("pace").append(make("option", { value: pace, textContent: `${pace} a second` }));
  }

  // The value of a field: the choice, until the field is changed. A slider cannot show each value of a link.
  meant(id) {
    const { value } = $(id);
    if (value === this.filled[id]) return this.choices[id];
    return NUMBERS.includes(id) ? Number(value) : value;
  }

  // An endless text would slow the measurements of the other views.
  hide() {
    if (this.text?.choices.endless) this.text.halt();
  }

  showSettings() {
    const all = this.page.engine?.config.vocab_size ?? 65;
    for (const id of ["temperature", "topp"]) $(`${id}-out`).textContent = twoDigits(this.meant(id));
    $("topk-out").textContent = this.meant("topk") >= all ? "all" : this.meant("topk");
  }

  // Takes the choices from the fields. A field without a valid value is set to its choice again.
  read() {
    const changes = {};
    for (const id of FIELDS) {
      changes[id] = this.meant(id);
      this.filled[id] = $(id).value;
    }
    if (!isSeed(changes.seed)) changes.seed = this.choices.seed;
    if (!Number.isInteger(changes.length) || changes.length < 1 || changes.length > 20000) {
      changes.length = this.choices.length;
    }
    changes.endless = $("endless").checked ? 1 : 0;
    this.page.choose(changes);
  }

  restart() {
    this.read();
    return this.write({ branches: "", query: -1, key: -1, step: 0 });
  }

  async write(changes = {}) {
    const mine = (this.latest = {});
    this.page.choose(changes);
    this.text?.halt();
    this.selected = null;
    delete document.documentElement.dataset.written;
    const engine = await this.page.ready();
    if (!engine || this.latest !== mine) return;
    const byServer = this.page.offerServer();
    if (byServer) this.page.choose({ branches: "" });
    this.fill();
    const branches = parseBranches(this.choices.branches);
    const text = byServer
      ? new ServerText(this.page.server, { ...this.choices })
      : new Text(engine, { ...this.choices }, branches);
    this.page.text = text;
    $("next").hidden = byServer; // the server sends no logits
    this.clear(text);
    $("halt").disabled = false;
    $("write-status").ariaBusy = "true"; // a screen reader reads the status at the end only
    $("unbranch").hidden = branches.length === 0;
    try {
      await text.run((piece, whole) => {
        if (this.text === text) this.append(piece, whole);
      });
    } catch (error) {
      if (error instanceof Closed) return; // the text of another model follows
      if (this.latest === mine) this.page.problem(error);
    }
    if (this.text !== text) return;
    text.running = false;
    $("halt").disabled = true;
    $("write-status").ariaBusy = "false";
    if (this.page.engine !== engine) return; // the next text's model
    this.drawBars();
    this.status();
    if (this.latest === mine) this.page.written();
  }

  clear(text) {
    this.page.problem(null);
    $("text-prompt").textContent = text.prompt || "\n";
    $("text-new").firstChild.data = "";
    this.mark();
    this.showCommand();
    this.status();
  }

  append(piece, whole) {
    const node = $("text-new").firstChild,
      box = $("text");
    const follows = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
    if (whole) node.data = this.text.text;
    else node.appendData(piece);
    if (follows) box.scrollTop = box.scrollHeight;
    const now = performance.now();
    if (now - this.drawn < 100) return;
    this.drawn = now;
    if (this.selected === null) this.drawBars();
    $("write-status").textContent = `${number(this.text.written)} characters`;
  }

  status() {
    const { text } = this;
    if (!text || text.running || !text.written) {
      $("write-status").textContent = "";
      return;
    }
    // A browser's clock may tick once in a millisecond.
    const speed =
      text.milliseconds < 10 ? "" : `, ${number(Math.round(text.speed / 100) * 100)} a second without the pace`;
    const by = text.by ? ` by ${text.by}` : " with part4";
    $("write-status").textContent = `${number(text.written)} characters${by}${speed}`;
  }

  showCommand() {
    const { command, why } = commandFor(this.choices, this.page.own);
    $("command-note").firstChild.data = why ?? "The command that writes the same text: ";
    const words = (command ?? "").split(/(?<= )(--?[a-z-]+)/); // each second one is an option, which must not be broken
    const whole = (textContent) => make("span", { className: "named", textContent });
    $("command").replaceChildren(...words.map((word, i) => (i % 2 ? whole(word) : word)));
  }

  // Handles a click on the text.
  touch(event) {
    const node = $("text-new").firstChild;
    let at = -1;
    const range = document.caretPositionFromPoint?.(event.clientX, event.clientY);
    if (range) at = range.offsetNode === node ? range.offset : -1;
    else {
      const old = document.caretRangeFromPoint?.(event.clientX, event.clientY);
      if (old?.startContainer === node) at = old.startOffset;
    }
    if (at < 0) return;
    // The caret is before or after the letter.
    const box = (i) => {
      const r = document.createRange();
      r.setStart(node, i);
      r.setEnd(node, i + 1);
      return r.getBoundingClientRect();
    };
    if (at > 0 && (at >= node.length || event.clientX < box(at).left)) at--;
    this.select(Math.min(at, node.length - 1));
  }

  select(at) {
    this.selected = at;
    this.drawBars();
  }

  // Underlines branches and marks the chosen letter.
  mark(at = -1) {
    const node = $("text-new").firstChild;
    if (!globalThis.CSS?.highlights) return;
    const letter = (i) => {
      const range = document.createRange();
      range.setStart(node, i);
      range.setEnd(node, i + 1);
      return range;
    };
    CSS.highlights.delete("chosen");
    if (at >= 0 && at < node.length) CSS.highlights.set("chosen", new Highlight(letter(at)));
    const dropped = this.text?.dropped ?? 0;
    const branches = parseBranches(this.choices.branches)
      .map(([i]) => i - dropped)
      .filter((i) => i >= 0 && i < node.length);
    CSS.highlights.set("branch", new Highlight(...branches.map(letter)));
  }

  drawBars() {
    const { text } = this;
    if (!text?.text.length || !text.logits) return;
    const last = text.text.length - 1,
      at = Math.min(this.selected ?? last, last);
    $("position").max = last;
    $("position").value = at;
    $("position-out").textContent = number(text.dropped + at + 1);
    this.mark(this.selected === null && text.running ? -1 : at);
    const logits = text.logits[at],
      { characters } = this.page.engine;
    const p = before(logits);
    const filtered = after(logits, {
      temperature: this.choices.temperature,
      topK: this.choices.topk,
      topP: this.choices.topp,
    });
    const order = p
      .map((_, i) => i)
      .sort((a, b) => p[b] - p[a])
      .slice(0, BARS);
    const chosen = characters.indexOf(text.text[at]);
    if (!order.includes(chosen)) order[BARS - 1] = chosen;
    const most = Math.max(...order.map((i) => Math.max(p[i], filtered[i])));
    this.rows ??= Array.from({ length: BARS }, () => this.newBar());
    this.rows.forEach((row, rank) => {
      const i = order[rank];
      row.item.hidden = i === undefined;
      if (i === undefined) return;
      row.name.textContent = shown(characters[i]);
      row.before.style.transform = `scaleX(${p[i] / most})`;
      row.after.style.transform = `scaleX(${filtered[i] / most})`;
      row.left.textContent = percent(p[i]);
      row.right.textContent = percent(filtered[i]);
      if (i === chosen) row.button.setAttribute("aria-current", "true");
      else row.button.removeAttribute("aria-current");
      row.spoken.textContent = spoken(characters[i]);
      row.character = characters[i];
    });
  }

  newBar() {
    const row = {
      name: make("b", { ariaHidden: "true" }),
      spoken: make("span", { className: "hidden" }),
      before: make("i", { className: "before" }),
      after: make("i", { className: "after" }),
    };
    row.left = make("span");
    row.right = make("span");
    row.button = make(
      "button",
      { type: "button" },
      row.name,
      row.spoken,
      make("span", { className: "track" }, row.before, row.after),
      row.left,
      make("span", { className: "hidden", textContent: "after the filters" }),
      row.right,
    );
    row.button.addEventListener("click", () => this.branch(row.character));
    row.item = make("li", {}, row.button);
    $("bars").append(row.item);
    return row;
  }

  // Continues from the chosen position with another character.
  branch(character) {
    const { text } = this,
      at = Number($("position").value);
    if (text.text[at] === character) return;
    const position = text.dropped + at;
    const kept = parseBranches(this.choices.branches).filter(([i]) => i < position);
    this.write({ branches: formatBranches([...kept, [position, character]]) });
  }
}

const percent = (p) =>
  p >= 0.9995 ? "100 %" : p >= 0.0005 ? `${(100 * p).toFixed(1)} %` : p > 0 ? "< 0.1 %" : "–";
// Two digits after the point, or more if the number has more.
const twoDigits = (x) => (Number(x.toFixed(2)) === x ? x.toFixed(2) : String(x));
const spoken = (c) => ({ "\n": "line end", " ": "space" })[c] ?? c;
