// Part 2, blocked: part 1's three passes, with both products cut into tiles that stay in cache.
//
//   for each batch, head:
//       for key tiles j0, query tiles i0:  S[i0..][j0..] <- scale * Q[i0..] K[j0..]^T
//       for i:                             S[i] <- softmax(S[i])
//       for query tiles i0, key tiles j0:  O[i0..] <- O[i0..] + S[i0..][j0..] V[j0..]
//
// Scratch: Nq x Nk floats, as part 1. Threads: 1. What it improves: each row of a T x T tile is used T times
// from L1, so K and V are read Nq / T times instead of Nq, V along its rows. Lanes of the first product span
// keys: the tile of K is transposed once, on the stack.
#include <algorithm>

#include "attention.h"
#include "cpu/softmax.h"
#include "parts.h"
#include "simd/simd.h"

using part2::DEPTH, part2::T;

int64_t blocked_scratch(const Attention& a) { return /* S */ a.Nq * a.Nk; }

void blocked_attention(const Attention& a, float* S) {
    const int64_t Nq = a.Nq, Nk = a.Nk, d = a.d;
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;
    float Kt[DEPTH * T];

    for (int64_t b = 0; b < a.B; b++) {
        for (int64_t h = 0; h < a.H; h++) {
            const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h);
            float *O = a.out_at(b, h), *lse = a.lse_at(b, h);
            const int64_t head = b * a.H + h;

            for (int64_t j0 = 0; j0 < Nk; j0 += T) {
                const int64_t cols = std::min(T, Nk - j0);
                for (int64_t c0 = 0; c0 < d; c0 += DEPTH) {
                    const int64_t depth = std::min(DEPTH, d - c0);
                    simd::transpose({Kt, T}, {K + j0 * ldK + c0, ldK}, cols, depth, a.scale);
                    for (int64_t i0 = 0; i0 < Nq; i0 += T) {
                        const int64_t rows = std::min(T, Nq - i0);
                        const Range seen = a.keys(head, i0, rows);
                        if (j0 >= seen.end || j0 + cols <= seen.first) continue;  // above the diagonal, say
                        float* Sij = S + i0 * Nk + j0;
                        const float* Qi = Q + i0 * ldQ + c0;
                        if (c0 == 0)
                            simd::multiply({Sij, Nk}, {Qi, ldQ, 1}, {Kt, T}, rows, cols, depth);
                        else
                            simd::multiply_add({Sij, Nk}, {Qi, ldQ, 1}, {Kt, T}, rows, cols, depth, depth);
                    }
                }
            }

            for (int64_t i = 0; i < Nq; i++) {
                const Range seen = a.keys(head, i);
                a.change_row(head, i, S + i * Nk + seen.first, seen);
                const float log_sum = softmax_row(S + i * Nk + seen.first, seen.count(), a.lowest(head));
                if (lse) lse[i] = log_sum;
                if (!a.rules) continue;
                const Range tile = a.keys(head, i / T * T, std::min(T, Nq - i / T * T));
                for (int64_t j = tile.first; j < tile.end; j++)
                    if (j < seen.first || j >= seen.end) S[i * Nk + j] = 0;
            }

            std::fill_n(O, Nq * d, 0.0f);
            for (int64_t i0 = 0; i0 < Nq; i0 += T) {
                const int64_t rows = std::min(T, Nq - i0);
                const Range some = a.keys(head, i0, rows);
                const int64_t all = a.rules ? some.end : a.seen(i0);  // with rules the others' weights are 0
                for (int64_t j0 = some.first; j0 < all; j0 += T) {
                    const int64_t keys = std::min(T, all - j0);
                    simd::multiply_add({O + i0 * d, d}, {S + i0 * Nk + j0, Nk, 1}, {V + j0 * ldV, ldV}, rows, d,
                                       keys, keys);
                }
                // Masked values are skipped, not multiplied by 0, so that NaN in them has no effect.
                for (int64_t i = i0; all < some.end && i < i0 + rows; i++)
                    simd::add_weighted_rows(O + i * d, S + i * Nk + all, {V + all * ldV, ldV}, a.seen(i) - all,
                                            d);
            }
        }
    }
}
