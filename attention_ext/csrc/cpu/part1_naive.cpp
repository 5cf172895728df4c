// Part 1, naive: S = scale Q K^T, P = softmax(S), O = P V as three plain passes per head.
//
//   for each batch, head:
//       for i, j, c:  S[i][j] += Q[i][c] * K[j][c]      Nq x Nk x d
//       for i:        S[i] <- softmax(S[i])
//       for i, c, j:  O[i][c] += S[i][j] * V[j][c]      V is walked down its columns
//
// Scratch: Nq x Nk floats, reused by every head. Threads: 1. Only the row softmax uses the SIMD helpers.
#include "attention.h"
#include "cpu/softmax.h"

int64_t naive_scratch(const Attention& a) { return /* S */ a.Nq * a.Nk; }

void naive_attention(const Attention& a, float* S) {
    const int64_t Nq = a.Nq, Nk = a.Nk, d = a.d;
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;

    for (int64_t b = 0; b < a.B; b++) {
        for (int64_t h = 0; h < a.H; h++) {
            const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h);
            float *O = a.out_at(b, h), *lse = a.lse_at(b, h);
            const int64_t head = b * a.H + h;

            for (int64_t i = 0; i < Nq; i++) {
                const Range seen = a.keys(head, i);
                for (int64_t j = seen.first; j < seen.end; j++) {
                    float s = 0;
                    for (int64_t c = 0; c < d; c++) s += Q[i * ldQ + c] * K[j * ldK + c];
                    S[i * Nk + j] = a.scale * s;
                }
                a.change_row(head, i, S + i * Nk + seen.first, seen);
            }

            for (int64_t i = 0; i < Nq; i++) {
                const Range seen = a.keys(head, i);
                const float log_sum = softmax_row(S + i * Nk + seen.first, seen.count(), a.lowest(head));
                if (lse) lse[i] = log_sum;
            }

            for (int64_t i = 0; i < Nq; i++) {
                const Range seen = a.keys(head, i);
                for (int64_t c = 0; c < d; c++) {
                    float o = 0;
                    for (int64_t j = seen.first; j < seen.end; j++) o += S[i * Nk + j] * V[j * ldV + c];
                    O[i * d + c] = o;
                }
            }
        }
    }
}
