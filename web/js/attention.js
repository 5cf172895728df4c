// The view Attention: the weights of every layer and head for the text, as maps.
import { $, colour, make, number, onTheme, shown } from "./dom.js";
import { encode } from "./checkpoint.js";

const MAP = 96; // side of a small map, in cells
const OF = "attention"; // the worker's name for the text of this view

// Weights (n x n) -> pixels; the square root makes small weights visible.
export function paint(canvas, P, n, from, to, scale = 1) {
  canvas.width = canvas.height = n;
  const pen = canvas.getContext("2d"),
    image = pen.createImageData(n, n),
    pixels = new Uint32Array(image.data.buffer);
  const shades = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const [r, g, b] = from.map((x, c) => Math.round(x + ((to[c] - x) * i) / 255));
    shades[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  for (let i = 0; i < n * n; i++) pixels[i] = shades[Math.min(255, (255 * Math.sqrt(P[i] * scale)) | 0)];
  pen.putImageData(image, 0, 0);
}

export class AttentionView {
  constructor(page) {
    this.page = page;
    for (const id of ["query", "key"]) $(id).addEventListener("input", () => this.keep());
    const box = document.querySelector(".heat");
    const at = (event) => {
      const { left, top, width, height } = box.getBoundingClientRect();
      const cell = (x, size) => Math.max(0, Math.min(this.T - 1, Math.floor((x / size) * this.T)));
      if (!this.T) return;
      $("query").value = cell(event.clientY - top, height);
      $("key").value = cell(event.clientX - left, width);
      this.keep();
    };
    box.addEventListener("pointermove", at);
    box.addEventListener("pointerdown", at);
    onTheme(() => {
      if (this.P) this.redraw();
    });
  }

  // Reads the text, unless it was read before.
  async show() {
    const { text, engine } = this.page;
    if (!engine || !text?.written || (this.of === text && this.written === text.written)) return;
    const { written } = text,
      { characters, config } = engine;
    Object.assign(this, { of: text, written });
    const current = () => this.of === text && this.written === written && this.page.engine === engine;
    const all = [...(text.dropped ? "" : text.prompt || "\n"), ...text.text].slice(-config.block_size);
    try {
      const ids = encode(all.join(""), characters);
      const { T, layers, heads } = await engine.call("observe", { of: OF, ids });
      const { maps, telling } = await engine.call("maps", { of: OF, size: MAP });
      if (!current()) return;
      Object.assign(this, { T, layers, heads, characters: all, small: maps, engine, P: null });
      this.drawMaps();
      for (const id of ["query", "key"]) $(id).max = T - 1;
      $("query").value = this.page.choices.query < 0 ? T - 1 : Math.min(this.page.choices.query, T - 1);
      const { layer, head } = this.page.choices.layer < 0 ? telling : this.page.choices;
      await this.choose(Math.min(layer, layers - 1), Math.max(0, Math.min(head, heads - 1)));
    } catch (error) {
      if (!current()) return;
      this.of = null;
      this.page.problem(error);
    }
  }

  drawMaps() {
    $("maps").style.gridTemplateColumns = `repeat(${this.heads}, minmax(0, 1fr))`;
    this.buttons = this.small.map((_, i) => {
      const layer = Math.floor(i / this.heads),
        head = i % this.heads;
      const button = make(
        "button",
        { type: "button", title: `layer ${layer + 1}, head ${head + 1}` },
        make("canvas", {}),
      );
      button.ariaLabel = button.title;
      button.addEventListener("click", () => {
        this.page.choose({ key: -1 });
        this.choose(layer, head);
      });
      return button;
    });
    $("maps").replaceChildren(...this.buttons);
    this.paintMaps();
  }

  paintMaps() {
    const from = colour("--sheet"),
      to = colour("--red");
    this.buttons.forEach((button, i) => {
      const map = this.small[i];
      paint(button.firstChild, map, Math.sqrt(map.length), from, to);
    });
  }

  redraw() {
    this.paintMaps();
    paint($("heat"), this.P, this.T, colour("--sheet"), colour("--red"));
    this.point();
  }

  async choose(layer, head) {
    const { page, engine, small } = this;
    if (engine !== page.engine) return; // another model was chosen
    page.choose({ layer, head });
    const P = await engine.call("weights", { of: OF, layer, head });
    if (small !== this.small || page.choices.layer !== layer || page.choices.head !== head) return;
    Object.assign(this, { P, layer, head });
    this.buttons.forEach((button, i) => {
      button.ariaPressed = String(i === layer * this.heads + head);
    });
    paint($("heat"), this.P, this.T, colour("--sheet"), colour("--red"));
    const i = Number($("query").value),
      row = this.P.subarray(i * this.T, i * this.T + i + 1);
    $("key").value = page.choices.key < 0 ? row.indexOf(Math.max(...row)) : page.choices.key;
    this.point();
  }

  // The sliders' query and key are choices: a link shows them again.
  keep() {
    this.page.choose({ query: Number($("query").value), key: Number($("key").value) });
    this.point();
  }

  // Names the query and the key of the sliders, and the weight.
  point() {
    if (!this.P) return;
    const { T, characters } = this,
      i = Number($("query").value),
      j = Number($("key").value);
    $("cross-h").style.top = `${(100 * (i + 0.5)) / T}%`;
    $("cross-v").style.left = `${(100 * (j + 0.5)) / T}%`;
    const name = (at) => `“${shown(characters[at])}” at ${number(at + 1)}`;
    $("query-out").textContent = name(i);
    $("key-out").textContent = name(j);
    const weight = this.P[i * T + j];
    $("heat-status").textContent =
      j > i
        ? `${name(i)} does not see ${name(j)}, which comes later.`
        : `Layer ${this.layer + 1}, head ${this.head + 1}: ${name(i)} gives ${name(j)} the weight ${weight.toFixed(5)}.`;
    if (i !== this.shaded || this.shadedOf !== this.P) this.shade(i);
  }

  // The text before the query, each character as dark as its weight.
  shade(i) {
    Object.assign(this, { shaded: i, shadedOf: this.P });
    const from = Math.max(0, i - 400),
      row = this.P.subarray(i * this.T, i * this.T + i + 1);
    const [r, g, b] = colour("--red");
    $("seen").replaceChildren(
      ...this.characters.slice(from, i + 1).map((c, n) => {
        const mark = make("mark", {
          textContent: c === "\n" ? "⏎\n" : c,
          className: from + n === i ? "query" : "",
        });
        const share = Math.sqrt(row[from + n]);
        if (share > 0.05) mark.style.backgroundColor = `rgb(${r} ${g} ${b} / ${(0.75 * share).toFixed(3)})`;
        return mark;
      }),
    );
    $("seen").scrollTop = $("seen").scrollHeight;
  }
}
