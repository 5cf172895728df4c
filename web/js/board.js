// Draws the view Tiles: Q left of S, K above it, V below it, O right of it, scratch in the corners.
import { colour } from "./dom.js";

const GAP = 3; // between the matrices, in cells
const EDGE = 4; // around them, in cells
const NAMES = { Q: "Q", K: "Kᵀ", V: "Vᵀ", S: "S", O: "O" };
const SCRATCH = { Kt: "tile of Kᵀ", Qt: "tile of Qᵀ", Ot: "tile of Oᵀ", ml: "m and l" };

const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

// Sizes a canvas to its place on the page, in device pixels; its pen works in CSS pixels.
export function fit(canvas, ratio) {
  const width = canvas.clientWidth || 320,
    height = ratio ? width * ratio : canvas.clientHeight;
  const density = devicePixelRatio || 1;
  if (ratio) canvas.style.aspectRatio = `${1 / ratio}`;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  return { pen, width, height };
}

// view: {N, d, heads: {q, k, v}, results: {S, P, O}, step, kinds (N N): 0 empty, 1 score, 2 weight, weightOf(i, j),
// progress (N): share of O, place(m, i, c): 0, 1 or 2, scoreAt(i, j): where S has a score,
// scratch: [[m, [rows, columns]], ...]}.
export function draw(canvas, view) {
  const { N, d } = view,
    cells = N + 2 * (d + GAP + EDGE);
  const { pen, width } = fit(canvas, 1),
    size = width / cells;
  const ink = colour("--ink"),
    red = colour("--red"),
    blue = colour("--blue"),
    rule = colour("--rule");
  const left = EDGE + d + GAP,
    top = EDGE + d + GAP;
  // Scratch is at most as wide as a corner.
  const narrow = Math.min(1, d / Math.max(1, ...view.scratch.map(([, [, columns]]) => columns)));
  const wide = (m) => (m in SCRATCH ? narrow : 1);
  // The place of row r and column c of a matrix, in cells. K and V are transposed.
  const places = {
    Q: (r, c) => [EDGE + c, top + r],
    O: (r, c) => [left + N + GAP + c, top + r],
    K: (r, c) => [left + r, EDGE + c],
    V: (r, c) => [left + r, top + N + GAP + c],
    S: (r, c) => [left + c, top + r],
    Kt: (r, c) => [EDGE + c * narrow, EDGE + r],
    Qt: (r, c) => [EDGE + c * narrow, EDGE + r],
    Ot: (r, c) => [left + N + GAP + c * narrow, EDGE + r],
    ml: (r, c) => [left + N + GAP + c * narrow, top + N + GAP + 1 + r],
  };
  const cell = (m, r, c, fill) => {
    const [x, y] = places[m](r, c);
    pen.fillStyle = fill;
    pen.fillRect(x * size, y * size, size * wide(m) * 1.02, size * 1.02);
  };
  const most = (values) => values.reduce((m, x) => Math.max(m, Math.abs(x)), 1e-9);
  const shades = [0.18, 0.5, 1]; // memory, L2, L1
  const matrix = (m, values, rows) => {
    const top = most(values);
    for (let r = 0; r < N; r++) {
      for (let c = 0; c < d; c++) {
        const x = Math.sqrt(Math.abs(values[r * d + c]) / top) * rows(r);
        const dark = shades[view.place(m, r, c)];
        cell(m, r, c, css(ink, 0.06 + 0.94 * dark * x));
      }
    }
  };
  matrix("Q", view.heads.q, () => 1);
  matrix("K", view.heads.k, () => 1);
  matrix("V", view.heads.v, () => 1);
  matrix("O", view.results.O, (r) => view.progress[r]);
  for (const [m, [rows, columns]] of view.scratch)
    for (let r = 0; r < rows; r++)
      for (let c = 0; c < columns; c++) cell(m, r, c, css(ink, 0.6 * shades[view.place(m, r, c)]));
  const largest = most(view.results.S);
  for (let i = 0; i < N; i++) {
    for (let j = 0; j < N; j++) {
      const kind = view.kinds[i * N + j];
      if (kind === 0) {
        if (j <= i) cell("S", i, j, css(rule, 0.35));
        continue;
      }
      const share = kind === 1 ? Math.abs(view.results.S[i * N + j]) / largest : view.weightOf(i, j);
      const dark = shades[view.place("S", ...view.scoreAt(i, j))];
      cell("S", i, j, css(kind === 1 ? ink : red, dark * (0.2 + 0.8 * Math.sqrt(share))));
    }
  }
  pen.lineWidth = Math.max(1.5, size / 3);
  for (const { m, r, c, w } of view.step.boxes) {
    const [x0, y0] = places[m](r[0], c[0]),
      [x1, y1] = places[m](r[1] - 1, c[1] - 1);
    pen.strokeStyle = css(w ? red : blue);
    pen.strokeRect(x0 * size, y0 * size, (x1 - x0 + wide(m)) * size, (y1 - y0 + 1) * size);
  }
  pen.fillStyle = css(colour("--soft"));
  pen.font = `italic ${Math.max(11, size * 2.2)}px ${getComputedStyle(document.body).fontFamily}`;
  pen.textAlign = "center";
  const label = (m, x, y) => pen.fillText(NAMES[m] ?? SCRATCH[m], x * size, y * size);
  label("Q", EDGE + d / 2, top - 1);
  label("O", left + N + GAP + d / 2, top - 1);
  for (const [m] of view.scratch) {
    const [x, y] = places[m](0, 0);
    pen.textAlign = "left";
    label(m, x, y - 0.8);
  }
  pen.textAlign = "right";
  label("K", left - 1, EDGE + d / 2);
  label("V", left - 1, top + N + GAP + d / 2);
  label("S", left - 0.6, top - 0.8);
}

// A row's running m (line) and l (bars) after each tile; `now` is the last tile that is done.
export function drawRow(canvas, history, now) {
  const { pen, width, height } = fit(canvas),
    pad = 14,
    n = history.length;
  const red = colour("--red"),
    blue = colour("--blue");
  const x = (j) => pad + ((j + 0.5) * (width - 2 * pad)) / n;
  const ms = history.map(({ m }) => m),
    low = Math.min(...ms),
    high = Math.max(...ms),
    tall = Math.max(...history.map(({ l }) => l));
  const y = (m) =>
    height - pad - (height - 2 * pad) * (0.15 + 0.8 * (high > low ? (m - low) / (high - low) : 1));
  const bar = Math.min(24, (width - 2 * pad) / n / 2);
  history.forEach(({ l }, j) => {
    const h = ((height - 2 * pad) * l) / tall;
    pen.fillStyle = css(red, j <= now ? 0.55 : 0.1);
    pen.fillRect(x(j) - bar / 2, height - pad - h, bar, h);
  });
  pen.strokeStyle = pen.fillStyle = css(blue);
  pen.lineWidth = 2;
  pen.beginPath();
  history.slice(0, now + 1).forEach(({ m }, j) => (j ? pen.lineTo(x(j), y(m)) : pen.moveTo(x(j), y(m))));
  pen.stroke();
  history.slice(0, now + 1).forEach(({ m }, j) => {
    pen.beginPath();
    pen.arc(x(j), y(m), 3, 0, 7);
    pen.fill();
  });
}
