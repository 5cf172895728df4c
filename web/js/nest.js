// @ts-check
// A loop nest as a script (docs/use/page.md): it walks over one head's Q, K and V (N, d), causal, scaled.
// A script may come from a link: it calls only what this file defines, and its steps are limited.
// A frame: {name, title: with the loops' queries and keys, text, anchors: pieces of C++ lines, lines: numbers
// in the script, queries: of the loops, area: its scores, [i0, i1, j0, j1], makes: what they become, "scores"
// or "weights", base: S's first query and key, frees: whether it drops all earlier scores, touched: the accesses in the loops' order}.
// An access {m, i, c0, c1, w} is the columns [c0, c1) of row i of matrix m; w: written.

const MOST = { steps: 1_000_000, frames: 5000, floats: 1 << 14 };
const MOST_SCRATCH = 4; // matrices beside S, a corner of the board each
const MOST_DEPTH = 30; // parentheses

const TOKEN = /[A-Za-z]\w*|\d+|\+=|\S/g;

// A sentence for the reader.
export class ScriptError extends Error {}

function fail(at, text) { throw new ScriptError(`Line ${at}: ${text}.`); }

// The numbers [a, b). kind: "query" or "key" if they count such; base: which of them 0 is.
const span = (a, b, kind = null, base = 0) => ({ a, b, kind, base });
const size = ({ a, b }) => b - a;
// What a matrix's rows are; a Map, since a script's matrix may have any name.
const ROWS = new Map(Object.entries({ Q: "query", O: "query", K: "key", V: "key" }));

const FUNCTIONS = {
  first: (run, x) => run.span(x).a,
  end: (run, x) => run.span(x).b,
  size: (run, x) => size(run.span(x)),
  seen(run, i) {
    const { a, b } = run.counted(i, "query");
    return span(Math.max(0, a - run.left), b, "key");
  },
  seeing(run, j) {
    const { a, b } = run.counted(j, "key");
    return span(a, Math.min(run.N, b + run.left), "query");
  },
  min: (run, x, y) => Math.min(run.number(x), run.number(y)),
  max: (run, x, y) => Math.max(run.number(x), run.number(y)),
};
const OPERATORS = {
  "+": (run, x, y) => run.number(x) + run.number(y),
  "-": (run, x, y) => run.number(x) - run.number(y),
  "*": (run, x, y) => run.number(x) * run.number(y),
  "/": (run, x, y) => Math.floor(run.number(x) / (run.number(y) || fail(run.at, "a divisor that is not 0 was expected"))),
  "&": (run, x, y) => run.both(run.span(x), run.span(y)),
  in: (run, x, y) => run.within(run.span(x), run.span(y)),
};
const LEVELS = [["in", "&"], ["+", "-"], ["*", "/"]]; // of operators, those that bind least first
const WORDS = ["for", "of", "in", "if", "frame", "read", "write", "multiply", "tiles", "matrix", ...Object.keys(FUNCTIONS)];

// A line of the script; what it reads becomes functions of a Nest.
class Line {
  at = 0; // its number
  code = "";
  comment = "";
  indent = 0;

  constructor(text, at) {
    const [code, ...comment] = text.split("#");
    Object.assign(this, { at, code: code.trim(), comment: comment.join("#").trim(), indent: code.search(/\S/) });
    this.tokens = code.match(TOKEN) ?? [];
    this.next = this.depth = 0;
  }

  get token() { return this.tokens[this.next] ?? ""; }

  expected(what) {
    fail(this.at, `${what} was expected, not ${this.token ? `“${this.token}”` : "the end of the line"}`);
  }

  takes(token) {
    const isHere = this.token === token;
    if (isHere) this.next++;
    return isHere;
  }

  must(token) { if (!this.takes(token)) this.expected(`“${token}”`); }

  name(what) {
    const { token } = this;
    if (!/^[A-Za-z]/.test(token) || WORDS.includes(token)) this.expected(what);
    this.next++;
    return token;
  }

  // A value whose operators bind at least as tightly as the level's.
  value(level = 0) {
    if (level === LEVELS.length) return this.atom();
    let left = this.value(level + 1);
    while (LEVELS[level].includes(this.token)) {
      const call = OPERATORS[this.tokens[this.next++]],
        [x, y] = [left, this.value(level + 1)];
      left = (run) => call(run, x(run), y(run));
    }
    return left;
  }

  // (value) or (value, value), of so many values
  values(count) {
    this.must("(");
    if (this.depth++ === MOST_DEPTH) this.expected(`a value in at most ${MOST_DEPTH} parentheses`);
    const values = Array.from({ length: count }, (_, n) => {
      if (n) this.must(",");
      return this.value();
    });
    this.must(")");
    this.depth--;
    return values;
  }

  atom() {
    const { token } = this;
    if (token === "(") return this.values(1)[0];
    if (/^\d/.test(token)) {
      this.next++;
      return () => Number(token);
    }
    if (Object.hasOwn(FUNCTIONS, token)) {
      const call = FUNCTIONS[token];
      this.next++;
      const given = this.values(call.length - 1);
      return (run) => call(run, ...given.map((x) => x(run)));
    }
    const name = this.name("a number or a name");
    return (run) => run.get(name);
  }

  // M, M[rows] or M[rows, columns]
  place() {
    const name = this.name("a matrix");
    let rows = (run, most) => span(0, most),
      columns = rows;
    if (this.takes("[")) {
      rows = this.index();
      if (this.takes(",")) columns = this.index();
      this.must("]");
    }
    return (run) => run.place(name, rows, columns);
  }

  // A value, a:b, a:, :b or :
  index() {
    const part = (open) => (["", ":", ",", "]"].includes(this.token) ? open : this.value());
    const from = part(null);
    if (this.takes(":")) {
      const to = part((run, most) => most);
      return (run, most) => span(from ? run.number(from(run)) : 0, run.number(to(run, most)));
    }
    if (!from) this.expected("a row, a column or “:”");
    return (run) => run.span(from(run));
  }

  /** @returns {[any, boolean]} the place, and whether it is transposed */
  factor() { return [this.place(), this.takes("'")]; }

  // {run(run, body): what the line does, an iterable of the frames that end; isLoop: whether lines belong to it}
  statement() {
    if (this.takes("for")) {
      const name = this.name("a name");
      this.must("of");
      const [of, by] = this.takes("tiles") ? this.values(2) : [this.value(), () => 1];
      return { isLoop: true, run: (run, body) => run.loop(name, of(run), run.number(by(run)), body) };
    }
    if (this.takes("if")) {
      const value = this.value();
      return { isLoop: true, run: (run, body) => (run.number(value(run)) > 0 ? run.all(body) : []) };
    }
    if (this.takes("frame")) {
      this.next = this.tokens.length;
      const title = this.code.slice("frame".length).trim();
      return { run: (run) => run.begin(title, this) };
    }
    const isWrite = this.token === "write";
    if (this.takes("read") || this.takes("write")) {
      const place = this.place();
      return { run: (run) => run.work(this, () => run.move(place(run), isWrite)) };
    }
    if (this.takes("multiply")) {
      const C = this.place();
      if (!this.takes("+=")) this.must("=");
      const [A, isTurnedA] = this.factor();
      this.must("*");
      const [B, isTurnedB] = this.factor();
      if (isTurnedA && isTurnedB) fail(this.at, "at most one “'” was expected");
      return { run: (run) => run.work(this, () => run.multiply(C(run), A(run), B(run), isTurnedA, isTurnedB)) };
    }
    const name = this.name("for, if, frame, read, write, multiply or a name");
    this.must("=");
    if (this.takes("matrix")) {
      const sizes = this.values(2);
      return { isNaming: true, run: (run) => run.scratch(name, ...sizes.map((x) => run.number(x(run)))) };
    }
    const value = this.value();
    return { isNaming: true, run: (run) => run.name(name, value(run)) };
  }
}

// The statements of the lines at an indentation.
function parsed(lines, indent) {
  const made = [];
  while (lines.length && lines[0].indent >= indent) {
    const line = lines.shift();
    if (line.indent > indent) fail(line.at, `${indent} spaces before it were expected, not ${line.indent}`);
    const statement = line.statement();
    if (line.token) line.expected("the end of the line");
    if (statement.isLoop) {
      if (!lines.length || lines[0].indent <= indent)
        fail(lines[0]?.at ?? line.at, `after “${line.code}” a line was expected with more spaces before it`);
      statement.body = parsed(lines, lines[0].indent);
    }
    made.push({ line, ...statement });
  }
  return made;
}

const range = ({ a, b }) => `${a}:${b}`;
const named = (one, several, { a, b }) => (b - a === 1 ? `${one} ${b}` : `${several} ${a + 1} to ${b}`);

// The walk of a script. left: keys before its own that a query sees. Raises ScriptError. `matrices` is known from the start; computed() and `isTurned`,
// whether S has keys as rows, after the last frame. rows: those of a product of the kernels at a time.
export class Nest {
  N = 0;
  left = 0; // keys before its own that a query sees
  steps = 0;
  count = 0; // of frames
  /** @type {typeof MOST} */ most;

  constructor(script, { N, d, Br, Bc, rows: R, left = N }, most = MOST) {
    Object.assign(this, { N, d, left, most, steps: 0, count: 0, scope: {}, isTurned: false });
    this.matrices = Object.fromEntries(["Q", "K", "V", "O"].map((name) => [name, [N, d]]));
    this.names = new Map(Object.entries({ N, d, Br, Bc, R, Q: "Q", K: "K", V: "V", O: "O" })); // a text: a matrix
    this.given = new Set(this.names.keys());
    this.scores = new Uint8Array(N * N);
    this.outputs = new Uint8Array(N);
    const lines = script.split("\n").map((text, n) => new Line(text, n + 1)).filter(({ code }) => code);
    this.program = parsed(lines, lines[0]?.indent);
    if (lines.length) fail(lines[0].at, "the spaces of the first line were expected before it");
    this.isFramed = /^\s*frame\b/m.test(script);
    const first = this.program.findIndex(({ isNaming }) => !isNaming);
    Array.from(this.all(this.program.splice(0, first < 0 ? Infinity : first)));
    this.hasBegun = true;
  }

  *frames() {
    yield* this.all(this.program);
    if (!this.frame) throw new ScriptError("A line that reads, writes or multiplies was expected.");
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
    if ((this.steps += steps) > this.most.steps)
      fail(this.at, `a nest of at most ${this.most.steps.toLocaleString("en")} steps was expected, and this one goes on`);
  }

  get(name) { return this.names.get(name) ?? fail(this.at, `a known name was expected, not “${name}”`); }

  name(name, value) {
    if (this.given.has(name)) fail(this.at, `a new name was expected, not “${name}”`);
    this.names.set(name, value);
  }

  scratch(name, rows, columns) {
    if (this.hasBegun) fail(this.at, "matrix() was expected above all loops and frames");
    const isFine = rows > 0 && columns > 0 && rows * columns <= this.most.floats;
    if (!isFine) fail(this.at, `at most ${this.most.floats} numbers were expected in a matrix, not ${rows} × ${columns}`);
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
    if (++this.count > this.most.frames)
      fail(at, `at most ${this.most.frames.toLocaleString("en")} frames were expected; a line “frame NAME” makes one of all that follows it`);
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
