// The formulas of attention for one head, with a causal mask and scaled scores.

export function softmax(logits) {
  const m = Math.max(...logits),
    weights = Float64Array.from(logits, (x) => Math.exp(x - m)),
    l = weights.reduce((sum, w) => sum + w, 0);
  return weights.map((w) => w / l);
}

// S (N, N) scaled scores, P (N, N) weights, O (N, d).
export function results({ q, k, v }, N, d) {
  const S = new Float64Array(N * N),
    P = new Float64Array(N * N),
    O = new Float64Array(N * d),
    scale = 1 / Math.sqrt(d);
  for (let i = 0; i < N; i++) {
    for (let j = 0; j <= i; j++) {
      for (let c = 0; c < d; c++) S[i * N + j] += scale * q[i * d + c] * k[j * d + c];
    }
    P.set(softmax(S.subarray(i * N, i * N + i + 1)), i * N);
    for (let j = 0; j <= i; j++) {
      for (let c = 0; c < d; c++) O[i * d + c] += P[i * N + j] * v[j * d + c];
    }
  }
  return { S, P, O };
}

// A row's running m and l after each visible tile of Bc keys: [{m, l, correction}].
export function online(S, N, i, Bc) {
  const made = [];
  let m = -Infinity,
    l = 0;
  for (let j0 = 0; j0 <= i; j0 += Bc) {
    const tile = S.subarray(i * N + j0, i * N + Math.min(j0 + Bc, i + 1)),
      now = Math.max(m, ...tile);
    const correction = Math.exp(m - now);
    l = tile.reduce((sum, s) => sum + Math.exp(s - now), l * correction);
    m = now;
    made.push({ m, l, correction });
  }
  return made;
}
