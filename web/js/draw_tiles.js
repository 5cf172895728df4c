// @ts-check
// Draws the view Tiles on its canvases: Q left of S, K above it, V below it, O right of it, scratch in the corners.
import { colour } from "./dom.js";

const GAP = 3; // between the matrices, in cells
const EDGE = 4; // around them, in cells
const TITLES = { Kt: "tile of Kᵀ", Qt: "tile of Qᵀ", Ot: "tile of Oᵀ", ml: "m and l" };
const SHADES = [0.18, 0.5, 1]; // in memory only, in L2, in L1

/** @type {(rgb: number[], alpha?: number) => string} */
const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

// Sizes a canvas in device pixels; its pen works in CSS pixels.
function fit(canvas, isSquare) {
  const width = canvas.clientWidth || 320,
    height = isSquare ? width : canvas.clientHeight;
  const density = devicePixelRatio || 1;
  if (isSquare) canvas.style.aspectRatio = "1";
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  return { pen, width, height };
}

// The cell of query i and key j in S (rows, columns), which begins with `base`, may have keys as rows, and may be a tile.
export function scoreAt([rows, columns], isTurned, base, i, j) {
  const [y, x] = [i, j].map((at, n) => Math.abs(at - base[n]));
  return isTurned ? [x % rows, y % columns] : [y % rows, x % columns];
}

// view: {N, d, left, heads: {q, k, v}, results: {S, P, O}, boxes, matrices: {name: [rows, columns]}, isTurned,
// base: of S, kinds (N N): "", "scores" or "weights", progress (N): share of O, weightOf(i, j), place(m, i, c): 0-2}.
/** @param {HTMLCanvasElement} canvas @param {any} view */
export function draw(canvas, view) {
  const { N, d, heads, results, kinds } = view,
    scratch = Object.entries(view.matrices).filter(([m]) => !["Q", "K", "V", "O", "S"].includes(m));
  const { pen, width } = fit(canvas, true),
    size = width / (N + 2 * (d + GAP + EDGE));
  const [ink, red, blue, rule, soft] = ["--ink", "--red", "--blue", "--rule", "--soft"].map(colour);
  const start = EDGE + d + GAP, // of S, from the left and from the top
    end = start + N + GAP; // where O and V begin
  // The cell of row r and column c. K and V are transposed.
  const places = {
    Q: (r, c) => [EDGE + c, start + r],
    O: (r, c) => [end + c, start + r],
    K: (r, c) => [start + r, EDGE + c],
    V: (r, c) => [start + r, end + c],
    S: (r, c) => [start + c, start + r],
  };
  // Each scratch matrix gets a corner, clockwise, and is scaled to fit.
  const cells = new Map();
  scratch.forEach(([m, [rows, columns]], n) => {
    const [x, y] = [[EDGE, EDGE], [end, EDGE], [end, end + 1], [EDGE, end + 1]][n],
      [wide, tall] = [columns, rows].map((count) => Math.min(1, d / count));
    cells.set(m, [wide, tall]);
    places[m] = (r, c) => [x + c * wide, y + r * tall];
  });
  const cellOf = (m) => cells.get(m) ?? [1, 1];
  const cell = (m, r, c, fill) => {
    const [x, y] = places[m](r, c),
      [wide, tall] = cellOf(m);
    pen.fillStyle = fill;
    pen.fillRect(x * size, y * size, size * wide * 1.02, size * tall * 1.02);
  };
  const shade = (m, r, c) => SHADES[view.place(m, r, c)];
  const each = (rows, columns, use) => {
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) use(r, c);
  };
  const most = (values) => values.reduce((m, x) => Math.max(m, Math.abs(x)), 1e-9);
  for (const [m, values] of Object.entries({ Q: heads.q, K: heads.k, V: heads.v, O: results.O })) {
    const top = most(values);
    each(N, d, (r, c) => {
      const share = Math.sqrt(Math.abs(values[r * d + c]) / top) * (m === "O" ? view.progress[r] : 1);
      cell(m, r, c, css(ink, 0.06 + 0.94 * shade(m, r, c) * share));
    });
  }
  for (const [m, [rows, columns]] of scratch)
    each(rows, columns, (r, c) => cell(m, r, c, css(ink, 0.6 * shade(m, r, c))));
  const largest = most(results.S);
  each(N, N, (i, j) => {
    const kind = kinds[i * N + j];
    if (kind) {
      const isScore = kind === "scores",
        share = isScore ? Math.abs(results.S[i * N + j]) / largest : view.weightOf(i, j);
      const dark = shade("S", ...scoreAt(view.matrices.S, view.isTurned, view.base, i, j)) * (0.2 + 0.8 * Math.sqrt(share));
      cell("S", i, j, css(isScore ? ink : red, dark));
    } else if (j <= i && i - j <= view.left) cell("S", i, j, css(rule, 0.35));
  });
  pen.lineWidth = Math.max(1.5, size / 3);
  for (const [m, { r, c, w }] of Object.entries(view.boxes)) {
    const [x0, y0] = places[m](r[0], c[0]),
      [x1, y1] = places[m](r[1] - 1, c[1] - 1),
      [wide, tall] = cellOf(m);
    pen.strokeStyle = css(w ? red : blue);
    pen.strokeRect(x0 * size, y0 * size, (x1 - x0 + wide) * size, (y1 - y0 + tall) * size);
  }
  pen.fillStyle = css(soft);
  pen.font = `italic ${Math.max(11, size * 2.2)}px ${getComputedStyle(document.body).fontFamily}`;
  const label = (text, align, x, y) => {
    pen.textAlign = align;
    pen.fillText(text, x * size, y * size);
  };
  for (const [name, at] of [["Q", EDGE], ["O", end]]) label(name, "center", at + d / 2, start - 1);
  for (const [name, at] of [["Kᵀ", EDGE], ["Vᵀ", end]]) label(name, "right", start - 1, at + d / 2);
  label("S", "right", start - 0.6, start - 0.8);
  for (const [m] of scratch) {
    const [x, y] = places[m](0, 0);
    label(Object.hasOwn(TITLES, m) ? TITLES[m] : m, "left", x, y - 0.8);
  }
}

// A row's running m (line) and l (bars) after each tile; `now` is the last tile that is done.
/** @param {HTMLCanvasElement} canvas @param {{ m: number, l: number }[]} history @param {number} now */
export function drawRow(canvas, history, now) {
  const { pen, width, height } = fit(canvas),
    pad = 14,
    inside = height - 2 * pad,
    each = (width - 2 * pad) / history.length;
  const [red, blue] = ["--red", "--blue"].map(colour);
  const ms = history.map(({ m }) => m),
    low = Math.min(...ms.filter(Number.isFinite)),
    range = Math.max(...ms) - low,
    tall = Math.max(...history.map(({ l }) => l));
  const x = (j) => pad + (j + 0.5) * each,
    y = (m) => height - pad - inside * (0.15 + 0.8 * (range > 0 ? (m - low) / range : 1));
  const bar = Math.min(24, each / 2);
  history.forEach(({ l }, j) => {
    const h = (inside * l) / tall;
    pen.fillStyle = css(red, j <= now ? 0.55 : 0.1);
    pen.fillRect(x(j) - bar / 2, height - pad - h, bar, h);
  });
  pen.strokeStyle = pen.fillStyle = css(blue);
  pen.lineWidth = 2;
  const line = new Path2D();
  ms.slice(0, now + 1).forEach((m, j) => {
    line.lineTo(x(j), y(m));
    const point = new Path2D();
    point.arc(x(j), y(m), 3, 0, 7);
    pen.fill(point);
  });
  pen.stroke(line);
}
