// Part 3, fused: one row of scores at a time, through softmax and the product with V before the next.
//
//   for each batch, head, query i, over all threads:
//       S[j] <- scale * Q[i] . K[j]        for the keys that i sees
//       S    <- exp(S - max(S)), l <- sum(S)
//       O[i] <- S V / l
//
// Scratch: threads x Nk floats. What it improves: part 2's matrix of scores, passed over three times, becomes
// a row in L1, and all threads work. What it gives up: K and V are read once per query instead of once per
// tile. exp and the product with V alternate, so that V is loaded during exp.
#include <algorithm>

#include "attention.h"
#include "cpu/softmax.h"
#include "simd/simd.h"
#include "threads.h"

namespace {

constexpr int64_t QUERIES = 16;  // queries handed to a thread at a time
constexpr int64_t KEYS = 96;     // scores per turn of exp and of the product with V

}  // namespace

int64_t fused_scratch(const Attention& a) { return a.threads * /* S, one row */ a.Nk; }

void fused_attention(const Attention& a, float* scratch) {
    const int64_t Nq = a.Nq, d = a.d;
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;
    const int64_t groups = (Nq + QUERIES - 1) / QUERIES;

    for_each_item(a.B * a.H, groups, a.threads, a.pool, [&](int64_t head, int64_t item, int thread) {
        const int64_t b = head / a.H, h = head % a.H;
        const int64_t i0 = (groups - 1 - item) * QUERIES;  // causal: the longest rows first
        const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h);
        float *O = a.out_at(b, h), *lse = a.lse_at(b, h), *S = scratch + thread * a.Nk;

        for (int64_t i = i0; i < std::min(i0 + QUERIES, Nq); i++) {
            const Range seen = a.keys(head, i);
            const int64_t n = seen.count();
            simd::dot_rows(S, Q + i * ldQ, {K + seen.first * ldK, ldK}, n, d, a.scale);
            a.change_row(head, i, S, seen);

            const float m = simd::row_max(S, n, a.lowest(head));
            float l = sink_weight(a.lowest(head), m);
            std::fill_n(O + i * d, d, 0.0f);
            for (int64_t j = 0; j < n; j += KEYS) {
                const int64_t keys = std::min(KEYS, n - j);
                l += simd::exp_sum(S + j, keys, finite_max(m));
                simd::add_weighted_rows(O + i * d, S + j, {V + (seen.first + j) * ldV, ldV}, keys, d);
            }
            const Normalized end(m, l);
            simd::scale_row(O + i * d, d, end.factor);
            if (lse) lse[i] = end.lse;
        }
    });
}
