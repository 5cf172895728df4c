// The three products of a linear layer y = x W^T.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model/csrc/linear.h"
#include "scratch.h"
#include "simd/portable.h"
#include "training_step.h"

namespace training {

constexpr int64_t TOKENS = 128;  // terms of a sum at a time: this many rows of a panel stay in L1
constexpr int64_t TILE = 64;     // rows of a tile of a weight's gradient

// C <- A B, with `some` terms of each sum at a time; A (rows, depth), B (depth, cols).
inline void multiply_some(simd::Matrix C, const simd::Strided& A, simd::ConstMatrix B, int64_t rows,
                          int64_t cols, int64_t depth, int64_t some) {
    for (int64_t k = 0; k < depth; k += some) {
        const simd::Strided a{A.data + k * A.depth_stride, A.row_stride, A.depth_stride};
        const simd::ConstMatrix b{B.data + k * B.ld, B.ld};
        const int64_t terms = std::min(some, depth - k);
        if (k == 0)
            portable::multiply(C, a, b, rows, cols, terms);
        else
            portable::multiply_add(C, a, b, rows, cols, terms, terms);
    }
}

// y <- x W^T, or with `add` y <- y + x W^T; x (rows, in). Padding columns of y are set too.
inline void multiply(simd::Matrix y, simd::ConstMatrix x, const Linear& W, int64_t rows, bool add = false) {
    for (int64_t p = 0; p < W.panels(); p++) add ? W.add(y, x, rows, p) : W.set(y, x, rows, p);
}

// W (out, in), its columns scaled by the weight of the norm before it, so that activations are kept once:
// LN(x) W^T = normalized(x) (W diag(scale))^T.
struct Weight {
    const Parameter *matrix, *norm;  // norm: null if none is before it
    Linear forward, backward;        // W diag(scale), and its transpose
    float* dscale;                   // (tiles of rows, in): partial sums of the norm's gradient

    Weight(const Parameter* matrix, const Parameter* norm, int64_t out, int64_t in, Scratch& scratch)
        : matrix(matrix),
          norm(norm),
          forward(linear(out, in, scratch)),
          backward(linear(in, out, scratch)),
          dscale(norm ? scratch.take(row_tiles() * in) : nullptr) {}

    int64_t out() const { return forward.outputs(); }
    int64_t in() const { return backward.outputs(); }
    int64_t row_tiles() const { return (out() + TILE - 1) / TILE; }

    int64_t panels() const { return forward.panels() + backward.panels(); }
    void pack(int64_t panel) const {
        const float* const scale = norm ? norm->value : nullptr;
        const int64_t p = panel - forward.panels();
        p < 0 ? forward.pack(panel, matrix->value, scale, false) : backward.pack(p, matrix->value, scale, true);
    }

  private:
    static Linear linear(int64_t out, int64_t in, Scratch& scratch) {
        const Panels shape{out, in, portable::panel()};
        return {shape, scratch.take(shape.size())};
    }
};

// The gradient of W from those of y: dW <- dY^T X diag(scale), a tile at a time, each over all tokens. The
// scale's gradient is the sum over the rows of W * (dY^T X), so it needs no pass over the tokens; each row of
// tiles writes its partial sum.
struct WeightGradient {
    simd::ConstMatrix dY, X;  // (rows, out), (rows, in)
    const Weight* w;

    int64_t tiles() const { return w->row_tiles() * w->backward.panels(); }
    static int64_t scratch() { return TILE * portable::panel(); }

    void compute(int64_t number, int64_t rows, float* tile) const {
        const int64_t P = portable::panel(), i = number / w->backward.panels(),
                      p = number % w->backward.panels();
        const int64_t in = w->in(), out = std::min(TILE, w->out() - i * TILE), cols = std::min(P, in - p * P);
        multiply_some({tile, P}, {dY.data + i * TILE, 1, dY.ld}, {X.data + p * P, X.ld}, out, cols, rows,
                      TOKENS);
        const float* const scale = w->norm ? w->norm->value + p * P : nullptr;
        float* const part = scale ? w->dscale + i * in + p * P : nullptr;
        if (part) std::fill_n(part, cols, 0.0f);
        for (int64_t r = 0; r < out; r++) {
            const int64_t at = (i * TILE + r) * in + p * P;
            const float *const from = tile + r * P, *const W = w->matrix->value + at;
            float* const to = w->matrix->gradient + at;
            if (!scale) {
                std::copy_n(from, cols, to);
                continue;
            }
            for (int64_t c = 0; c < cols; c++) to[c] = from[c] * scale[c];
            for (int64_t c = 0; c < cols; c++) part[c] += from[c] * W[c];
        }
    }
};

}  // namespace training
