// @ts-check
// Two set-associative caches with LRU replacement.
import { CACHE_WAYS, FLOAT_BYTES, LINE } from "./traffic.js";

const LINE_BYTES = LINE * FLOAT_BYTES;

class Cache {
  constructor(bytes) {
    const lines = Math.max(1, Math.floor(bytes / LINE_BYTES));
    this.ways = Math.min(CACHE_WAYS, lines);
    // Each set holds its lines from the oldest to the latest.
    this.sets = Array.from({ length: Math.max(1, Math.floor(lines / CACHE_WAYS)) }, () => new Set());
    this.bytes = 0; // that came in
  }

  use(line) {
    const set = this.sets[line % this.sets.length],
      wasThere = set.delete(line);
    set.add(line);
    if (set.size > this.ways) set.delete(set.values().next().value);
    if (!wasThere) this.bytes += LINE_BYTES;
    return wasThere;
  }

  lines() { return this.sets.flatMap((set) => [...set]); }
}

// Runs frames over matrices {name: [rows, columns]} behind caches of l1 and l2 bytes. Returns {first: each
// matrix's place in floats, frames: {places: each line's, 2 in L1, 1 in L2 only, 0 in memory, bytes: into
// [L1, L2] so far, boxes: what was touched, {name: {r, c, w}}, rows and columns [from, to)}, less `touched`}.
/** @param {Iterable<any>} frames @param {Record<string, number[]>} matrices @param {number} l1 @param {number} l2 */
export function simulate(frames, matrices, l1, l2) {
  const first = {};
  let lines = 0;
  for (const [name, [rows, columns]] of Object.entries(matrices)) {
    first[name] = lines * LINE;
    lines += Math.ceil((rows * columns) / LINE);
  }
  const line = (m, i, c) => Math.floor((first[m] + i * matrices[m][1] + c) / LINE);
  const inner = new Cache(l1),
    outer = new Cache(l2);
  const shown = [];
  for (const { touched, ...frame } of frames) {
    const boxes = Object.create(null); // a script's matrix may have any name
    for (const { m, i, c0, c1, w } of touched) {
      const box = (boxes[m] ??= { r: [i, i + 1], c: [c0, c1], w });
      box.r = [Math.min(box.r[0], i), Math.max(box.r[1], i + 1)];
      box.c = [Math.min(box.c[0], c0), Math.max(box.c[1], c1)];
      box.w ||= w;
      const last = line(m, i, c1 - 1);
      for (let at = line(m, i, c0); at <= last; at++) if (!inner.use(at)) outer.use(at);
    }
    const { area } = frame;
    if (area) boxes.S = { ...boxes.S, r: area.slice(0, 2), c: area.slice(2) };
    else delete boxes.S; // nobody knows which scores these are
    const places = new Uint8Array(lines);
    for (const at of outer.lines()) places[at] = 1;
    for (const at of inner.lines()) places[at] = 2;
    shown.push({ ...frame, places, bytes: [inner.bytes, outer.bytes], boxes });
  }
  return { frames: shown, first };
}
