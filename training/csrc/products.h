// The three products of a linear layer y = x W^T, with W packed in panels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "round_up.h"
#include "simd/portable.h"

namespace training {

constexpr int64_t LINE = 16;     // floats of a cache line
constexpr int64_t DEPTH = 256;   // terms of a sum at a time: half a panel of this many rows stays in L1
constexpr int64_t TOKENS = 128;  // the same where the left operand is transposed, with a whole panel
constexpr int64_t TILE = 64;     // rows of a tile of a weight's gradient

// The stride of rows of n floats: an odd number of cache lines. With a power of two the rows would share few
// sets of L1.
constexpr int64_t distance(int64_t n) { return round_up(n, LINE) | LINE; }

inline int64_t panels_of(int64_t n) { return (n + portable::panel() - 1) / portable::panel(); }

// Columns of panel p of n: whole vectors, the last ones padded with zeros.
inline int64_t columns_of(int64_t n, int64_t p) {
    return std::min(portable::panel(), round_up(n - p * portable::panel(), portable::lanes()));
}

// W (out, in), its columns scaled by `scale` (in) or null. The scale is the weight of the norm before the
// layer, so that activations are kept once: LN(x) W^T = normalized(x) (W diag(scale))^T.
struct Layer {
    const float *W, *scale;
    int64_t out, in;
    float *forward, *backward;  // panels of (W diag(scale))^T, (in, panel); of W diag(scale), (out, panel)

    int64_t forward_floats() const { return panels_of(out) * portable::panel() * in; }
    int64_t backward_floats() const { return panels_of(in) * portable::panel() * out; }
    int64_t pieces() const { return panels_of(out) + panels_of(in); }

    // Packs one of pieces().
    void pack(int64_t piece) const {
        const int64_t P = portable::panel();
        if (piece < panels_of(out)) {
            float* const to = forward + piece * P * in;
            const int64_t rows = std::min(P, out - piece * P), padded = columns_of(out, piece);
            portable::transpose({to, P}, {W + piece * P * in, in}, rows, in, 1.0f);
            for (int64_t k = 0; k < in; k++) {
                if (scale) portable::scale_row(to + k * P, rows, scale[k]);
                std::fill(to + k * P + rows, to + k * P + padded, 0.0f);
            }
            return;
        }
        const int64_t p = piece - panels_of(out), cols = std::min(P, in - p * P), padded = columns_of(in, p);
        float* const to = backward + p * P * out;
        const float* const factor = scale ? scale + p * P : nullptr;
        for (int64_t j = 0; j < out; j++) {
            const float* const from = W + j * in + p * P;
            for (int64_t c = 0; c < cols; c++) to[j * P + c] = factor ? from[c] * factor[c] : from[c];
            std::fill(to + j * P + cols, to + j * P + padded, 0.0f);
        }
    }
};

// y <- x B or y <- y + x B in the columns of panel p; x (rows, depth), the panel (depth, panel). Padding
// columns of y are set too.
inline void multiply_panel(simd::Matrix y, simd::ConstMatrix x, const float* panels, int64_t rows, int64_t cols,
                           int64_t depth, int64_t p, bool add) {
    const int64_t P = portable::panel(), width = columns_of(cols, p);
    const float* const panel = panels + p * P * depth;
    for (int64_t k = 0; k < depth; k += DEPTH) {
        const int64_t some = std::min(DEPTH, depth - k);
        const simd::Matrix to{y.data + p * P, y.ld};
        if (k == 0 && !add)
            portable::multiply(to, {x.data + k, x.ld, 1}, {panel + k * P, P}, rows, width, some);
        else
            portable::multiply_add(to, {x.data + k, x.ld, 1}, {panel + k * P, P}, rows, width, some, some);
    }
}

// The same for all panels.
inline void multiply_panels(simd::Matrix y, simd::ConstMatrix x, const float* panels, int64_t rows,
                            int64_t cols, int64_t depth, bool add) {
    for (int64_t p = 0; p < panels_of(cols); p++) multiply_panel(y, x, panels, rows, cols, depth, p, add);
}

// The gradient of a layer's W from those of y: dW <- dY^T X diag(scale), a tile at a time, each over all
// tokens. The scale's gradient is the sum over the rows of W * (dY^T X), so it needs no pass over the tokens;
// each row of tiles writes its partial sum.
struct WeightGradient {
    simd::ConstMatrix dY, X;  // (rows, out), (rows, in)
    const Layer* layer;
    float *dW, *dscale;  // (out, in); (tiles of rows, in), or null without a scale

    static int64_t row_tiles(int64_t out) { return (out + TILE - 1) / TILE; }
    int64_t pieces() const { return row_tiles(layer->out) * panels_of(layer->in); }
    static int64_t scratch() { return TILE * portable::panel(); }

    void compute(int64_t piece, int64_t rows, float* tile) const {
        const int64_t P = portable::panel(), i = piece / panels_of(layer->in), p = piece % panels_of(layer->in);
        const int64_t in = layer->in, out = std::min(TILE, layer->out - i * TILE),
                      cols = std::min(P, in - p * P);
        for (int64_t t = 0; t < rows; t += TOKENS) {
            const int64_t some = std::min(TOKENS, rows - t);
            const simd::Strided A{dY.data + t * dY.ld + i * TILE, 1, dY.ld};
            const simd::ConstMatrix B{X.data + t * X.ld + p * P, X.ld};
            if (t == 0)
                portable::multiply({tile, P}, A, B, out, cols, some);
            else
                portable::multiply_add({tile, P}, A, B, out, cols, some, some);
        }
        const float* const scale = layer->scale ? layer->scale + p * P : nullptr;
        float* const part = dscale ? dscale + i * in + p * P : nullptr;
        if (part) std::fill_n(part, cols, 0.0f);
        for (int64_t r = 0; r < out; r++) {
            const int64_t at = (i * TILE + r) * in + p * P;
            const float *const from = tile + r * P, *const W = layer->W + at;
            float* const to = dW + at;
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
