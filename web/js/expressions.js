// @ts-check
// Reads values of names, numbers, + - * / and functions, as a loop nest (nest_reader.js) and lab/traffic.json have them.
// What it reads becomes functions of a `run`, which has get(name), number(value) and divide(x, y).

const MOST_DEPTH = 30; // parentheses
const TOKEN = /[A-Za-z]\w*|\d+|\+=|\S/g;

/** @type {(call: (x: number, y: number, run: any) => number) => (run: any, x: any, y: any) => number} */
const ofNumbers = (call) => (run, x, y) => call(run.number(x), run.number(y), run);

/** @type {Record<string, (run: any, ...values: any) => any>} */
export const FUNCTIONS = {
  min: ofNumbers((x, y) => Math.min(x, y)),
  max: ofNumbers((x, y) => Math.max(x, y)),
};
/** @type {Record<string, (run: any, x: any, y: any) => any>[]} those that bind least first */
export const OPERATORS = [
  { "+": ofNumbers((x, y) => x + y), "-": ofNumbers((x, y) => x - y) },
  { "*": ofNumbers((x, y) => x * y), "/": ofNumbers((x, y, run) => run.divide(x, y)) },
];

export class Expression {
  functions = FUNCTIONS;
  operators = OPERATORS;
  /** @type {string[]} that are no names */ words = [];
  next = 0; // of the tokens
  depth = 0; // of parentheses

  constructor(code) { this.tokens = code.match(TOKEN) ?? []; }

  get token() { return this.tokens[this.next] ?? ""; }

  expected(what) { throw new Error(`${what} was expected`); }

  takes(token) {
    const isHere = this.token === token;
    if (isHere) this.next++;
    return isHere;
  }

  must(token) { if (!this.takes(token)) this.expected(`“${token}”`); }

  name(what) {
    const { token } = this;
    if (!/^[A-Za-z]/.test(token) || this.words.includes(token)) this.expected(what);
    this.next++;
    return token;
  }

  // A value whose operators bind at least as tightly as the level's.
  value(level = 0) {
    if (level === this.operators.length) return this.atom();
    let left = this.value(level + 1);
    while (Object.hasOwn(this.operators[level], this.token)) {
      const call = this.operators[level][this.tokens[this.next++]],
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
    if (Object.hasOwn(this.functions, token)) {
      const call = this.functions[token];
      this.next++;
      const given = this.values(call.length - 1);
      return (run) => call(run, ...given.map((x) => x(run)));
    }
    const name = this.name("a number or a name");
    return (run) => run.get(name);
  }
}
