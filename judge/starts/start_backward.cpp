// The backward pass of an attention of your own: the gradients of q, k and v, from that of the output.
//
//   P = exp(scale * q k^T - lse)    dS = scale * P * (dout v^T - D), D = rowsum(dout * out)
//   dq = dS k                       dk = dS^T q                      dv = P^T dout
//
// The loop nest, a query at a time, so that neither P nor dS is stored; at the right multiply-adds:
//
//     for each batch b, head h, query i:
//         D <- sum over c of dO[i][c] * O[i][c]
//         for j:     P    <- exp(scale * sum over c of Q[i][c] * K[j][c] - lse[i])     Nq x Nk x d
//                    dP   <- sum over c of dO[i][c] * V[j][c]                          as many, and so are
//                    dS   <- scale * P * (dP - D)
//             for c: dV[j][c] += P * dO[i][c],  dQ[i][c] += dS * K[j][c],  dK[j][c] += dS * Q[i][c]
//
// The gradients hold other numbers at first. dK and dV are sums over the queries: threads that share a head add
// to the same rows. attention.h says what a call holds; a.dlse is null here.
#include "attention.h"

#include <algorithm>
#include <cmath>

// The floats of scratch that a call needs. Without this function there are none.
int64_t backward_scratch(const AttentionGradient&) { return 0; }

void attention_backward(const AttentionGradient& a, float*) {
    const int64_t Nq = a.Nq, Nk = a.Nk, d = a.d;
    // From one row to the next: in the model, Q, K and V lie beside each other. A row's floats are neighbours.
    const int64_t ldQ = a.q.row_stride, ldK = a.k.row_stride, ldV = a.v.row_stride, lddO = a.dout.row_stride;

    for (int64_t b = 0; b < a.B; b++) {
        for (int64_t h = 0; h < a.H; h++) {
            const float *Q = a.q.at(b, h), *K = a.k.at(b, h), *V = a.v.at(b, h), *dO = a.dout.at(b, h);
            const int64_t head = b * a.H + h;  // the rows of the others follow each other
            const float *O = a.out + head * Nq * d, *lse = a.lse + head * Nq;
            float *dQ = a.dq + head * Nq * d, *dK = a.dk + head * Nk * d, *dV = a.dv + head * Nk * d;
            std::fill_n(dQ, Nq * d, 0.0f);
            std::fill_n(dK, Nk * d, 0.0f);
            std::fill_n(dV, Nk * d, 0.0f);

            for (int64_t i = 0; i < Nq; i++) {
                // What the sum of a row's weights, which is 1, takes from each of its gradients.
                float D = 0;
                for (int64_t c = 0; c < d; c++) D += dO[i * lddO + c] * O[i * d + c];

                const int64_t n = a.seen(i);  // query i sees the keys 0 .. n - 1
                for (int64_t j = 0; j < n; j++) {
                    // The weight again, and its gradient.
                    float s = 0, dP = 0;
                    for (int64_t c = 0; c < d; c++) s += Q[i * ldQ + c] * K[j * ldK + c];
                    for (int64_t c = 0; c < d; c++) dP += dO[i * lddO + c] * V[j * ldV + c];
                    const float P = std::exp(a.scale * s - lse[i]);
                    const float dS = a.scale * P * (dP - D);

                    // The three sums. Neighbours in c lie beside each other: all lanes of a vector work.
                    for (int64_t c = 0; c < d; c++) dV[j * d + c] += P * dO[i * lddO + c];
                    for (int64_t c = 0; c < d; c++) dQ[i * d + c] += dS * K[j * ldK + c];
                    for (int64_t c = 0; c < d; c++) dK[j * d + c] += dS * Q[i * ldQ + c];
                }
            }
        }
    }
}
