// @ts-check
// The walk of a loop nest over one head's Q, K and V (N, d), causal and scaled: what it reads and writes, in frames.
//
// A nest is a script of lines, one statement each; deeper lines belong to the loop or the `if` above them:
//   S = matrix(N, N)               scratch, above all loops; S holds the scores
//   n = value                      a name
//   for i of tiles(Q, Br)          rows of a matrix or of another range, in tiles; `for i of Q` one by one
//   if value                       the lines below, where it is above 0
//   frame Title # text             begins a frame; without any each line that moves numbers is one
//   read Q[i]    write S[i, j]     rows and columns of a matrix
//   multiply C = A * B'            a product's reads and writes
// A value is a number or a range: N, d, Br, Bc, R, + - * /, min, max, first, end, size, seen(i), seeing(j), `k in j`,
// `i & j`. docs/use/page.md has all of it. nest_reader.js reads the lines, nest_values.js has ranges and the error,
// part_nests.js the nests of the parts, caches.js counts bytes, draw_tiles.js draws.
//
// It is a language of its own and no JavaScript, because a script may come from a link: it calls only what these files
// define, and its steps, frames and memory are bounded.
//
// A frame: {name, title: with the loops' queries and keys, text, anchors: pieces of C++ lines, lines: numbers
// in the script, queries: of the loops, area: its scores, [i0, i1, j0, j1], makes: what they become, "scores"
// or "weights", base: S's first query and key, frees: whether it drops all earlier scores, touched: the accesses in the loops' order}.
// An access {m, i, c0, c1, w} is the columns [c0, c1) of row i of matrix m; w: written.
import { read } from "./nest_reader.js";
import { fail, size, span } from "./nest_values.js";
import { check } from "./problem.js";

const MOST = { steps: 1_000_000, frames: 5000, floats: 1 << 14 };
const MOST_SCRATCH = 4; // matrices beside S, a corner of the board each

// What a matrix's rows are; a Map, since a script's matrix may have any name.
const ROWS = new Map(Object.entries({ Q: "query", O: "query", K: "key", V: "key" }));
const range = ({ a, b }) => `${a}:${b}`;
const named = (one, several, { a, b }) => (b - a === 1 ? `${one} ${b}` : `${several} ${a + 1} to ${b}`);

// The walk of a script. left: keys before its own that a query sees. Raises Problem. `matrices` is known from the start; computed() and `isTurned`,
// whether S has keys as rows, after the last frame. rows: those of a product of the kernels at a time.
export class Nest {
  N = 0;
  left = 0; // keys before its own that a query sees
  steps = 0;
  count = 0; // of frames

  constructor(script, { N, d, Br, Bc, rows: R, left = N }) {
    Object.assign(this, { N, d, left, scope: {}, isTurned: false });
    this.matrices = Object.fromEntries(["Q", "K", "V", "O"].map((name) => [name, [N, d]]));
    this.names = new Map(Object.entries({ N, d, Br, Bc, R, Q: "Q", K: "K", V: "V", O: "O" })); // a text: a matrix
    this.given = new Set(this.names.keys());
    this.scores = new Uint8Array(N * N);
    this.outputs = new Uint8Array(N);
    this.program = read(script);
    this.isFramed = /^\s*frame\b/m.test(script);
    const first = this.program.findIndex(({ isNaming }) => !isNaming);
    Array.from(this.all(this.program.splice(0, first < 0 ? Infinity : first)));
    this.hasBegun = true;
  }

  *frames() {
    yield* this.all(this.program);
    check(this.frame, "A line that reads, writes or multiplies was expected.");
    yield this.frame;
  }

  *all(statements) {
    for (const { line, run, body } of statements) {
      this.at = line.at;
      this.spend(line.tokens.length);
      yield* run(this, body) ?? [];
    }
  }

  spend(steps) {
    this.steps += steps;
    if (this.steps > MOST.steps) fail(this.at, "a nest of at most 1,000,000 steps was expected, and this one goes on");
  }

  get(name) { return this.names.get(name) ?? fail(this.at, `a known name was expected, not “${name}”`); }

  name(name, value) {
    if (this.given.has(name)) fail(this.at, `a new name was expected, not “${name}”`);
    this.names.set(name, value);
  }

  scratch(name, rows, columns) {
    if (this.hasBegun) fail(this.at, "matrix() was expected above all loops and frames");
    const isFine = rows > 0 && columns > 0 && rows * columns <= MOST.floats;
    if (!isFine) fail(this.at, `at most ${MOST.floats} numbers were expected in a matrix, not ${rows} × ${columns}`);
    this.name(name, name);
    this.given.add(name);
    this.matrices[name] = [rows, columns];
    if (Object.keys(this.matrices).filter((each) => each !== "S").length > 4 + MOST_SCRATCH)
      fail(this.at, `at most ${MOST_SCRATCH} matrices beside S were expected`);
  }

  number(value) {
    if (value.b - value.a === 1) return value.a;
    if (Number.isFinite(value)) return value;
    const shown = { string: `the matrix ${value}`, number: value, object: range(value) }[typeof value];
    return fail(this.at, `a number was expected, not ${shown}`);
  }

  divide(x, y) { return Math.floor(x / (y || fail(this.at, "a divisor that is not 0 was expected"))); }

  span(value) {
    if (typeof value === "number") return span(value, value + 1);
    if (typeof value !== "string") return value;
    return span(0, this.matrices[value][0], ROWS.get(value));
  }

  // A span's queries or keys.
  counted(value, kind) {
    const { a, b, base, kind: is } = this.span(value);
    if (is !== kind) fail(this.at, `${kind === "key" ? "keys, as in seeing(j)," : "queries, as in seen(i),"} were expected`);
    return span(a + base, b + base, kind);
  }

  both(x, y) {
    const a = Math.max(x.a, y.a);
    return span(a, Math.max(a, Math.min(x.b, y.b)), x.kind ?? y.kind, x.base);
  }

  within(x, y) {
    if (x.a < y.a || x.b > y.b) fail(this.at, `a part of ${range(y)} was expected before “in”, not ${range(x)}`);
    return span(x.a - y.a, x.b - y.a, x.kind, x.base + y.a);
  }

  *loop(name, of, by, body) {
    const { a, b, kind, base } = typeof of === "number" ? span(0, of) : this.span(of),
      { scope } = this;
    if (by < 1) fail(this.at, `tiles of 1 or more were expected, not of ${by}`);
    for (let at = a; at < b; at += by) {
      const now = span(at, Math.min(at + by, b), kind, base);
      this.name(name, now);
      this.scope = kind ? { ...scope, [kind]: this.counted(now, kind) } : scope;
      yield* this.all(body);
    }
    this.scope = scope;
  }

  place(name, rows, columns) {
    const m = this.get(name);
    if (typeof m !== "string") fail(this.at, `a matrix was expected, not “${name}”`);
    const most = this.matrices[m],
      made = [rows, columns].map((index, n) => index(this, most[n]));
    if (made.some(({ a, b }, n) => a < 0 || a > b || b > most[n]))
      fail(this.at, `rows and columns of ${m}, ${most.join(" × ")}, were expected, not ${made.map(range).join(", ")}`);
    return { m, r: made[0], c: made[1] };
  }

  // Ends the frame and begins another one.
  *begin(title, { at, comment: text }) {
    if (this.frame) yield this.frame;
    this.count++;
    if (this.count > MOST.frames)
      fail(at, "at most 5,000 frames were expected; a line “frame NAME” makes one of all that follows it");
    const { query, key } = this.scope,
      where = [query && named("query", "queries", query), key && named("key", "keys", key)].filter(Boolean),
      name = title || "Frame",
      shown = where.length ? `${name}: ${where.join(", ")}` : name;
    this.frame = { name, title: shown, text, anchors: [], lines: [at], queries: query, touched: [] };
  }

  *work(line, call) {
    if (!this.isFramed) yield* this.begin(line.code, line);
    else if (!this.frame) yield* this.begin("Begin", line);
    if (!this.frame.lines.includes(line.at)) this.frame.lines.push(line.at);
    call();
  }

  touch(m, i, c0, c1, w) {
    if (c0 >= c1) return;
    this.spend(1 + ((c1 - c0) >> 4));
    this.frame.touched.push({ m, i, c0, c1, w });
    if (w && m === "O") this.outputs[i] = 1;
  }

  move({ m, r, c }, w) {
    for (let i = r.a; i < r.b; i++) this.touch(m, i, c.a, c.b, w);
    if (m === "S") this.show(r, c, w && "weights");
  }

  // C = A B. A row of C is a sum of rows of B, or its numbers are dot products if B is transposed.
  multiply(C, A, B, isTurnedA, isTurnedB) {
    const [[m, k], [also, n]] = [[A, isTurnedA], [B, isTurnedB]].map(([{ r, c }, isTurned]) =>
      (isTurned ? [c, r] : [r, c]).map(size),
    );
    if (k !== also) fail(this.at, `as many columns before “*” as rows behind it were expected, not ${k} and ${also}`);
    if (size(C.r) !== m || size(C.c) !== n)
      fail(this.at, `a place of ${m} × ${n} was expected for the product, not of ${size(C.r)} × ${size(C.c)}`);
    const row = ({ m, r, c }, i) => this.touch(m, r.a + i, c.a, c.b, false);
    if (isTurnedB) {
      for (let i = 0; i < m; i++) {
        for (let j = 0; j < n; j++) {
          row(A, i);
          row(B, j);
          this.touch(C.m, C.r.a + i, C.c.a + j, C.c.a + j + 1, true);
        }
      }
    } else {
      for (let x = 0; x < k; x++) {
        if (isTurnedA) row(A, x);
        else for (let i = A.r.a; i < A.r.b; i++) this.touch(A.m, i, A.c.a + x, A.c.a + x + 1, false);
        row(B, x);
      }
      for (let i = C.r.a; i < C.r.b; i++) this.touch(C.m, i, C.c.a, C.c.b, true);
    }
    for (const { m, r, c } of [A, B]) if (m === "S") this.show(r, c);
    if (C.m === "S") this.show(C.r, C.c, "scores");
  }

  // Rows r and columns c of S become `makes`. Their kinds, else the loops, say which queries and keys.
  show(r, c, makes) {
    const { frame, N, scope } = this,
      isWhole = String(this.matrices.S) === `${N},${N}`,
      isTurned = r.kind === "key" || c.kind === "query";
    const of = (x, kind) => (x.kind ? this.counted(x, x.kind) : isWhole ? x : scope[kind]),
      [i, j] = isTurned ? [of(c, "query"), of(r, "key")] : [of(r, "query"), of(c, "key")];
    if (!i || !j) return;
    this.isTurned = isTurned;
    frame.base = isTurned ? [c.base, r.base] : [r.base, c.base];
    const [i0, i1, j0, j1] = frame.area ?? [i.a, i.b, j.a, j.b];
    frame.area = [Math.min(i0, i.a), Math.max(i1, i.b), Math.min(j0, j.a), Math.max(j1, j.b)];
    if (makes) frame.makes = makes;
    if (makes !== "scores") return;
    frame.frees = !isWhole; // the tile before is overwritten
    for (let n = i.a; n < i.b; n++) this.scores.fill(1, n * N + Math.max(j.a, n - this.left), n * N + Math.min(j.b, n + 1));
  }

  // [scores, those of the mask, rows of O that were written, all rows]
  computed() {
    const sum = (flags) => flags.reduce((all, flag) => all + flag, 0);
    const seen = Array.from(this.outputs, (_, i) => Math.min(i, this.left) + 1);
    return [sum(this.scores), sum(seen), sum(this.outputs), this.N];
  }
}
