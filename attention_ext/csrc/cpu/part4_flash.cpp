// Part 4, flash: Br x Bc tiles with an online softmax, so no whole row of scores is stored.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1; the line numbers below are its own.
//
//   for each batch, head, tile i of Br queries, over all threads:          lines 3, 4
//       O, l, m <- 0, 0, -inf                                              line 5
//       for each tile j of Bc keys:                                        lines 6, 7
//           S   <- scale * Qi Kj^T                                         line 8
//           m', P, l, then O <- diag(exp(m - m')) O + P Vj                 lines 9, 10
//       O <- diag(1 / l) O;  lse <- m + log(l)                             lines 12, 13
//
// The lanes span queries: Qi, S, P and O are held transposed, so K and V are read in place. A strip is a
// panel of queries and STEP keys, whose scores stay in cache; its last step may end beyond the tile of keys.
//
// Scratch: threads x (2 Br d + strip + 3 Br) floats, whatever N is. What it improves: part 3 reads K and V
// once per query, part 4 once per Br queries, and the scores that part 2 keeps in memory stay in cache.
//
// Beside it: flash_decoding.cpp for few queries, part4_bf16.cpp, part4_amx.cpp, part4_backward.cpp.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "cpu/part4.h"
#include "cpu/softmax.h"
#include "simd/constants.h"
#include "simd/simd.h"
#include "threads.h"

using part4::Tile;

int64_t flash_scratch(const Attention& a) { return a.threads * Tile::floats(a); }

void flash_attention(const Attention& a, float* scratch) {
    const int64_t Tr = (a.Nq + a.Br - 1) / a.Br;
    for_each_item(a.B * a.H, Tr, a.threads, a.pool, [&](int64_t head, int64_t item, int thread) {
        const int64_t i0 = (Tr - 1 - item) * a.Br;  // line 3; causal: the longest first
        const int64_t row = head * a.Nq + i0;
        part4::attend_tile(a, head, i0, scratch + thread * Tile::floats(a), a.out + row * a.d,
                           a.lse ? a.lse + row : nullptr);
    });
}

namespace part4 {

void attend_tile(const Attention& a, int64_t head, int64_t i0, float* scratch, float* out, float* lse) {
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;
    const float *Q = a.q_of(head), *K = a.k_of(head), *V = a.v_of(head);
    Tile tile(a, head, i0, Scratch(scratch));

    tile.load({Q + i0 * ldQ, ldQ});  // lines 4, 5
    const Range seen = tile.seen();
    for (int64_t j0 = seen.first; j0 < seen.end; j0 += a.Bc)        // line 6
        tile.attend(j0, {K + j0 * ldK, ldK}, {V + j0 * ldV, ldV});  // lines 7 to 10
    tile.store(out, lse);                                           // lines 12 to 15
}

int64_t Tile::floats(const AttentionSizes& a) { return Tile(a, 0, 0, Scratch()).taken; }

Tile::Tile(const AttentionSizes& a, int64_t head, int64_t i0, Scratch scratch)
    : a(a),
      head(head),
      i0(i0),
      n(std::min(a.Br, a.Nq - i0)),
      padded(round_up(n, simd::lanes())),
      R(row_stride(a.Br)) {
    for (float** each : {&Qt, &Ot}) *each = scratch.take(a.d * R);
    St = scratch.take((STEP + simd::panel()) * simd::panel());
    for (float** each : {&m, &l, &correction}) *each = scratch.take(R);
    taken = scratch.taken();
}

void Tile::load(simd::ConstMatrix Qi) {
    const int64_t panel = simd::panel();
    std::fill_n(Qt, a.d * R, 0.0f);
    // Scores and m are in units of log(2), so that softmax takes powers of 2.
    for (int64_t r0 = 0; r0 < n; r0 += panel)
        simd::transpose({Qt + r0, R}, {Qi.data + r0 * Qi.ld, Qi.ld}, std::min(panel, n - r0), a.d,
                        a.scale * SIMD_LOG2E);
    std::fill_n(Ot, a.d * R, 0.0f);
    // A sink is the first score of its row. online_softmax() takes whole numbers as m, so l has the rest of it.
    const float lowest = a.lowest(head);
    const float sink = std::clamp(lowest * SIMD_LOG2E, HIDDEN, -HIDDEN);  // that of bfloat16's lowest overflows
    const bool has_sink = lowest > HIDDEN;
    const float reference = has_sink ? std::nearbyint(sink) : lowest;
    std::fill_n(m, padded, reference);
    std::fill_n(l, padded, has_sink ? std::exp2(sink - reference) : 0.0f);
}

// The key at which the last step of strip r0 begins. All of the strip's queries see it.
int64_t Tile::last_step(int64_t r0) const {
    const int64_t step = std::min(STEP, a.Bc);
    return a.causal ? (a.seen(i0 + r0) - 1) / step * step : a.Nk;
}

int64_t Tile::end_of_keys(int64_t j0) const {
    const bool diagonal = last_step(0) < j0 + a.Bc;
    return std::min(keys(), j0 + a.Bc + (diagonal ? STEP + simd::panel() : 0));
}

void Tile::attend(int64_t j0, simd::ConstMatrix Kj, simd::ConstMatrix Vj) {
    const int64_t panel = simd::panel(), step = std::min(STEP, a.Bc);
    const auto attend_step = [&](int64_t r0, int64_t j, int64_t keys, int64_t first) {
        strip(r0, j, Kj.data + (j - j0) * Kj.ld, Kj.ld, Vj.data + (j - j0) * Vj.ld, Vj.ld, keys, first);
    };
    for (int64_t r0 = 0; r0 < padded; r0 += panel) {
        if (a.rules) {
            const Range seen = a.keys(head, i0 + r0, std::min(panel, n - r0));
            const int64_t all = a.rules->staircase(a, head, i0 + r0, seen);
            for (int64_t j = seen.first + round_up(std::max<int64_t>(0, j0 - seen.first), step);
                 j < std::min(j0 + a.Bc, all); j += step)
                attend_step(r0, j, j + step < all ? step : seen.end - j, std::min(step, all - j));
            continue;
        }
        const int64_t last = last_step(r0), end = std::min(j0 + a.Bc, last);
        for (int64_t j = j0; j < end; j += step) {
            const int64_t keys = std::min(step, end - j);
            attend_step(r0, j, keys, keys);
        }
        if (a.causal && j0 <= last && last < j0 + a.Bc) {
            const int64_t last_query = i0 + std::min(r0 + panel, n) - 1;
            attend_step(r0, last, a.seen(last_query) - last, a.seen(i0 + r0) - last);
        }
    }
}

// Lines 8 to 10 for a panel of queries, from r0 on, and some keys; query r0 + r sees the first `first + r`.
void Tile::strip(int64_t r0, int64_t j0, const float* K, int64_t ldK, const float* V, int64_t ldV, int64_t keys,
                 int64_t first) {
    const int64_t d = a.d, ldS = simd::panel(), queries = std::min(ldS, padded - r0);
    float *Qi = Qt + r0, *Oi = Ot + r0;
    staircase(keys, first, simd::lanes(), [&](int64_t j, int64_t r, int64_t n) {  // S^T <- K Q^T
        simd::multiply({St + j * ldS + r, ldS}, {K + j * ldK, ldK, 1}, {Qi + r, R}, n, queries - r, d);
    });
    a.change(head, {St, 1, ldS, i0 + r0, queries, j0, keys, SIMD_LOG2E, first >= keys});
    // m_new <- max(m, rowmax(S)), which may lag; P <- 2^(S - m_new), l <- 2^(m - m_new) * l + rowsum(P)
    if (simd::online_softmax({St, ldS}, keys, queries, first, m + r0, l + r0, correction + r0))
        // O^T <- O^T diag(2^(m - m_new))
        simd::scale_columns({Oi, R}, d, queries, correction + r0);
    // O^T <- O^T + V^T P^T
    simd::multiply_add({Oi, R}, {V, 1, ldV}, {St, ldS}, d, queries, keys, first);
}

void Tile::store(float* Oi, float* lse) {
    const int64_t panel = simd::panel();
    for (int64_t r = 0; r < n; r++) {
        const Normalized end(m[r] == HIDDEN ? HIDDEN : m[r] * SIMD_LN2, l[r]);
        correction[r] = end.factor;
        if (lse) lse[r] = end.lse;
    }
    simd::scale_columns({Ot, R}, a.d, n, correction);
    for (int64_t r0 = 0; r0 < n; r0 += panel)
        simd::transpose({Oi + r0 * a.d, a.d}, {Ot + r0, R}, a.d, std::min(panel, n - r0), 1.0f);
}

}  // namespace part4
