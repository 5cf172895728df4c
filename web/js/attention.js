// @ts-check
// The view Attention: the weights of every layer and head for the text, as maps.
import { $, colour, make, number, on, say, shown } from "./dom.js";
import { allHeads, Reading } from "./reading.js";

const MAP = 96; // side of a small map, in cells
const SEEN = 400; // characters before the query that are shown

// Weights (n x n) -> pixels; the square root makes small weights visible.
function paint(canvas, P, n) {
  canvas.width = canvas.height = n;
  const pen = canvas.getContext("2d"),
    image = pen.createImageData(n, n);
  for (let i = 0; i < n * n; i++) image.data[4 * i + 3] = 255 * Math.sqrt(P[i]); // opacity
  pen.putImageData(image, 0, 0);
  pen.globalCompositeOperation = "source-in"; // the colour, as opaque as the pixels
  pen.fillStyle = colour("--red");
  pen.fillRect(0, 0, n, n);
}

export class AttentionView extends Reading {
  /** @type {any} what observe() gives */ seen;
  /** @type {Float32Array} weights (T, T) of the chosen head */ P;
  /** @type {HTMLButtonElement[]} */ buttons;
  /** @type {number} */ layer;
  /** @type {number} */ head;
  /** @type {number} the query whose row is shaded */ shaded;
  /** @type {Float32Array} */ shadedOf;

  constructor(page) {
    super(page, "attention");
    for (const id of ["query", "key"]) on(id, "input", () => this.keep());
    const box = document.querySelector(".heat");
    const at = (/** @type {any} a pointer event */ { clientX, clientY }) => {
      if (!this.P) return;
      const { left, top, width, height } = box.getBoundingClientRect(),
        { T } = this.seen;
      const cell = (share) => Math.max(0, Math.min(T - 1, Math.floor(share * T)));
      $("query").value = cell((clientY - top) / height);
      $("key").value = cell((clientX - left) / width);
      this.keep();
    };
    for (const type of ["pointermove", "pointerdown"]) box.addEventListener(type, at);
  }

  async read() {
    const { page, engine } = this,
      seen = await this.observe(this.characters.slice(-engine.config.block_size), MAP);
    if (!this.isCurrent()) return;
    Object.assign(this, { seen, P: null });
    this.drawMaps();
    for (const id of ["query", "key"]) $(id).max = seen.T - 1;
    $("query").value = page.choices.query < 0 ? seen.T - 1 : page.choices.query;
    await this.choose(this.chosen(seen));
  }

  drawMaps() {
    $("maps").style.gridTemplateColumns = `repeat(${this.seen.heads}, minmax(0, 1fr))`;
    this.buttons = allHeads(this.seen).map(({ layer, head, title }) => {
      const button = make("button", { type: "button", title, ariaLabel: title }, make("canvas"));
      button.addEventListener("click", () => {
        this.page.choose({ key: -1 });
        this.choose({ layer, head });
      });
      return button;
    });
    $("maps").replaceChildren(...this.buttons);
    this.redraw();
  }

  redraw() {
    this.seen?.maps.forEach((map, i) => paint(this.buttons[i].firstChild, map, Math.sqrt(map.length)));
    if (!this.P) return;
    paint($("heat"), this.P, this.seen.T);
    this.shade(Number($("query").value));
  }

  async choose({ layer, head }) {
    const { page, engine, seen } = this;
    if (engine !== page.engine) return; // another model was chosen
    page.choose({ layer, head });
    const P = await this.call("weights", { layer, head });
    if (seen !== this.seen || page.choices.layer !== layer || page.choices.head !== head) return;
    Object.assign(this, { P, layer, head });
    this.buttons.forEach((button, i) => {
      button.ariaPressed = String(i === layer * seen.heads + head);
    });
    paint($("heat"), P, seen.T);
    const row = this.row(Number($("query").value));
    $("key").value = page.choices.key < 0 ? row.indexOf(Math.max(...row)) : page.choices.key;
    this.point();
  }

  // A query's weights on the keys that it sees.
  row(i) {
    const { T } = this.seen;
    return this.P.subarray(i * T, i * T + i + 1);
  }

  // The sliders' query and key are choices: a link shows them again.
  keep() {
    this.page.choose({ query: Number($("query").value), key: Number($("key").value) });
    this.point();
  }

  point() {
    if (!this.P) return;
    const { T, characters } = this.seen,
      [i, j] = ["query", "key"].map((id) => Number($(id).value));
    $("cross-h").style.top = `${(100 * (i + 0.5)) / T}%`;
    $("cross-v").style.left = `${(100 * (j + 0.5)) / T}%`;
    const name = (at) => `“${shown(characters[at])}” at ${number(at + 1)}`;
    say("query-out", name(i));
    say("key-out", name(j));
    const where = `Layer ${this.layer + 1}, head ${this.head + 1}`,
      weight = `${where}: ${name(i)} gives ${name(j)} the weight ${this.P[i * T + j].toFixed(5)}.`,
      { window = null } = this.engine.config,
      unseen = j > i ? "comes later" : window && i - j >= window ? `is before its window of ${number(window)}` : "";
    say("heat-status", unseen ? `${name(i)} does not see ${name(j)}, which ${unseen}.` : weight);
    if (i !== this.shaded || this.P !== this.shadedOf) this.shade(i);
  }

  // The text before the query, each character as dark as its weight.
  shade(i) {
    Object.assign(this, { shaded: i, shadedOf: this.P });
    const from = Math.max(0, i - SEEN),
      row = this.row(i).subarray(from);
    const marks = this.seen.characters.slice(from, i + 1).map((c, n) => {
      const mark = make("mark", { className: from + n === i ? "query" : "" }, c === "\n" ? "⏎\n" : c);
      mark.style.setProperty("--weight", Math.sqrt(row[n]).toFixed(3));
      return mark;
    });
    $("seen").replaceChildren(...marks);
    $("seen").scrollTop = $("seen").scrollHeight;
  }
}
