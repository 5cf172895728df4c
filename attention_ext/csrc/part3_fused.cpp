// Part 3, fused: one row of scores at a time, scored, normalised and multiplied by V before the next.
//
//   for each batch, head, query i, over all threads:
//       S[j] <- scale * Q[i] . K[j]        for the keys that i sees
//       S    <- softmax(S)
//       O[i] <- S V
//
// Scratch: threads x Nk floats. What it improves: the N x N matrix of scores, written and read three
// times in part 2, becomes a row that stays in L1, and the rows are independent, so all threads work.
// What it gives up: K and V are read once per query instead of once per tile of queries.
#include "attention.h"

namespace {

constexpr int64_t kRows = 16;  // queries handed to a thread at a time

}  // namespace

int64_t fused_scratch(const Attention& a) { return a.threads * /* S, one row */ a.Nk; }

void fused_attention(const Attention& a, float* scratch) {
    const int64_t Nq = a.Nq, d = a.d;
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;
    const int64_t groups = (Nq + kRows - 1) / kRows;

    for_each_item(a.B * a.H * groups, a.threads, [&](int64_t item, int thread) {
        const int64_t b = item / groups / a.H, h = item / groups % a.H;
        const int64_t i0 = (groups - 1 - item % groups) * kRows;  // causal: the longest rows first
        const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h);
        float *O = a.out_at(b, h), *lse = a.lse_at(b, h), *S = scratch + thread * a.Nk;

        for (int64_t i = i0; i < std::min(i0 + kRows, Nq); i++) {
            const int64_t n = a.visible(i);
            simd::dot_rows(S, Q + i * ldQ, K, ldK, n, d, a.scale);

            const float log_sum = softmax_row(S, n);
            if (lse) lse[i] = log_sum;

            std::fill_n(O + i * d, d, 0.0f);
            simd::add_weighted_rows(O + i * d, S, V, ldV, n, d);
        }
    });
}
