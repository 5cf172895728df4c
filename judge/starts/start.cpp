// Attention of your own: out = softmax(scale * q k^T) v for each batch and head.
//
// The loop nest, that of the textbook:
//
//     for each batch b, head h:
//         for i, j, c:  S[i][j] += Q[i][c] * K[j][c]      Nq x Nk x d multiply-adds
//         for i:        S[i] <- softmax(S[i])
//         for i, c, j:  O[i][c] += S[i][j] * V[j][c]      as many
//
// attention.h says what a call holds. "simd/simd.h" has products that use all lanes, "cpu/softmax.h" the
// softmax of a row, and "threads.h" for_each_item(), which divides work among a.threads threads.
#include "attention.h"

#include <algorithm>
#include <cmath>

// The floats of scratch that a call needs: S. They are not 0 at first. Without this function there are none.
int64_t scratch(const Attention& a) { return a.Nq * a.Nk; }

void attention(const Attention& a, float* S) {
    const int64_t Nq = a.Nq, Nk = a.Nk, d = a.d;
    // From one row to the next: in the model, Q, K and V lie beside each other. A row's floats are neighbours.
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride;

    for (int64_t b = 0; b < a.B; b++) {
        for (int64_t h = 0; h < a.H; h++) {
            const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h);
            float* O = a.out_at(b, h);  // (Nq, d), its rows follow each other

            // S = scale * Q K^T. Each query reads all of K.
            for (int64_t i = 0; i < Nq; i++) {
                const int64_t n = a.seen(i);  // query i sees the keys 0 .. n - 1
                for (int64_t j = 0; j < n; j++) {
                    float s = 0;
                    for (int64_t c = 0; c < d; c++) s += Q[i * ldQ + c] * K[j * ldK + c];
                    S[i * Nk + j] = a.scale * s;
                }
            }

            // Each row <- softmax(row). Its maximum is subtracted, because exp(89) is beyond a float.
            for (int64_t i = 0; i < Nq; i++) {
                const int64_t n = a.seen(i);
                float m = S[i * Nk];
                for (int64_t j = 1; j < n; j++) m = std::max(m, S[i * Nk + j]);
                float l = 0;
                for (int64_t j = 0; j < n; j++) {
                    S[i * Nk + j] = std::exp(S[i * Nk + j] - m);
                    l += S[i * Nk + j];
                }
                for (int64_t j = 0; j < n; j++) S[i * Nk + j] /= l;
            }

            // O = P V. The sum for a number of O goes down a column of V.
            for (int64_t i = 0; i < Nq; i++) {
                const int64_t n = a.seen(i);
                for (int64_t c = 0; c < d; c++) {
                    float o = 0;
                    for (int64_t j = 0; j < n; j++) o += S[i * Nk + j] * V[j * ldV + c];
                    O[i * d + c] = o;
                }
            }
        }
    }
}
