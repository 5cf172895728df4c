// @ts-check
// The formulas of attention for one head, with a causal mask, a window and scaled scores.

/** @param {ArrayLike<number> & Iterable<number>} logits @returns {Float64Array} */
export function softmax(logits) {
  const m = Math.max(...logits),
    weights = Float64Array.from(logits, (x) => Math.exp(x - m)),
    l = weights.reduce((sum, w) => sum + w, 0);
  return weights.map((w) => w / l);
}

// S (N, N) scaled scores, P (N, N) weights, O (N, d).
/** @param {any} heads @param {number} N @param {number} d @param {number} left keys before its own that a query sees */
export function results({ q, k, v, slope }, N, d, left = N) {
  const S = new Float64Array(N * N),
    P = new Float64Array(N * N),
    O = new Float64Array(N * d),
    scale = 1 / Math.sqrt(d);
  for (let i = 0; i < N; i++) {
    const from = Math.max(0, i - left);
    for (let j = from; j <= i; j++) {
      S[i * N + j] = slope * (j - i);
      for (let c = 0; c < d; c++) S[i * N + j] += scale * q[i * d + c] * k[j * d + c];
    }
    P.set(softmax(S.subarray(i * N + from, i * N + i + 1)), i * N + from);
    for (let j = from; j <= i; j++) {
      for (let c = 0; c < d; c++) O[i * d + c] += P[i * N + j] * v[j * d + c];
    }
  }
  return { S, P, O };
}

// A row's running m and l after each of its tiles of Bc keys: [{m, l, correction}].
/** @param {Float64Array} S @param {number} i @param {{ N: number, Br: number, Bc: number, left?: number }} sizes */
export function online(S, i, { N, Br, Bc, left = N }) {
  const made = [];
  let m = -Infinity,
    l = 0;
  for (let j0 = Math.max(0, i - (i % Br) - left); j0 <= i; j0 += Bc) {
    const tile = S.subarray(i * N + Math.max(j0, i - left), i * N + Math.min(j0 + Bc, i + 1)),
      now = Math.max(m, ...tile);
    const correction = m === now ? 1 : Math.exp(m - now); // both are -Infinity before the row's window
    l = tile.reduce((sum, s) => sum + Math.exp(s - now), l * correction);
    m = now;
    made.push({ m, l, correction });
  }
  return made;
}
