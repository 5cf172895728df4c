// Part 4, flash: Br x Bc tiles with an online softmax, so that no row of scores is ever whole.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1; the line numbers below are its own.
//
//   for each batch, head, tile i of Br queries, over all threads:          lines 3-5
//       O, l, m <- 0, 0, -inf
//       for each tile j of Bc keys:                                        line 6
//           S   <- scale * Qi Kj^T                                         line 8
//           m', P, l as below, O <- diag(exp(m - m')) O + P Vj             lines 9-10
//       O <- diag(1 / l) O;  lse <- m + log(l)                             lines 12-13
//
// Scratch: threads x (Br Bc + 2 Br) floats, whatever N is; Oi is accumulated in the output. What it
// improves: part 3 reads K and V once per query, this once per Br queries, and the tile of scores that
// part 2 keeps in memory never leaves the cache.
#include <cmath>

#include "attention.h"

int64_t flash_scratch(const Attention& a) { return a.threads * (/* Sij */ a.Br * a.Bc + /* m, l */ 2 * a.Br); }

void flash_attention(const Attention& a, float* scratch) {
    const int64_t Nq = a.Nq, d = a.d, Br = a.Br, Bc = a.Bc;
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;
    const int64_t Tr = (Nq + Br - 1) / Br;

    for_each_item(a.B * a.H * Tr, a.threads, [&](int64_t item, int thread) {
        const int64_t b = item / Tr / a.H, h = item / Tr % a.H;
        const int64_t i0 = (Tr - 1 - item % Tr) * Br;  // causal: the longest tiles first
        const int64_t rows = std::min(Br, Nq - i0);
        const int64_t keys = a.visible(i0 + rows - 1);  // tiles above the diagonal are skipped

        const float *Qi = a.q.at(b, h) + i0 * ldQ, *K = a.k.at(b, h), *V = a.v.at(b, h);
        float *Oi = a.out_at(b, h) + i0 * d, *lse = a.lse_at(b, h);
        float* Sij = scratch + thread * (Br * Bc + 2 * Br);
        float *m = Sij + Br * Bc, *l = m + Br;

        std::fill_n(Oi, rows * d, 0.0f);
        std::fill_n(m, rows, -std::numeric_limits<float>::infinity());
        std::fill_n(l, rows, 0.0f);

        for (int64_t j0 = 0; j0 < keys; j0 += Bc) {
            const int64_t cols = std::min(Bc, keys - j0);
            const float *Kj = K + j0 * ldK, *Vj = V + j0 * ldV;

            // S <- scale * Qi Kj^T
            simd::multiply_transposed(Sij, Bc, Qi, ldQ, Kj, ldK, rows, cols, d, a.scale);

            for (int64_t r = 0; r < rows; r++) {
                const int64_t n = std::min(cols, a.visible(i0 + r) - j0);
                if (n <= 0) continue;
                float* Pij = Sij + r * Bc;
                // m_new <- max(m, rowmax(S)), P <- exp(S - m_new)
                const float m_new = simd::row_max(Pij, n, m[r]);
                const float sum = simd::exp_sum(Pij, n, finite_max(m_new));
                // l <- exp(m - m_new) * l + rowsum(P), O <- exp(m - m_new) * O
                const float correction = std::exp(m[r] - finite_max(m_new));
                l[r] = correction * l[r] + sum;
                if (correction != 1) simd::scale_row(Oi + r * d, d, correction);
                m[r] = m_new;
            }

            // O <- O + P Vj
            add_visible(a, i0, rows, j0, cols, Oi, Sij, Bc, Vj);
        }

        for (int64_t r = 0; r < rows; r++) {
            simd::scale_row(Oi + r * d, d, 1 / l[r]);
            if (lse) lse[i0 + r] = m[r] + std::log(l[r]);
        }
    });
}
