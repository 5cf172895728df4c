// The distribution from which a character is drawn. generation/csrc/sampling.cpp computes the same one and draws.

// weights (V) -> probabilities (V)
function normalised(weights) {
  const total = weights.reduce((sum, w) => sum + w, 0);
  return weights.map((w) => w / total);
}

// The model's own probabilities.
export function before(logits) {
  const highest = Math.max(...logits);
  return normalised(Array.from(logits, (x) => Math.exp(x - highest)));
}

// The probabilities after temperature, top-k and top-p.
export function after(logits, { temperature, topK, topP }) {
  const highest = Math.max(...logits);
  if (temperature === 0) {
    const best = logits.indexOf(highest);
    return Array.from(logits, (_, i) => (i === best ? 1 : 0));
  }
  const weights = Array.from(logits, (x) => Math.exp((x - highest) / temperature));
  const sorted = [...weights].sort((a, b) => b - a);
  let least = topK && topK < sorted.length ? sorted[topK - 1] : 0;
  if (topP < 1) {
    const kept = sorted.filter((w) => w >= least);
    let rest = topP * kept.reduce((sum, w) => sum + w, 0),
      i = 0;
    while (i + 1 < kept.length && (rest -= kept[i]) > 0) i++;
    least = kept[i];
  }
  return normalised(weights.map((w) => (w >= least ? w : 0)));
}
