// @ts-check
// What Attention and Tiles share: a view of the text, which the worker reads again when it has changed.
import { encode } from "./checkpoint.js";

export class Reading {
  /** @type {any} the Page */ page;
  /** @type {import("./engine.js").Engine} */ engine;
  /** @type {import("./text.js").Writing | null} */ text;
  /** @type {string} */ name;
  length = 0; // of the text when it was read
  /** @type {string[]} */ characters;

  // name: the worker's, for the text of this view. A view has read(), which loads what it shows, and redraw().
  constructor(page, name) {
    Object.assign(this, { page, name });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  // Reads the text, unless it was read before.
  async show() {
    const { text, engine } = this.page;
    if (!engine || !text?.written) return;
    if (this.text === text && this.length === text.written) {
      this.redraw();
      return;
    }
    const { written } = text;
    Object.assign(this, { text, engine, length: written });
    this.isCurrent = () => this.text === text && this.length === written && this.page.engine === engine;
    this.characters = [...(text.prompt || "\n"), ...text.text];
    try {
      await this.read();
    } catch (error) {
      if (!this.isCurrent()) return;
      this.text = null;
      this.page.problem(error);
    }
  }

  async read() {}

  redraw() {}

  call(method, argument) { return this.engine.call(method, { of: this.name, ...argument }); }

  // Keeps `characters` and what the model computes for them: {T, layers, heads, d, maps, telling}; see Session.observe().
  async observe(characters, size = 1) {
    const ids = encode(characters.join(""), this.engine.characters);
    return { ...(await this.call("observe", { ids, size })), characters };
  }

  // The chosen head, within the model, or the one that looks back furthest.
  chosen({ telling, layers, heads }) {
    const { layer, head } = this.page.choices.layer < 0 ? telling : this.page.choices;
    return { layer: Math.min(layer, layers - 1), head: Math.max(0, Math.min(head, heads - 1)) };
  }
}

// The heads of a model, layer by layer: [{layer, head, title}].
export const allHeads = ({ layers, heads }) =>
  Array.from({ length: layers * heads }, (_, i) => {
    const layer = Math.floor(i / heads),
      head = i % heads;
    return { layer, head, title: `layer ${layer + 1}, head ${head + 1}` };
  });
