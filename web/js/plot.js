// @ts-check
// A picture in SVG with two linear axes.
import { $ } from "./dom.js";

export class Plot {
  /**
   * @param {string} id of the <svg>, which is emptied
   * @param {Record<"left" | "right" | "top" | "bottom", number>} edges of the axes in it
   * @param {number[]} xs the values at the left and the right edge
   * @param {number[]} ys those at the bottom and the top
   */
  constructor(id, edges, [x0, x1], [y0, y1]) {
    this.edges = edges;
    this.picture = $(id);
    this.picture.replaceChildren();
    this.wide = (edges.right - edges.left) / (x1 - x0); // of 1
    this.tall = (edges.bottom - edges.top) / (y1 - y0);
    this.x = (value) => edges.left + this.wide * (value - x0);
    this.y = (value) => edges.bottom - this.tall * (value - y0);
  }

  /** @param {string} tag @param {Record<string, string | number>} attributes @param {string | number} text */
  add(tag, attributes, text = "") {
    const element = document.createElementNS(this.picture.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    element.append(String(text));
    this.picture.append(element);
  }

  text(text, x, y, anchor = "start", more = {}) { this.add("text", { x, y, "text-anchor": anchor, ...more }, text); }

  // A line of the grid at a value.
  markX(value, text) {
    const x = this.x(value),
      { top, bottom } = this.edges;
    this.add("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom });
    this.text(text, x, bottom + 20, "middle");
  }

  markY(value, text) {
    const y = this.y(value),
      { left, right } = this.edges;
    this.add("line", { class: "grid", x1: left, x2: right, y1: y, y2: y });
    this.text(text, left - 8, y + 4, "end");
  }

  // A line through points [x, y].
  line(name, points) {
    this.add("polyline", { class: name, points: points.map(([x, y]) => `${this.x(x)},${this.y(y)}`).join(" ") });
  }
}
