// The frames in which Tiles shows a part: its walk over one head's Q, K and V (N, d), causal, with scaled scores.
//
// A frame is {title, text, anchor: a piece of the part's C++ line or null, paper: numbers of lines, area: the scores that
// it works on, [i0, i1, j0, j1], makes: what they become, "scores" or "weights", frees: whether all scores before it are
// dropped, tile: part 4's [i0, i1, j], touch: the memory in the order of the loops}.
// An access {m, i, c0, c1, w} is the columns [c0, c1) of row i of a matrix; w: written.
// rows: the rows that a product takes at a time. A part without frames here gets those of the formula.

const SCRATCH = {
  part2: ({ N, d, Br }) => ({ S: [N, N], Kt: [d, Br] }),
  part3: ({ N }) => ({ S: [1, N] }),
  part4: ({ d, Br, Bc }) => ({ Qt: [d, Br], Ot: [d, Br], S: [Bc, Br], ml: [2, Br] }),
};
const textbook = ({ N }) => ({ S: [N, N] });

// The matrices that a part has in memory, with their rows and columns.
export function matrices(part, sizes) {
  const io = [sizes.N, sizes.d];
  return { Q: io, K: io, V: io, O: io, ...(SCRATCH[part] ?? textbook)(sizes) };
}

// Whether a part's S has keys as rows.
export const isTurned = (part) => part === "part4";

const read = (m, i, c0, c1) => ({ m, i, c0, c1, w: false });
const write = (m, i, c0, c1) => ({ m, i, c0, c1, w: true });

// Rows one after the other: of = read or write.
function* rows(of, m, i0, i1, c0, c1) {
  for (let i = i0; i < i1; i++) yield of(m, i, c0, c1);
}

// [from, to) in pieces of a size: pairs of numbers.
function* pieces(from, to, size) {
  for (let at = from; at < to; at += size) yield [at, Math.min(at + size, to)];
}

const one = (i) => `query ${i + 1}`;
const several = (i0, i1) => `queries ${i0 + 1} to ${i1}`;
const tile = (i0, i1, j0, j1) => `${several(i0, i1)}, keys ${j0 + 1} to ${j1}`;

// Frames that compute one query after the other.
function* byRow(N, ...stages) {
  for (let i = 0; i < N; i++) for (const stage of stages) yield { area: [i, i + 1, 0, i + 1], ...stage(i) };
}

function* part1({ N, d }) {
  yield* byRow(N, (i) => ({
    title: `Scores of ${one(i)}`,
    text: "One row of Q is multiplied with every key that it may see. This one row reads all of K. The scores go to an N × N matrix in memory.",
    anchor: "s += Q[i * ldQ + c] * K[j * ldK + c]",
    paper: [1],
    makes: "scores",
    *touch() {
      for (let j = 0; j <= i; j++) yield* [read("Q", i, 0, d), read("K", j, 0, d), write("S", i, j, j + 1)];
    },
  }));
  yield* byRow(N, softmax);
  yield* byRow(N, (i) => ({
    title: `Output of ${one(i)}`,
    text: "Each number of the output adds up a whole row of weights times a column of V. It reads down the column, so a cache line of V is fetched for one number, and again for the next column.",
    anchor: "o += S[i * Nk + j] * V[j * ldV + c]",
    paper: [3],
    *touch() {
      for (let c = 0; c < d; c++) {
        for (let j = 0; j <= i; j++) yield* [read("S", i, j, j + 1), read("V", j, c, c + 1)];
        yield write("O", i, c, c + 1);
      }
    },
  }));
}

const softmax = (i) => ({
  title: `Softmax of row ${i + 1}`,
  text: "The row is read for its largest score, again for the exponentials and their sum, and again to divide. The matrix was just written; if it does not fit the cache, it comes back from memory.",
  anchor: "const float log_sum = softmax_row(S + i * Nk",
  paper: [2],
  makes: "weights",
  touch: () => [read, write, write].map((of) => of("S", i, 0, i + 1)),
});

function* part2({ N, d, Br: T, rows: R }) {
  for (const [j0, j1] of pieces(0, N, T)) {
    yield {
      title: `Keys ${j0 + 1} to ${j1}, transposed`,
      text: "A tile of K is transposed once for all queries, so that the lanes of a vector can span keys.",
      anchor: "simd::transpose({Kt, T}",
      paper: [1],
      *touch() {
        for (let j = j0; j < j1; j++) {
          yield read("K", j, 0, d);
          yield* rows(write, "Kt", 0, d, j - j0, j - j0 + 1);
        }
      },
    };
    for (const [i0, i1] of pieces(0, N, T)) {
      if (j0 >= i1) continue;
      yield {
        title: `Scores of ${tile(i0, i1, j0, j1)}`,
        text: "Both tiles are in L1, and each is used T times before it leaves. So K is read N / T times instead of N times. The scores still go to the N × N matrix.",
        anchor: "simd::multiply({Sij, Nk}",
        paper: [1],
        area: [i0, i1, j0, j1],
        makes: "scores",
        *touch() {
          for (const [r0, r1] of pieces(i0, i1, R)) {
            for (let c = 0; c < d; c++) {
              yield* rows(read, "Q", r0, r1, c, c + 1);
              yield read("Kt", c, 0, j1 - j0);
            }
            yield* rows(write, "S", r0, r1, j0, j1);
          }
        },
      };
    }
  }
  yield* byRow(N, softmax);
  for (const [i0, i1] of pieces(0, N, T)) {
    for (const [j0, j1] of pieces(0, i1, T)) {
      const isDiagonal = j1 > i0 + 1;
      yield {
        title: `Output of ${tile(i0, i1, j0, j1)}`,
        text:
          "V is read along its rows, in whole cache lines, and a tile of V serves all queries of the tile." +
          (isDiagonal
            ? " On the diagonal each query takes its own number of keys; masked values are left out, not multiplied by 0."
            : ""),
        anchor: isDiagonal
          ? "simd::add_weighted_rows(O + i * d, S + i * Nk + all"
          : "simd::multiply_add({O + i0 * d, d}",
        paper: [3],
        area: [i0, i1, j0, j1],
        *touch() {
          for (const [r0, r1] of pieces(i0, i1, R)) {
            for (let j = j0; j < Math.min(j1, r1); j++) {
              yield* rows(read, "S", Math.max(r0, j), r1, j, j + 1);
              yield read("V", j, 0, d);
            }
            yield* rows(write, "O", r0, r1, 0, d);
          }
        },
      };
    }
  }
}

const part3 = ({ N, d }) =>
  byRow(
    N,
    (i) => ({
      title: `Scores of ${one(i)}`,
      text: "The scores are computed one row at a time. The row is all the memory that they need, and it stays in L1. In return, each query reads all of K.",
      anchor: "simd::dot_rows(S, Q + i * ldQ",
      paper: [1],
      makes: "scores",
      frees: true,
      *touch() {
        for (let j = 0; j <= i; j++) yield* [read("Q", i, 0, d), read("K", j, 0, d), write("S", 0, j, j + 1)];
      },
    }),
    (i) => ({
      title: `Exponentials of ${one(i)}`,
      text: "The largest score m is subtracted, so no exponential overflows; l is their sum. The row has not left L1 since it was written.",
      anchor: "l += simd::exp_sum(S + j, keys",
      paper: [2],
      makes: "weights",
      touch: () => [read("S", 0, 0, i + 1), write("S", 0, 0, i + 1)],
    }),
    (i) => ({
      title: `Output of ${one(i)}`,
      text: "The output is the weighted sum of the rows of V. The division by l comes last, for d numbers instead of N. Then the row of scores is dropped.",
      anchor: "simd::add_weighted_rows(O + i * d, S + j",
      paper: [3],
      *touch() {
        for (let j = 0; j <= i; j++) yield* [read("S", 0, j, j + 1), read("V", j, 0, d)];
        yield write("O", i, 0, d);
      },
    }),
  );

function* part4({ N, d, Br, Bc, rows: R }) {
  for (const [i0, i1] of pieces(0, N, Br)) {
    const n = i1 - i0,
      state = () => rows(write, "ml", 0, 2, 0, n);
    yield {
      title: `Queries ${i0 + 1} to ${i1} begin`,
      text: "A tile of queries is loaded once, transposed and scaled. Its output and the sums l start at 0, the maxima m at minus infinity.",
      anchor: "std::fill_n(m, padded, -std::numeric_limits",
      paper: [3, 4, 5],
      tile: [i0, i1, -1],
      *touch() {
        yield* rows(read, "Q", i0, i1, 0, d);
        for (let c = 0; c < d; c++) yield* [write("Qt", c, 0, n), write("Ot", c, 0, n)];
        yield* state();
      },
    };
    for (const [j0, j1] of pieces(0, i1, Bc)) {
      const j = j0 / Bc,
        area = [i0, i1, j0, j1],
        name = tile(...area);
      yield {
        title: `Scores of ${name}`,
        text:
          "The tile of scores is Br × Bc, whatever N is. It overwrites the tile before it: no score ever goes to memory." +
          (j1 > i0 + 1 ? " The mask cuts the tile along the diagonal." : ""),
        anchor: "scores(0, 0, std::min(keys, first + W));",
        paper: [6, 7, 8],
        area,
        makes: "scores",
        frees: true,
        tile: [i0, i1, j - 1],
        *touch() {
          for (const [k0, k1] of pieces(j0, j1, R)) {
            for (let c = 0; c < d; c++) {
              yield* rows(read, "K", k0, k1, c, c + 1);
              yield read("Qt", c, 0, n);
            }
            yield* rows(write, "S", k0 - j0, k1 - j0, 0, n);
          }
        },
      };
      yield {
        title: `Online softmax of ${name}`,
        text: "Each row’s m becomes the larger of the old m and the tile’s largest score. The weights are exp(S − m). The old l is multiplied by exp(old m − m), and the weights are added to it. Neither m nor l is final before the last tile.",
        anchor: "if (simd::online_softmax({St, ldS}",
        paper: [9],
        area,
        makes: "weights",
        tile: [i0, i1, j],
        *touch() {
          for (let pass = 0; pass < 2; pass++) yield* rows(write, "S", 0, j1 - j0, 0, n);
          yield* state();
        },
      };
      if (j) {
        yield {
          title: `Correction of ${several(i0, i1)}`,
          text: "If m has moved, the weights in the output so far are too large. The output is multiplied by exp(old m − m). Our kernel lets m lag behind a little, so it rarely does this; here it is done each time.",
          anchor: "simd::scale_columns({Oi, R}, d, queries, correction + r0);",
          paper: [10],
          tile: [i0, i1, j],
          touch: () => rows(write, "Ot", 0, d, 0, n),
        };
      }
      yield {
        title: `Output of ${name}`,
        text: "The weights times the tile of V are added to the output, which stays in scratch. K and V are read once for Br queries, not once for each.",
        anchor: "simd::multiply_add({Oi, R}, {V, 1, ldV}",
        paper: [10],
        area,
        tile: [i0, i1, j],
        *touch() {
          for (const [c0, c1] of pieces(0, d, R)) {
            for (let k = j0; k < j1; k++) yield* [read("V", k, c0, c1), read("S", k - j0, 0, n)];
            yield* rows(write, "Ot", c0, c1, 0, n);
          }
        },
      };
    }
    yield {
      title: `Queries ${i0 + 1} to ${i1} end`,
      text: "The output is divided by l once, and written. The softmax leaves only m + log(l), which suffices to merge two results over different keys.",
      anchor: "simd::scale_columns({Ot, R}, a.d, n, correction);",
      paper: [12, 13, 14],
      frees: true,
      tile: [i0, i1, Math.ceil(i1 / Bc) - 1],
      *touch() {
        yield* rows(read, "Ot", 0, d, 0, n);
        yield* rows(write, "O", i0, i1, 0, d);
      },
    };
  }
}

// The formula row by row, in the order of part 1. A part may take another order.
function* formula(sizes) {
  const text =
    "The page has no frames for this part. It shows the formula, row by row, with the scores in an N × N matrix. The bytes are those of the formula, too.";
  for (const frame of part1(sizes)) yield { ...frame, text, anchor: null };
}

export const WALKS = { part1, part2, part3, part4 };

// The frames of a part.
export const frames = (part, sizes) => [...(WALKS[part] ?? formula)(sizes)];
