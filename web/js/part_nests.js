// @ts-check
// The frames of a part in Tiles: those of its nest in web/nests, each with a text and pieces of C++ lines.
// A part without a nest gets part 1's, the formula row by row.
import { NESTS } from "./facts.js";
import { Nest } from "./nest.js";

const SOFTMAX = [
  "The row is read for its largest score, again for the exponentials and their sum, and again to divide. The matrix was just written; if it does not fit the cache, it comes back from memory.",
  "const float log_sum = softmax_row(S + i * Nk",
];
// By the frame's name in the nest: the text, and the pieces of C++.
const NOTES = {
  part1: {
    Scores: [
      "One row of Q is multiplied with every key that it may see. This one row reads all of K. The scores go to an N × N matrix in memory.",
      "s += Q[i * ldQ + c] * K[j * ldK + c]",
    ],
    Softmax: SOFTMAX,
    Output: [
      "Each number of the output adds up a whole row of weights times a column of V. It reads down the column, so a cache line of V is fetched for one number, and again for the next column.",
      "o += S[i * Nk + j] * V[j * ldV + c]",
    ],
  },
  part2: {
    "Keys, transposed": [
      "A tile of K is transposed once for all queries, so that the lanes of a vector can span keys.",
      "simd::transpose({Kt, T}",
    ],
    Scores: [
      "Both tiles are in L1, and each is used T times before it leaves. So K is read N / T times instead of N times. The scores still go to the N × N matrix.",
      "simd::multiply({Sij, Nk}",
    ],
    Softmax: SOFTMAX,
    Output: [
      "V is read along its rows, in whole cache lines, and a tile of V serves all queries of the tile. On the diagonal each query takes its own number of keys; masked values are left out, not multiplied by 0.",
      "simd::add_weighted_rows(O + i * d, S + i * Nk + all", "simd::multiply_add({O + i0 * d, d}",
    ],
  },
  part3: {
    Scores: [
      "The scores are computed one row at a time. The row is all the memory that they need, and it stays in L1. In return, each query reads all of K.",
      "simd::dot_rows(S, Q + i * ldQ",
    ],
    Exponentials: [
      "The largest score m is subtracted, so no exponential overflows; l is their sum. The row has not left L1 since it was written.",
      "l += simd::exp_sum(S + j, keys",
    ],
    Output: [
      "The output is the weighted sum of the rows of V. The division by l comes last, for d numbers instead of N. Then the row of scores is dropped.",
      "simd::add_weighted_rows(O + i * d, S + j",
    ],
  },
  part4: {
    Begin: [
      "A tile of queries is loaded once, transposed and scaled. Its output and the sums l start at 0, the maxima m at minus infinity.",
      "std::fill_n(m, padded, reference",
    ],
    Scores: [
      "The tile of scores is Br × Bc, whatever N is. It overwrites the tile before it: no score ever goes to memory. The mask cuts a tile on the diagonal.",
      "staircase(keys, first, simd::lanes(),",
    ],
    "Online softmax": [
      "Each row’s m becomes the larger of the old m and the tile’s largest score. The weights are exp(S − m). The old l is multiplied by exp(old m − m), and the weights are added to it. Neither m nor l is final before the last tile.",
      "if (simd::online_softmax({St, ldS}",
    ],
    Correction: [
      "If m has moved, the weights in the output so far are too large. The output is multiplied by exp(old m − m). Our kernel lets m lag behind a little, so it rarely does this; here it is done each time.",
      "simd::scale_columns({Oi, R}, d, queries, correction + r0);",
    ],
    Output: [
      "The weights times the tile of V are added to the output, which stays in scratch. K and V are read once for Br queries, not once for each.",
      "simd::multiply_add({Oi, R}, {V, 1, ldV}",
    ],
    End: [
      "The output is divided by l once, and written. The softmax leaves only m + log(l), which suffices to merge two results over different keys.",
      "simd::scale_columns({Ot, R}, a.d, n, correction);",
    ],
  },
};
const FORMULA =
  "The page has no frames for this part. It shows the formula, row by row, with the scores in an N × N matrix. The bytes are those of the formula, too.";

// A part's nest with texts; part 4's frames have tile: [i0, i1, j], queries and m's last tile of keys, or -1.
export class PartNest extends Nest {
  constructor(part, sizes) {
    super(NESTS[part] ?? NESTS.part1, sizes);
    this.part = part;
  }

  *frames() {
    let taken = -1;
    for (const frame of super.frames()) {
      const { name, queries } = frame,
        [text, ...anchors] = NOTES[this.part]?.[name] ?? [FORMULA];
      Object.assign(frame, { text, anchors });
      if (this.part === "part4") {
        taken = name === "Begin" ? -1 : taken + Number(name === "Online softmax");
        Object.assign(frame, { tile: [queries.a, queries.b, taken], frees: frame.frees || name === "End" });
      }
      yield frame;
    }
  }
}
