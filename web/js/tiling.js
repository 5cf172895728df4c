// The steps of each part over one head's Q, K and V (N, d), with a causal mask and scaled scores.
//
// A step is {title, text, anchor: a piece of the part's C++ line or null, paper: numbers of lines, boxes: [{m, r, c, w}],
// touch: the memory in the order of the loops}. A box is a rectangle [from, to) of rows r and columns c of a matrix m;
// w: written. rows: the rows that a product takes at a time. A part without steps here gets those of the formula.

const box = (m, r, c, w = false) => ({ m, r, c, w });

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

// The place of the score of query i and key j in a part's S, as [row, column].
export function scoreAt(part, { Br, Bc }, i, j) {
  if (part === "part3") return [0, j];
  return part === "part4" ? [j % Bc, i % Br] : [i, j]; // part 4 has the tile transposed
}

const row = (m, i, c0, c1) => ({ m, i, c0, c1 });

function* part1({ N, d }) {
  for (let i = 0; i < N; i++) {
    yield {
      title: `Scores of query ${i + 1}`,
      text: "One row of Q is multiplied with every key that it may see. This one row reads all of K. The scores go to an N × N matrix in memory.",
      anchor: "s += Q[i * ldQ + c] * K[j * ldK + c]",
      paper: [1],
      boxes: [
        box("Q", [i, i + 1], [0, d]),
        box("K", [0, i + 1], [0, d]),
        box("S", [i, i + 1], [0, i + 1], true),
      ],
      *touch() {
        for (let j = 0; j <= i; j++) {
          yield row("Q", i, 0, d);
          yield row("K", j, 0, d);
          yield row("S", i, j, j + 1);
        }
      },
      scores: [i, i + 1, 0, i + 1],
    };
  }
  yield* softmaxRows(N, (i, n) => row("S", i, 0, n));
  for (let i = 0; i < N; i++) {
    yield {
      title: `Output of query ${i + 1}`,
      text: "Each number of the output adds up a whole row of weights times a column of V. It reads down the column, so a cache line of V is fetched for one number, and again for the next column.",
      anchor: "o += S[i * Nk + j] * V[j * ldV + c]",
      paper: [3],
      boxes: [
        box("S", [i, i + 1], [0, i + 1]),
        box("V", [0, i + 1], [0, d]),
        box("O", [i, i + 1], [0, d], true),
      ],
      *touch() {
        for (let c = 0; c < d; c++) {
          for (let j = 0; j <= i; j++) {
            yield row("S", i, j, j + 1);
            yield row("V", j, c, c + 1);
          }
          yield row("O", i, c, c + 1);
        }
      },
      output: [i, i + 1, 1],
    };
  }
}

function* softmaxRows(N, of) {
  for (let i = 0; i < N; i++) {
    yield {
      title: `Softmax of row ${i + 1}`,
      text: "The row is read for its largest score, again for the exponentials and their sum, and again to divide. The matrix was just written; if it does not fit the cache, it comes back from memory.",
      anchor: "const float log_sum = softmax_row(S + i * Nk",
      paper: [2],
      boxes: [box("S", [i, i + 1], [0, i + 1]), box("S", [i, i + 1], [0, i + 1], true)],
      *touch() {
        for (let pass = 0; pass < 3; pass++) yield of(i, i + 1);
      },
      weights: [i, i + 1, 0, i + 1],
    };
  }
}

function* part2({ N, d, Br: T, rows: R }) {
  for (let j0 = 0; j0 < N; j0 += T) {
    const j1 = Math.min(j0 + T, N);
    yield {
      title: `Keys ${j0 + 1} to ${j1}, transposed`,
      text: "A tile of K is transposed once for all queries, so that the lanes of a vector can span keys.",
      anchor: "simd::transpose({Kt, T}",
      paper: [1],
      boxes: [box("K", [j0, j1], [0, d]), box("Kt", [0, d], [0, j1 - j0], true)],
      *touch() {
        for (let j = j0; j < j1; j++) {
          yield row("K", j, 0, d);
          for (let c = 0; c < d; c++) yield row("Kt", c, j - j0, j - j0 + 1);
        }
      },
    };
    for (let i0 = 0; i0 < N; i0 += T) {
      const i1 = Math.min(i0 + T, N);
      if (j0 >= i1) continue;
      yield {
        title: `Scores of queries ${i0 + 1} to ${i1}, keys ${j0 + 1} to ${j1}`,
        text: "Both tiles are in L1, and each is used T times before it leaves. So K is read N / T times instead of N times. The scores still go to the N × N matrix.",
        anchor: "simd::multiply({Sij, Nk}",
        paper: [1],
        boxes: [
          box("Q", [i0, i1], [0, d]),
          box("Kt", [0, d], [0, j1 - j0]),
          box("S", [i0, i1], [j0, j1], true),
        ],
        *touch() {
          for (let i = i0; i < i1; i += R) {
            const end = Math.min(i + R, i1);
            for (let c = 0; c < d; c++) {
              for (let r = i; r < end; r++) yield row("Q", r, c, c + 1);
              yield row("Kt", c, 0, j1 - j0);
            }
            for (let r = i; r < end; r++) yield row("S", r, j0, j1);
          }
        },
        scores: [i0, i1, j0, j1],
      };
    }
  }
  yield* softmaxRows(N, (i, n) => row("S", i, 0, n));
  for (let i0 = 0; i0 < N; i0 += T) {
    const i1 = Math.min(i0 + T, N);
    for (let j0 = 0; j0 < i1; j0 += T) {
      const j1 = Math.min(j0 + T, i1),
        diagonal = j1 > i0 + 1;
      yield {
        title: `Output of queries ${i0 + 1} to ${i1}, keys ${j0 + 1} to ${j1}`,
        text:
          "V is read along its rows, in whole cache lines, and a tile of V serves all queries of the tile." +
          (diagonal
            ? " On the diagonal each query takes its own number of keys; hidden values are left out, not multiplied by 0."
            : ""),
        anchor: diagonal
          ? "simd::add_weighted_rows(O + i * d, S + i * Nk + all"
          : "simd::multiply_add({O + i0 * d, d}",
        paper: [3],
        boxes: [box("S", [i0, i1], [j0, j1]), box("V", [j0, j1], [0, d]), box("O", [i0, i1], [0, d], true)],
        *touch() {
          for (let i = i0; i < i1; i += R) {
            const end = Math.min(i + R, i1);
            for (let j = j0; j < Math.min(j1, end); j++) {
              for (let r = Math.max(i, j); r < end; r++) yield row("S", r, j, j + 1);
              yield row("V", j, 0, d);
            }
            for (let r = i; r < end; r++) yield row("O", r, 0, d);
          }
        },
        output: [i0, i1, j1 >= i1 ? 1 : j1 / i1],
      };
    }
  }
}

function* part3({ N, d }) {
  for (let i = 0; i < N; i++) {
    const n = i + 1;
    yield {
      title: `Scores of query ${n}`,
      text: "The scores are computed one row at a time. The row is all the memory that they need, and it stays in L1. In return, each query reads all of K.",
      anchor: "simd::dot_rows(S, Q + i * ldQ",
      paper: [1],
      boxes: [box("Q", [i, n], [0, d]), box("K", [0, n], [0, d]), box("S", [i, n], [0, n], true)],
      *touch() {
        for (let j = 0; j < n; j++) {
          yield row("Q", i, 0, d);
          yield row("K", j, 0, d);
          yield row("S", 0, j, j + 1);
        }
      },
      scores: [i, n, 0, n],
      forget: i ? [i - 1, i, 0, i] : null,
    };
    yield {
      title: `Exponentials of query ${n}`,
      text: "The largest score m is subtracted, so no exponential overflows; l is their sum. The row has not left L1 since it was written.",
      anchor: "l += simd::exp_sum(S + j, keys",
      paper: [2],
      boxes: [box("S", [i, n], [0, n]), box("S", [i, n], [0, n], true)],
      *touch() {
        yield row("S", 0, 0, n);
        yield row("S", 0, 0, n);
      },
      weights: [i, n, 0, n],
    };
    yield {
      title: `Output of query ${n}`,
      text: "The output is the weighted sum of the rows of V. The division by l comes last, for d numbers instead of N. Then the row of scores is dropped.",
      anchor: "simd::add_weighted_rows(O + i * d, S + j",
      paper: [3],
      boxes: [box("S", [i, n], [0, n]), box("V", [0, n], [0, d]), box("O", [i, n], [0, d], true)],
      *touch() {
        for (let j = 0; j < n; j++) {
          yield row("S", 0, j, j + 1);
          yield row("V", j, 0, d);
        }
        yield row("O", i, 0, d);
      },
      output: [i, n, 1],
    };
  }
}

function* part4({ N, d, Br, Bc, rows: R }) {
  const state = (rows) =>
    function* () {
      yield row("ml", 0, 0, rows);
      yield row("ml", 1, 0, rows);
    };
  let last = null;
  for (let i0 = 0; i0 < N; i0 += Br) {
    const i1 = Math.min(i0 + Br, N),
      rows = i1 - i0;
    yield {
      title: `Queries ${i0 + 1} to ${i1} begin`,
      text: "A tile of queries is loaded once, transposed and scaled. Its output and the sums l start at 0, the maxima m at minus infinity.",
      anchor: "std::fill_n(m, padded, -std::numeric_limits",
      paper: [3, 4, 5],
      boxes: [
        box("Q", [i0, i1], [0, d]),
        box("Qt", [0, d], [0, rows], true),
        box("Ot", [0, d], [0, rows], true),
        box("ml", [0, 2], [0, rows], true),
      ],
      *touch() {
        for (let i = i0; i < i1; i++) yield row("Q", i, 0, d);
        for (let c = 0; c < d; c++) {
          yield row("Qt", c, 0, rows);
          yield row("Ot", c, 0, rows);
        }
        yield* state(rows)();
      },
      tile: [i0, i1, -1],
      forget: last,
    };
    for (let j0 = 0, j = 0; j0 < i1; j0 += Bc, j++) {
      const j1 = Math.min(j0 + Bc, N),
        seen = Math.min(j1, i1),
        area = [i0, i1, j0, seen];
      const tile = `queries ${i0 + 1} to ${i1}, keys ${j0 + 1} to ${seen}`;
      yield {
        title: `Scores of ${tile}`,
        text:
          "The tile of scores is Br × Bc, whatever N is. It overwrites the tile before it: no score ever goes to memory." +
          (seen > i0 + 1 ? " The mask cuts the tile along the diagonal." : ""),
        anchor: "scores(0, 0, std::min(keys, first + W));",
        paper: [6, 7, 8],
        boxes: [
          box("Qt", [0, d], [0, rows]),
          box("K", [j0, seen], [0, d]),
          box("S", [i0, i1], [j0, seen], true),
        ],
        *touch() {
          for (let k = j0; k < seen; k += R) {
            const end = Math.min(k + R, seen);
            for (let c = 0; c < d; c++) {
              for (let r = k; r < end; r++) yield row("K", r, c, c + 1);
              yield row("Qt", c, 0, rows);
            }
            for (let r = k; r < end; r++) yield row("S", r - j0, 0, rows);
          }
        },
        scores: area,
        forget: j ? [i0, i1, j0 - Bc, j0] : null,
        tile: [i0, i1, j - 1],
      };
      yield {
        title: `Online softmax of ${tile}`,
        text: "Each row’s m becomes the larger of the old m and the tile’s largest score. The weights are exp(S − m). The old l is multiplied by exp(old m − m), and the weights are added to it. Neither m nor l is final before the last tile.",
        anchor: "if (simd::online_softmax({St, ldS}",
        paper: [9],
        boxes: [box("S", [i0, i1], [j0, seen], true), box("ml", [0, 2], [0, rows], true)],
        *touch() {
          for (let pass = 0; pass < 2; pass++) for (let k = j0; k < seen; k++) yield row("S", k - j0, 0, rows);
          yield* state(rows)();
        },
        weights: area,
        tile: [i0, i1, j],
      };
      if (j) {
        yield {
          title: `Correction of queries ${i0 + 1} to ${i1}`,
          text: "If m has moved, the weights in the output so far are too large. The output is multiplied by exp(old m − m). Our kernel lets m lag behind a little, so it rarely does this; here it is done each time.",
          anchor: "simd::scale_columns({Oi, R}, d, queries, correction + r0);",
          paper: [10],
          boxes: [box("Ot", [0, d], [0, rows], true)],
          *touch() {
            for (let c = 0; c < d; c++) yield row("Ot", c, 0, rows);
          },
          tile: [i0, i1, j],
          correction: true,
        };
      }
      yield {
        title: `Output of ${tile}`,
        text: "The weights times the tile of V are added to the output, which stays in scratch. K and V are read once for Br queries, not once for each.",
        anchor: "simd::multiply_add({Oi, R}, {V, 1, ldV}",
        paper: [10],
        boxes: [
          box("S", [i0, i1], [j0, seen]),
          box("V", [j0, seen], [0, d]),
          box("Ot", [0, d], [0, rows], true),
        ],
        *touch() {
          for (let c = 0; c < d; c += R) {
            for (let k = j0; k < seen; k++) {
              yield row("V", k, c, Math.min(c + R, d));
              yield row("S", k - j0, 0, rows);
            }
            for (let r = c; r < Math.min(c + R, d); r++) yield row("Ot", r, 0, rows);
          }
        },
        tile: [i0, i1, j],
      };
      last = area;
    }
    yield {
      title: `Queries ${i0 + 1} to ${i1} end`,
      text: "The output is divided by l once, and written. The softmax leaves only m + log(l), which suffices to merge two results over different keys.",
      anchor: "simd::scale_columns({Ot, R}, a.d, n, correction);",
      paper: [12, 13, 14],
      boxes: [box("Ot", [0, d], [0, rows]), box("O", [i0, i1], [0, d], true)],
      *touch() {
        for (let c = 0; c < d; c++) yield row("Ot", c, 0, rows);
        for (let i = i0; i < i1; i++) yield row("O", i, 0, d);
      },
      output: [i0, i1, 1],
      forget: last,
      tile: [i0, i1, Math.ceil(i1 / Bc) - 1],
    };
  }
}

// The formula row by row, in the order of part 1. A part may take another order.
function* formula(sizes) {
  const text =
    "The page has no steps for this part. It shows the formula, row by row, with the scores in an N × N matrix. The bytes are those of the formula, too.";
  for (const step of part1(sizes)) yield { ...step, text, anchor: null };
}

const WALKS = { part1, part2, part3, part4 };

// The steps of a part.
export const steps = (part, sizes) => [...(WALKS[part] ?? formula)(sizes)];
