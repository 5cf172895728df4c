// What the model's layers compute and keep: norms, the three products of y = x W^T, and all scratch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "model/csrc/endless.h"
#include "model/csrc/linear.h"
#include "parts.h"
#include "simd/portable.h"
#include "simd/vectors/vectors.h"
#include "training_step.h"

namespace training {

// ---- LayerNorm without its weight, which the next packed matrix includes, and its backward pass, by rows ----

// The sum of term(i) over 0 .. n - 1, in independent sums that fill a vector.
template <class Term> inline float sum_of(int64_t n, const Term& term) {
    constexpr int64_t LANES = 16;
    float sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += term(i + lane);
    for (int64_t lane = 0; i < n; i++, lane++) sums[lane] += term(i);
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

// y <- (x - mean) / sqrt(variance + epsilon); returns 1 / that root.
inline float normalize(float* y, const float* x, int64_t n) {
    const float count = static_cast<float>(n);
    const float mean = sum_of(n, [x](int64_t i) { return x[i]; }) / count;
    const float variance = sum_of(n, [x, mean](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / count;
    const float factor = 1 / std::sqrt(variance + portable::LAYER_NORM_EPSILON);
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * factor;
    return factor;
}

// dx <- before + factor * (dy - mean(dy) - y * mean(dy * y)), with y and the factor of normalize().
inline void normalize_backward(float* dx, const float* before, const float* dy, const float* y, float factor,
                               int64_t n) {
    const float count = static_cast<float>(n);
    const float mean = sum_of(n, [dy](int64_t i) { return dy[i]; }) / count;
    const float along = sum_of(n, [dy, y](int64_t i) { return dy[i] * y[i]; }) / count;
    for (int64_t i = 0; i < n; i++)
        dx[i] = (before ? before[i] : 0.0f) + factor * (dy[i] - mean - y[i] * along);
}

// ---- products ----

// A tile of a weight's gradient has TILE rows and GROUP panels of columns. TOKENS: terms of a sum at a time,
// whose rows of X and dY stay in L1. Narrow panels share cache lines, so they take larger tiles.
constexpr bool NARROW = portable::W < 16;
constexpr int64_t TILE = NARROW ? 128 : 64, GROUP = NARROW ? 2 : 1, TOKENS = NARROW ? 64 : 128;

// y <- x W^T, or with `add` y <- y + x W^T; x (rows, in). Padding columns of y are set too.
inline void multiply(simd::Matrix y, simd::ConstMatrix x, const Linear& W, int64_t rows, bool add = false) {
    for (int64_t p = 0; p < W.panels(); p++) W.multiply(y, x, rows, p, add);
}

// W (out, in), its columns scaled by the norm's weight: LN(x) W^T = normalized(x) (W diag(scale))^T.
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

// The gradient of W from those of y: dW <- dY^T X diag(scale), a tile at a time, each over all tokens. That of
// the scale is the sum over the rows of W * (dY^T X), of which each row of tiles writes its part.
struct WeightGradient {
    simd::ConstMatrix dY, X;  // (rows, out), (rows, in)
    const Weight* w;

    static int64_t width() { return GROUP * portable::panel(); }
    int64_t columns() const { return (w->in() + width() - 1) / width(); }
    int64_t tiles() const { return w->row_tiles() * columns(); }
    static int64_t scratch() { return TILE * width(); }

    void compute(int64_t number, int64_t rows, float* tile) const {
        const int64_t P = width(), i = number / columns(), p = number % columns();
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

// ---- scratch: packed weights, activations, and each thread's own ----

constexpr int64_t MOST_BLOCK_ROWS = 128;  // rows of a block

// A head's causal attention, or its gradient, for the queries i0 .. i0 + n - 1 and the keys before i0 + n.
template <class Call> Call call_of(const Sizes& s, int64_t i0, int64_t n) {
    const float scale = 1 / std::sqrt(static_cast<float>(s.d()));
    return {{1, 1, n, i0 + n, s.d(), /* causal */ true, scale, std::min(s.Br, n), std::min(s.Bc, i0 + n), 1}};
}

// One thread's scratch: for a block of rows, a head, or a tile of a weight's gradient.
struct ThreadScratch {
    simd::Matrix g, d_normal;
    float *tile, *attention, *dq, *dk, *dv;

    ThreadScratch(const Sizes& s, Scratch& scratch) {
        int64_t most = flash_backward_scratch(call_of<AttentionGradient>(s, 0, s.T));
        for (const int64_t n : {std::min(s.Br, s.T), s.T % s.Br})
            if (n > 0) most = std::max(most, flash_scratch(call_of<Attention>(s, s.T - n, n)));
        g = scratch.matrix(MOST_BLOCK_ROWS, 4 * s.C);
        d_normal = scratch.matrix(MOST_BLOCK_ROWS, s.C);
        tile = scratch.take(WeightGradient::scratch());
        attention = scratch.take(most);
        for (float** each : {&dq, &dk, &dv}) *each = scratch.take(s.T * s.d());
    }
};

// LN(x) without its weight, a row per token, and the factors of normalize().
struct Normalized {
    simd::Matrix rows;
    float* factor;

    Normalized(const Sizes& s, Scratch& scratch)
        : rows(scratch.matrix(s.rows(), s.C)), factor(scratch.take(s.rows())) {}
};

// A layer's packed weights, and the activations that it keeps for its backward pass, a row per token. out and
// lse are the attention's, head by head; joined has out's heads in a row. h is GELU's input.
struct Layer {
    Weight w_qkv, w_projection, w_up, w_down;
    Normalized normal_1, normal_2;
    simd::Matrix qkv, joined, h;
    float *out, *lse;

    Layer(const Sizes& s, const Parameter* p, Scratch& scratch)
        : w_qkv(p + C_ATTN, p + LN_1, 3 * s.C, s.C, scratch),
          w_projection(p + ATTN_PROJ, nullptr, s.C, s.C, scratch),
          w_up(p + C_FC, p + LN_2, 4 * s.C, s.C, scratch),
          w_down(p + MLP_PROJ, nullptr, s.C, 4 * s.C, scratch),
          normal_1(s, scratch),
          normal_2(s, scratch),
          qkv(scratch.matrix(s.rows(), 3 * s.C)),
          joined(scratch.matrix(s.rows(), s.C)),
          h(scratch.matrix(s.rows(), 4 * s.C)),
          out(scratch.take(s.rows() * s.C)),
          lse(scratch.take(s.rows() * s.H)) {}
};

// What layers share: x is the residual stream, dx its gradient after a layer, dx_2 that between attention and
// MLP; w_head, normal and dlogits are the head's. dqkv: of two layers in turn.
struct Memory {
    Scratch scratch;
    Weight w_head;
    Normalized normal;
    simd::Matrix x, dlogits, dx, dx_2, djoined, dqkv[2], g, dh;
    float* losses;
    std::vector<Layer> layers;
    std::vector<ThreadScratch> threads;

    Memory(const Sizes& s, const std::vector<Parameter>& parameters, float* start)
        : scratch(start), w_head(&parameters[WTE], &parameters.back(), s.V, s.C, scratch), normal(s, scratch) {
        const int64_t M = s.rows();
        for (simd::Matrix* each : {&x, &dx, &dx_2, &djoined}) *each = scratch.matrix(M, s.C);
        dlogits = scratch.matrix(M, s.V);
        for (simd::Matrix& each : dqkv) each = scratch.matrix(M, 3 * s.C);
        g = scratch.matrix(M, 4 * s.C);
        dh = scratch.matrix(M, 4 * s.C);
        losses = scratch.take(M);
        for (int64_t l = 0; l < s.L; l++)
            layers.emplace_back(s, parameters.data() + FIRST_LAYER + l * OF_LAYER, scratch);
        for (int t = 0; t < s.threads; t++) threads.emplace_back(s, scratch);
    }

    std::vector<const Weight*> weights() const {
        std::vector<const Weight*> all{&w_head};
        for (const Layer& each : layers)
            for (const Weight* w : {&each.w_qkv, &each.w_projection, &each.w_up, &each.w_down})
                all.push_back(w);
        return all;
    }
};

}  // namespace training
