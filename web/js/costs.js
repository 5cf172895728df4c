// The traffic of each part's loop nest with one thread. lab/costs.py is the same and derives the numbers.

const FLOAT = 4,
  LINE = 64,
  WAYS = 8;

// The traffic of one matrix: at least `least` bytes. again: for each loop around it [working set, bytes that come in
// if the working set does not fit].
const stream = (name, least, again = [], scratch = false) => ({ name, least, again, scratch });

// of: {Nq, Nk, d, heads, causal, br, bc}
function sizes({ N, d, heads, causal, br, bc }) {
  const visible = causal ? (N + 1) / 2 : N;
  return { Nq: N, Nk: N, d, heads, n: visible, Br: Math.min(br, N), Bc: Math.min(bc, N) };
}

// The bytes of cache that a walk down `columns` columns of (rows, d) needs.
function walk(rows, d, columns = 1) {
  const width = FLOAT * d,
    stride = width % LINE === 0 ? width / LINE : 1;
  return LINE * rows * Math.max(Math.ceil((FLOAT * Math.min(columns, d)) / LINE), stride & -stride);
}

function part1({ Nq, Nk, d, n }) {
  const K = FLOAT * Nk * d,
    V = K,
    S = FLOAT * Nq * n,
    row = FLOAT * Nk,
    column = walk(Nk, d),
    moved = Nq * FLOAT * n * d;
  return [
    stream("Q", FLOAT * Nq * d),
    stream("K", K, [[K, moved]]),
    stream(
      "S",
      S,
      [
        [S + K, 3 * S],
        [row + column, (2 + d) * S],
        [row, (4 + d) * S],
      ],
      true,
    ),
    stream("V", V, [
      [V + row, moved],
      [row + column, Nq * n * d * Math.min(LINE, FLOAT * d)],
    ]),
    stream("O", FLOAT * Nq * d),
  ];
}

function part2({ Nq, Nk, d, n }, block) {
  const T = block.part2Tile,
    depth = Math.min(d, block.part2Depth),
    { panel } = block;
  const Q = FLOAT * Nq * d,
    O = Q,
    V = FLOAT * n * d,
    S = FLOAT * Nq * n,
    chunks = Math.ceil(d / block.part2Depth);
  const tile = FLOAT * T * T,
    thin = FLOAT * T * depth,
    strip = FLOAT * panel * (depth + T);
  const passes = 1 + chunks,
    panels = Math.ceil(d / panel),
    chunk = FLOAT * Nq * (T + depth);
  const columns = walk(T, d, panel) + FLOAT * block.rows * T;
  return [
    stream("Q", Q, [
      [Q + FLOAT * Nq * T, (n / T) * Q],
      [thin + strip, (n / panel) * Q],
    ]),
    stream("K", FLOAT * Nk * d),
    stream("Kt", thin, [[2 * thin + tile, (Nq / T) * V]], true),
    stream(
      "S",
      S,
      [
        [chunk, chunks * S],
        [S + V, (passes + 1) * S],
        [tile + thin, (passes + panels) * S],
      ],
      true,
    ),
    stream("V", FLOAT * Nk * d, [
      [V + FLOAT * T * n, Math.max(1, Nq / T) * V],
      [columns, (Nq / block.rows) * V],
    ]),
    stream("O", O, [[2 * FLOAT * T * d + tile, Math.max(1, n / T) * O]]),
  ];
}

function part3({ Nq, Nk, d, n }) {
  const K = FLOAT * Nk * d,
    row = FLOAT * Nk,
    again = [[2 * K + row, Nq * FLOAT * n * d]];
  return [
    stream("Q", FLOAT * Nq * d),
    stream("K", K, again),
    stream("S", row, [[K + row, 3 * FLOAT * Nq * n]], true),
    stream("V", K, again),
    stream("O", FLOAT * Nq * d),
  ];
}

function part4({ Nq, Nk, d, n, Br, Bc }, { panel, rows, part4Step: step }) {
  const K = FLOAT * n * d,
    Q = FLOAT * Nq * d,
    S = FLOAT * Nq * n;
  const Tr = Math.ceil(Nq / Br),
    strips = Math.ceil(Br / panel),
    state = FLOAT * 2 * Br * d;
  const St = FLOAT * step * panel,
    thin = FLOAT * Math.min(step, Bc) * d;
  const strip = FLOAT * 2 * Math.min(Br, panel) * d + St,
    columns = St + walk(Math.min(step, Bc), d);
  const tile = [2 * K + state, Tr * K],
    each = [2 * FLOAT * Bc * d + strip, Tr * strips * K];
  const least = FLOAT * Nk * d,
    part = [columns, (Tr * strips * K * LINE) / (FLOAT * rows)];
  return [
    stream("Q", Q),
    stream("K", least, [tile, each]),
    stream("V", least, [tile, each, part]),
    stream(
      "Qt, Ot",
      state,
      [
        [state + 2 * FLOAT * Bc * d, 2 * Q * Math.max(1, n / Bc)],
        [strip + 2 * thin, 2 * Q * Math.max(1, n / step)],
      ],
      true,
    ),
    stream(
      "S",
      St,
      [
        [strip + thin, 2 * S],
        [columns, (2 + d / rows) * S],
      ],
      true,
    ),
    stream("O", Q),
  ];
}

const COUNTS = { part1, part2, part3, part4 };

// Bytes that come into a cache of `cache` bytes in one call of a part, by matrix: [{name, bytes}]; undefined for a
// part that is not counted.
export function traffic(part, problem, block, cache) {
  const { heads } = problem;
  return COUNTS[part]?.(sizes(problem), block).map(({ name, least, again, scratch }) => {
    const one = scratch ? least : heads * least;
    const comes = again.map(([set, moved]) => {
      const overfull = Math.min(1, Math.max(0, set - cache) / (cache / WAYS));
      return one + overfull * (heads * moved - one);
    });
    return { name, bytes: Math.max(one, ...comes) };
  });
}

// Useful floating-point operations of a call.
export function flops({ N, d, heads, causal }) {
  return 4 * heads * N * (causal ? (N + 1) / 2 : N) * d;
}
