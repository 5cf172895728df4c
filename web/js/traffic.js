// @ts-check
// Bytes that a call of a part brings into a cache: the formulas of lab/traffic.json, counted as lab/traffic.py does.
import { Expression, FUNCTIONS } from "./expressions.js";
import { TRAFFIC } from "./facts.js";

export const { LINE, FLOAT_BYTES, CACHE_WAYS } = TRAFFIC.constants;

class Formula extends Expression {
  functions = { ...FUNCTIONS, ceil: (run, x) => Math.ceil(x) };
}

const value = (formula, names) =>
  new Formula(formula).value()({ get: (name) => names[name], number: (x) => x, divide: (x, y) => x / y });

// Lines of cache that a row of d floats needs in a walk down a column.
function crowd(d) {
  const stride = d % LINE ? 1 : d / LINE;
  return stride & -stride;
}

// The streams of a call, of all heads in bytes; null for a part without formulas. call: {Nq, Nk, d, heads, br, bc, threads,
// seen, ruled} and the kernels' sizes, see Session.block().
/** @param {string} part @param {Record<string, number>} call @returns {{ minimum: number, again: number[][] }[] | null} */
export function streams(part, call) {
  const counted = TRAFFIC.parts[part];
  if (!counted) return null;
  const names = { ...TRAFFIC.constants, ...call, crowd: crowd(call.d) };
  for (const [name, formula] of [TRAFFIC.sizes, counted.sizes].flatMap(Object.entries)) names[name] = value(formula, names);
  return counted.streams.map(({ least, again = [], scratch }) => {
    const bytes = (formula, heads) => FLOAT_BYTES * heads * value(formula, names);
    return {
      minimum: bytes(least, scratch ? 1 : call.heads),
      again: again.map(([workingSet, moved]) => [bytes(workingSet, 1), bytes(moved, call.heads)]),
    };
  });
}

// The share of a cache's sets that a working set overfills.
const overfull = (workingSet, cache) => Math.min(1, Math.max(0, workingSet - cache) / (cache / CACHE_WAYS));

// Bytes of these streams that come into a cache of `cache` bytes.
/** @param {{ minimum: number, again: number[][] }[]} counted @param {number} cache @returns {number} */
export function traffic(counted, cache) {
  const came = ({ minimum, again }) =>
    Math.max(minimum, ...again.map(([workingSet, moved]) => minimum + overfull(workingSet, cache) * (moved - minimum)));
  return counted.reduce((sum, stream) => sum + came(stream), 0);
}
