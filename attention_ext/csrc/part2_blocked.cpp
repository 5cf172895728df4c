// Part 2, blocked: part 1's three passes, with both products cut into tiles that stay in cache.
//
//   for each batch, head:
//       for tiles (i0, j0):  S[i0..][j0..] <- scale * Q[i0..] K[j0..]^T
//       for i:               S[i] <- softmax(S[i])
//       for tiles (i0, j0):  O[i0..] <- O[i0..] + S[i0..][j0..] V[j0..]
//
// Scratch: Nq x Nk floats, as part 1. Threads: 1. What it improves: a tile of T x T scores reads T rows
// of Q and T rows of K, 2 T d floats that fit L1, and uses each T times; so K and V come from beyond L1
// Nq / T times instead of Nq times, and V is read along its rows, every cache line whole.
#include <cmath>

#include "attention.h"
#include "simd.h"

namespace {

constexpr int64_t T = 32;  // tile edge: two cache lines of floats; 2 T d floats are 8 KB at d = 32

}  // namespace

int64_t blocked_scratch(const Attention& a) { return /* S */ a.Nq * a.Nk; }

void blocked_attention(const Attention& a, float* S) {
    const int64_t Nq = a.Nq, Nk = a.Nk, d = a.d;
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;

    for (int64_t b = 0; b < a.B; b++) {
        for (int64_t h = 0; h < a.H; h++) {
            const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h);
            float *O = a.out_at(b, h), *lse = a.lse_at(b, h);

            for (int64_t i0 = 0; i0 < Nq; i0 += T) {
                const int64_t rows = std::min(T, Nq - i0);
                const int64_t keys = a.visible(i0 + rows - 1);  // tiles above the diagonal are skipped
                for (int64_t j0 = 0; j0 < keys; j0 += T) {
                    const int64_t cols = std::min(T, keys - j0);
                    simd::multiply_transposed(S + i0 * Nk + j0, Nk, Q + i0 * ldQ, ldQ, K + j0 * ldK, ldK, rows,
                                              cols, d, a.scale);
                }
            }

            for (int64_t i = 0; i < Nq; i++) {
                float* row = S + i * Nk;
                const int64_t n = a.visible(i);
                const float m = simd::row_max(row, n, -std::numeric_limits<float>::infinity());
                const float l = simd::exp_sum(row, n, finite_max(m));
                simd::scale_row(row, n, 1 / l);
                if (lse) lse[i] = m + std::log(l);
            }

            std::fill_n(O, Nq * d, 0.0f);
            for (int64_t i0 = 0; i0 < Nq; i0 += T) {
                const int64_t rows = std::min(T, Nq - i0);
                const int64_t keys = a.visible(i0 + rows - 1);
                for (int64_t j0 = 0; j0 < keys; j0 += T) {
                    const int64_t cols = std::min(T, keys - j0);
                    add_visible(a, i0, rows, j0, cols, O + i0 * d, S + i0 * Nk + j0, Nk, V + j0 * ldV);
                }
            }
        }
    }
}
