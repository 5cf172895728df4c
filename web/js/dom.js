// Small helpers for the page's elements.

export const $ = (id) => document.getElementById(id);

// An element with properties and children.
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

export const frame = () => new Promise((done) => requestAnimationFrame(done));

// A colour of style.css as [red, green, blue] from 0 to 255.
export function colour(name) {
  const canvas = new OffscreenCanvas(1, 1),
    pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  const probe = make("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  pen.fillStyle = getComputedStyle(probe).color;
  probe.remove();
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

// Calls a function when the colours of the page change.
export function onTheme(call) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", call);
}

// The visible form of a single character.
export function shown(character) {
  return { "\n": "⏎", " ": "␣" }[character] ?? character;
}

export const number = (x, digits = 0) =>
  x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

// 3 significant digits.
export function brief(x) {
  if (x >= 100) return number(x);
  if (Number.isInteger(x)) return number(x);
  return number(x, Math.max(0, 2 - Math.floor(Math.log10(x))));
}

export function bytes(n) {
  if (n < 1024) return `${number(n)} B`;
  const [unit, name] = n < 2 ** 20 ? [2 ** 10, "KB"] : n < 2 ** 30 ? [2 ** 20, "MB"] : [2 ** 30, "GB"];
  return `${brief(n / unit)} ${name}`;
}
