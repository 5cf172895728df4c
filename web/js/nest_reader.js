// @ts-check
// Reads a loop nest (nest.js): what its lines say becomes functions of a walk.
import { Expression, FUNCTIONS, OPERATORS } from "./expressions.js";
import { fail, size, span } from "./nest_values.js";

const VALUES = {
  ...FUNCTIONS,
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
};
const RANGES = {
  "&": (run, x, y) => run.both(run.span(x), run.span(y)),
  in: (run, x, y) => run.within(run.span(x), run.span(y)),
};
const WORDS = ["for", "of", "in", "if", "frame", "read", "write", "multiply", "tiles", "matrix", ...Object.keys(VALUES)];

// A line of the script; what it reads becomes functions of a Nest.
class Line extends Expression {
  at = 0; // its number
  code = "";
  comment = "";
  indent = 0;
  functions = VALUES;
  operators = [RANGES, ...OPERATORS];
  words = WORDS;

  constructor(text, at) {
    const [code, ...comment] = text.split("#");
    super(code);
    Object.assign(this, { at, code: code.trim(), comment: comment.join("#").trim(), indent: code.search(/\S/) });
  }

  expected(what) {
    fail(this.at, `${what} was expected, not ${this.token ? `“${this.token}”` : "the end of the line"}`);
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

// The statements of a script: {line, run, isLoop, isNaming, body: statements}. Raises Problem.
/** @param {string} script @returns {any[]} */
export function read(script) {
  const lines = script.split("\n").map((text, n) => new Line(text, n + 1)).filter(({ code }) => code),
    program = parsed(lines, lines[0]?.indent);
  if (lines.length) fail(lines[0].at, "the spaces of the first line were expected before it");
  return program;
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
