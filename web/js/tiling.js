// The frames in which Tiles shows a part: those of its loop nest in web/nests, each with a text, the lines of the paper,
// and a piece of each C++ line that it runs. A part without a nest gets the formula row by row, as part 1 computes it.
import { NESTS } from "./facts.js";
import { Nest } from "./nest.js";

const UNLIMITED = { steps: Infinity, frames: Infinity, floats: Infinity };
const SOFTMAX = {
  paper: [2],
  anchors: ["const float log_sum = softmax_row(S + i * Nk"],
  text: "The row is read for its largest score, again for the exponentials and their sum, and again to divide. The matrix was just written; if it does not fit the cache, it comes back from memory.",
};

// By the frame's name in the nest.
const NOTES = {
  part1: {
    Scores: {
      paper: [1],
      anchors: ["s += Q[i * ldQ + c] * K[j * ldK + c]"],
      text: "One row of Q is multiplied with every key that it may see. This one row reads all of K. The scores go to an N × N matrix in memory.",
    },
    Softmax: SOFTMAX,
    Output: {
      paper: [3],
      anchors: ["o += S[i * Nk + j] * V[j * ldV + c]"],
      text: "Each number of the output adds up a whole row of weights times a column of V. It reads down the column, so a cache line of V is fetched for one number, and again for the next column.",
    },
  },
  part2: {
    "Keys, transposed": {
      paper: [1],
      anchors: ["simd::transpose({Kt, T}"],
      text: "A tile of K is transposed once for all queries, so that the lanes of a vector can span keys.",
    },
    Scores: {
      paper: [1],
      anchors: ["simd::multiply({Sij, Nk}"],
      text: "Both tiles are in L1, and each is used T times before it leaves. So K is read N / T times instead of N times. The scores still go to the N × N matrix.",
    },
    Softmax: SOFTMAX,
    Output: {
      paper: [3],
      anchors: ["simd::add_weighted_rows(O + i * d, S + i * Nk + all", "simd::multiply_add({O + i0 * d, d}"],
      text: "V is read along its rows, in whole cache lines, and a tile of V serves all queries of the tile. On the diagonal each query takes its own number of keys; masked values are left out, not multiplied by 0.",
    },
  },
  part3: {
    Scores: {
      paper: [1],
      anchors: ["simd::dot_rows(S, Q + i * ldQ"],
      text: "The scores are computed one row at a time. The row is all the memory that they need, and it stays in L1. In return, each query reads all of K.",
    },
    Exponentials: {
      paper: [2],
      anchors: ["l += simd::exp_sum(S + j, keys"],
      text: "The largest score m is subtracted, so no exponential overflows; l is their sum. The row has not left L1 since it was written.",
    },
    Output: {
      paper: [3],
      anchors: ["simd::add_weighted_rows(O + i * d, S + j"],
      text: "The output is the weighted sum of the rows of V. The division by l comes last, for d numbers instead of N. Then the row of scores is dropped.",
    },
  },
  part4: {
    Begin: {
      paper: [3, 4, 5],
      anchors: ["std::fill_n(m, padded, -std::numeric_limits"],
      text: "A tile of queries is loaded once, transposed and scaled. Its output and the sums l start at 0, the maxima m at minus infinity.",
    },
    Scores: {
      paper: [6, 7, 8],
      anchors: ["scores(0, 0, std::min(keys, first + W));"],
      text: "The tile of scores is Br × Bc, whatever N is. It overwrites the tile before it: no score ever goes to memory. The mask cuts a tile on the diagonal.",
    },
    "Online softmax": {
      paper: [9],
      anchors: ["if (simd::online_softmax({St, ldS}"],
      text: "Each row’s m becomes the larger of the old m and the tile’s largest score. The weights are exp(S − m). The old l is multiplied by exp(old m − m), and the weights are added to it. Neither m nor l is final before the last tile.",
    },
    Correction: {
      paper: [10],
      anchors: ["simd::scale_columns({Oi, R}, d, queries, correction + r0);"],
      text: "If m has moved, the weights in the output so far are too large. The output is multiplied by exp(old m − m). Our kernel lets m lag behind a little, so it rarely does this; here it is done each time.",
    },
    Output: {
      paper: [10],
      anchors: ["simd::multiply_add({Oi, R}, {V, 1, ldV}"],
      text: "The weights times the tile of V are added to the output, which stays in scratch. K and V are read once for Br queries, not once for each.",
    },
    End: {
      paper: [12, 13, 14],
      anchors: ["simd::scale_columns({Ot, R}, a.d, n, correction);"],
      text: "The output is divided by l once, and written. The softmax leaves only m + log(l), which suffices to merge two results over different keys.",
      frees: true,
    },
  },
};
const FORMULA = {
  anchors: [],
  text: "The page has no frames for this part. It shows the formula, row by row, with the scores in an N × N matrix. The bytes are those of the formula, too.",
};

// The nest of a part, whose frames also have {text, anchors, paper}; in part 4 also `tile`, [i0, i1, j]: the queries, and
// the last tile of keys that m and l have taken in, or -1.
export class PartNest extends Nest {
  constructor(part, sizes) {
    super(NESTS[part] ?? NESTS.part1, sizes, UNLIMITED);
    this.part = part;
  }

  *frames() {
    const notes = NOTES[this.part];
    let taken = -1;
    for (const frame of super.frames()) {
      const { name, queries } = frame;
      if (name === "Begin") taken = -1;
      if (name === "Online softmax") taken++;
      const note = notes ? notes[name] : { ...NOTES.part1[name], ...FORMULA };
      yield { ...frame, ...note, ...(this.part === "part4" && { tile: [queries.a, queries.b, taken] }) };
    }
  }
}
