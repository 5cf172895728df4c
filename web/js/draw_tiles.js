// @ts-check
// Draws the view Tiles on its canvases: Q left of S, K above it, V below it, O right of it, scratch in the corners.
import { colour } from "./dom.js";
import { Plot } from "./plot.js";

const GAP = 3; // between the matrices, in cells
const EDGE = 4; // around them, in cells
const TITLES = { Kt: "tile of Kᵀ", Qt: "tile of Qᵀ", Ot: "tile of Oᵀ", ml: "m and l" };
const SHADES = [0.18, 0.5, 1]; // in memory only, in L2, in L1

const ML_EDGES = { left: 14, right: 306, top: 14, bottom: 106 };

// The cell of query i and key j in S (rows, columns), which begins with `base`, may have keys as rows, and may be a tile.
export function scoreAt([rows, columns], isTurned, base, i, j) {
  const [y, x] = [i, j].map((at, n) => Math.abs(at - base[n]));
  return isTurned ? [x % rows, y % columns] : [y % rows, x % columns];
}

// view: {N, d, left, heads: {q, k, v}, results: {S, P, O}, boxes, matrices: {name: [rows, columns]}, isTurned,
// base: of S, kinds (N N): "", "scores" or "weights", progress (N): share of O, weightOf(i, j), place(m, i, c): 0-2}.
/** @param {HTMLCanvasElement} canvas @param {any} view */
export function draw(canvas, view) {
  const { N, d, left, heads, results, kinds, matrices } = view,
    [ink, red, blue, rule, soft] = ["--ink", "--red", "--blue", "--rule", "--soft"].map(colour),
    start = EDGE + d + GAP, // of S, from the left and from the top
    end = start + N + GAP, // where O and V begin
    across = end + d + EDGE, // cells of the picture
    width = canvas.clientWidth || 320,
    size = width / across, // of a cell, in pixels
    pen = canvas.getContext("2d");
  canvas.width = canvas.height = Math.round(width * devicePixelRatio);
  pen.scale(size * devicePixelRatio, size * devicePixelRatio); // its unit is a cell
  /** @type {Record<string, any>} where a matrix begins and how large its cells are; K and V are transposed */
  const places = {
    Q: { x: EDGE, y: start },
    O: { x: end, y: start },
    K: { x: start, y: EDGE, isTurned: true },
    V: { x: start, y: end, isTurned: true },
    S: { x: start, y: start },
  };
  const corners = [[EDGE, EDGE], [end, EDGE], [end, end + 1], [EDGE, end + 1]], // of the scratch, clockwise
    scratch = Object.keys(matrices).filter((m) => !Object.hasOwn(places, m));
  scratch.forEach((m, n) => {
    const [x, y] = corners[n],
      [tall, wide] = matrices[m].map((count) => Math.min(1, d / count)); // it fits
    places[m] = { x, y, wide, tall };
  });
  // x, y, width and height of rows and columns of a matrix
  /** @type {(m: string, rows: number[], columns: number[]) => [number, number, number, number]} */
  const area = (m, [r0, r1], [c0, c1]) => {
    const { x, y, isTurned, wide = 1, tall = 1 } = places[m];
    if (isTurned) return [x + r0, y + c0, r1 - r0, c1 - c0];
    return [x + c0 * wide, y + r0 * tall, (c1 - c0) * wide, (r1 - r0) * tall];
  };
  const cell = (m, r, c, fill, alpha) => {
    pen.fillStyle = fill;
    pen.globalAlpha = alpha;
    pen.fillRect(...area(m, [r, r + 1.02], [c, c + 1.02]));
  };
  const shade = (m, r, c) => SHADES[view.place(m, r, c)],
    most = (values) => values.reduce((m, x) => Math.max(m, Math.abs(x)), 1e-9);
  const each = ([rows, columns], use) => {
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) use(r, c);
  };
  for (const [m, values] of Object.entries({ Q: heads.q, K: heads.k, V: heads.v, O: results.O })) {
    const largest = most(values);
    each(matrices[m], (r, c) => {
      const share = Math.sqrt(Math.abs(values[r * d + c]) / largest) * (m === "O" ? view.progress[r] : 1);
      cell(m, r, c, ink, 0.06 + 0.94 * shade(m, r, c) * share);
    });
  }
  for (const m of scratch) each(matrices[m], (r, c) => cell(m, r, c, ink, 0.6 * shade(m, r, c)));
  const largest = most(results.S);
  each([N, N], (i, j) => {
    const kind = kinds[i * N + j];
    if (kind) {
      const isScore = kind === "scores",
        share = isScore ? Math.abs(results.S[i * N + j]) / largest : view.weightOf(i, j),
        at = scoreAt(matrices.S, view.isTurned, view.base, i, j);
      cell("S", i, j, isScore ? ink : red, shade("S", ...at) * (0.2 + 0.8 * Math.sqrt(share)));
    } else if (j <= i && i - j <= left) cell("S", i, j, rule, 0.35);
  });
  pen.globalAlpha = 1;
  pen.lineWidth = Math.max(1.5 / size, 1 / 3);
  for (const [m, { r, c, w }] of Object.entries(view.boxes)) {
    pen.strokeStyle = w ? red : blue;
    pen.strokeRect(...area(m, r, c));
  }
  pen.fillStyle = soft;
  pen.scale(1 / size, 1 / size); // the spaces of small letters are whole numbers of its unit
  pen.font = `italic ${Math.max(11, size * 2.2)}px ${getComputedStyle(document.body).fontFamily}`;
  const label = (text, align, x, y) => {
    pen.textAlign = align;
    pen.fillText(text, x * size, y * size);
  };
  for (const [name, at] of [["Q", EDGE], ["O", end]]) label(name, "center", at + d / 2, start - 1);
  for (const [name, at] of [["Kᵀ", EDGE], ["Vᵀ", end]]) label(name, "right", start - 1, at + d / 2);
  label("S", "right", start - 0.6, start - 0.8);
  for (const m of scratch) label(Object.hasOwn(TITLES, m) ? TITLES[m] : m, "left", places[m].x, places[m].y - 0.8);
}

// A row's running m (line) and l (bars) after each tile; `now` is the last tile that is done.
/** @param {string} id @param {{ m: number, l: number }[]} history @param {number} now */
export function drawRow(id, history, now) {
  const ms = history.map(({ m }) => m),
    low = Math.min(...ms.filter(Number.isFinite)),
    range = Math.max(...ms) - low || 1,
    tall = Math.max(...history.map(({ l }) => l)),
    plot = new Plot(id, ML_EDGES, [-0.5, history.length - 0.5], [0, 1]),
    points = ms.slice(0, now + 1).map((m, j) => [j, 0.15 + (0.8 * (m - low)) / range]).filter(([, y]) => Number.isFinite(y)),
    width = Math.min(24, plot.wide / 2);
  history.forEach(({ l }, j) => {
    const height = (plot.tall * l) / tall;
    plot.add("rect", { class: j <= now ? "l now" : "l", x: plot.x(j) - width / 2, y: ML_EDGES.bottom - height, width, height });
  });
  plot.line("m", points);
  for (const [j, y] of points) plot.add("circle", { class: "m", cx: plot.x(j), cy: plot.y(y), r: 3 });
}
