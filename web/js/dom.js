// @ts-check
// Small helpers for the page's elements.

/** @type {(id: string) => any} an element of index.html, of its own kind */
export const $ = (id) => document.getElementById(id);

/** @type {(id: string, type: string, call: (event: any) => void) => void} */
export const on = (id, type, call) => $(id).addEventListener(type, call);

// Calls call(button) in place of sending the form.
/** @type {(id: string, call: (button: HTMLButtonElement) => void) => void} */
export const onSubmit = (id, call) =>
  on(id, "submit", (event) => {
    event.preventDefault();
    call(event.submitter);
  });

/** @param {string} id @param {string | number} text */
export function say(id, text) { $(id).textContent = text; }

/** @param {string} tag @param {Record<string, any>} properties @param {...(Node | string)} children @returns {any} */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

export const copy = (id) => $(id).content.firstElementChild.cloneNode(true);

export const option = (value, label, defaultSelected = false) => make("option", { value, textContent: label, defaultSelected });

// heading: null for a row without one. cells: texts or elements.
/** @param {string | null} heading @param {...(Node | string)} cells */
export function tableRow(heading, ...cells) {
  const first = heading === null ? [] : [make("th", { scope: "row" }, heading)];
  return make("tr", {}, ...first, ...cells.map((cell) => make("td", {}, cell)));
}

export const frame = () => new Promise((done) => requestAnimationFrame(done));

export const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

// A colour of style.css as it is now.
/** @param {string} name */
export const colour = (name) => getComputedStyle(document.body).getPropertyValue(name);

// part4_flash: flash
export const algorithmOf = (operator) => operator.replace(/.*?_/, "").replaceAll("_", " ");

export const shown = (character) => ({ "\n": "⏎", " ": "␣" })[character] ?? character;

/** @type {(x: number) => string} */
export const number = (x) => x.toLocaleString("en", { maximumFractionDigits: 0 });

// 3 significant digits, or all before the point.
/** @type {Intl.NumberFormatOptions} */
const DIGITS = { maximumSignificantDigits: 3, maximumFractionDigits: 0, roundingPriority: "morePrecision" };
/** @type {(x: number) => string} */
export const brief = (x) => x.toLocaleString("en", DIGITS);

/** @param {number} n */
export function bytes(n) {
  if (n < 1024) return `${number(n)} B`;
  const [unit, name] = n < 2 ** 20 ? [2 ** 10, "KB"] : n < 2 ** 30 ? [2 ** 20, "MB"] : [2 ** 30, "GB"];
  return `${brief(n / unit)} ${name}`;
}
