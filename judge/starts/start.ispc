// Attention of your own in ISPC: out = softmax(scale * q k^T) v for each batch and head.
//
// The loop nest is the textbook's, one query at a time: its scores, their softmax, its output. The lanes of a
// vector are keys in the scores, so each lane gathers a row of K of its own, and columns in the output, which
// are neighbours. attention.isph says what a call holds.
#include "attention.isph"

// The floats of scratch that a call needs: a row of S. Without this function there are none.
export uniform int64 scratch(const uniform Attention& a) { return a.Nk; }

export void attention(const uniform Attention& a, uniform float S[]) {
    for (uniform int64 b = 0; b < a.B; b++) {
        for (uniform int64 h = 0; h < a.H; h++) {
            for (uniform int64 i = 0; i < a.Nq; i++) {
                const uniform float* uniform q = a.q + b * a.q_batch + h * a.q_head + i * a.q_row;
                const uniform float* uniform K = a.k + b * a.k_batch + h * a.k_head;
                const uniform float* uniform V = a.v + b * a.v_batch + h * a.v_head;
                uniform float* uniform O = a.out + ((b * a.H + h) * a.Nq + i) * a.d;
                const uniform int64 n = seen(a, i);

                // S = scale * Q K^T, and its maximum
                float largest = -3e38f;
                foreach (j = 0 ... n) {
                    float s = 0;
                    for (uniform int64 c = 0; c < a.d; c++) s += q[c] * K[j * a.k_row + c];
                    S[j] = a.scale * s;
                    largest = max(largest, S[j]);
                }
                const uniform float m = reduce_max(largest);

                // the weights, not yet divided by their sum l
                float sum = 0;
                foreach (j = 0 ... n) {
                    S[j] = exp(S[j] - m);
                    sum += S[j];
                }
                const uniform float l = reduce_add(sum);

                // O = P V, divided by l
                foreach (c = 0 ... a.d) {
                    float o = 0;
                    for (uniform int64 j = 0; j < n; j++) o += S[j] * V[j * a.v_row + c];
                    O[c] = o / l;
                }
            }
        }
    }
}
