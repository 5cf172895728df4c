// All scratch of a step: packed weights, activations, and each thread's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "gradient.h"
#include "model.h"
#include "parts.h"
#include "products.h"

namespace training {

constexpr int64_t MOST_ROWS = 128;            // rows of a block
constexpr int64_t QUERIES = 192, KEYS = 256;  // an attention tile, part 4's default

// A head's attention for the queries i0 .. i0 + n - 1, which see the keys before i0 + n.
inline Attention attention_call(const Sizes& s, int64_t i0, int64_t n) {
    Attention a{};
    a.B = 1, a.H = 1, a.Nq = n, a.Nk = i0 + n, a.d = s.d();
    a.causal = true, a.scale = 1 / std::sqrt(static_cast<float>(s.d()));
    a.Br = std::min(QUERIES, a.Nq), a.Bc = std::min(KEYS, a.Nk), a.threads = 1;
    return a;
}

inline AttentionGradient gradient_call(const Sizes& s) {
    AttentionGradient a{};
    a.B = 1, a.H = 1, a.Nq = s.T, a.Nk = s.T, a.d = s.d();
    a.causal = true, a.scale = 1 / std::sqrt(static_cast<float>(s.d())), a.threads = 1;
    return a;
}

// One thread's scratch: for a block of rows, a head, or a tile of a weight's gradient.
struct ThreadScratch {
    simd::Matrix g, d_normal;
    float *tile, *attention, *dq, *dk, *dv;

    ThreadScratch(const Sizes& s, Space& space) {
        const int64_t last = s.T % QUERIES;
        int64_t most = flash_backward_scratch(gradient_call(s));
        for (const int64_t n : {std::min(QUERIES, s.T), last})
            if (n > 0) most = std::max(most, flash_scratch(attention_call(s, s.T - n, n)));
        g = space.matrix(MOST_ROWS, 4 * s.C), d_normal = space.matrix(MOST_ROWS, s.C);
        tile = space.take(WeightGradient::scratch()), attention = space.take(most);
        dq = space.take(s.T * s.d()), dk = space.take(s.T * s.d()), dv = space.take(s.T * s.d());
    }
};

// A layer's packed matrices, and the partial sums of its norms' gradients, one for each row of tiles of dW.
struct PackedLayer {
    Layer qkv, projection, up, down;
    float *dscale_1, *dscale_2;
};

inline Layer packed(const float* W, const float* scale, int64_t out, int64_t in, Space& space) {
    Layer layer{W, scale, out, in, nullptr, nullptr};
    layer.forward = space.take(layer.forward_floats());
    layer.backward = space.take(layer.backward_floats());
    return layer;
}

struct PackedModel {
    std::vector<PackedLayer> layers;
    Layer head;
    float* dscale_head;

    PackedModel(const Sizes& s, const ModelOf<const float>& model, Space& space) {
        const int64_t C = s.C;
        for (const LayerOf<const float>& w : model.layers) {
            PackedLayer p{};
            p.qkv = packed(w.c_attn, w.ln_1, 3 * C, C, space);
            p.projection = packed(w.attn_proj, nullptr, C, C, space);
            p.up = packed(w.c_fc, w.ln_2, 4 * C, C, space);
            p.down = packed(w.mlp_proj, nullptr, C, 4 * C, space);
            p.dscale_1 = space.take(WeightGradient::row_tiles(3 * C) * C);
            p.dscale_2 = space.take(WeightGradient::row_tiles(4 * C) * C);
            layers.push_back(p);
        }
        head = packed(model.wte, model.ln_f, s.V, C, space);
        dscale_head = space.take(WeightGradient::row_tiles(s.V) * C);
    }

    std::vector<const Layer*> all() const {
        std::vector<const Layer*> each{&head};
        for (const PackedLayer& p : layers)
            for (const Layer* layer : {&p.qkv, &p.projection, &p.up, &p.down}) each.push_back(layer);
        return each;
    }
};

// All scratch of a step.
struct Memory {
    Space space;
    PackedModel packed;
    SharedActivations shared;
    std::vector<LayerActivations> layers;
    std::vector<ThreadScratch> threads;

    Memory(const Sizes& s, const ModelOf<const float>& model, float* start)
        : space(start), packed(s, model, space), shared(s, space) {
        for (int64_t l = 0; l < s.L; l++) layers.emplace_back(s, space);
        for (int t = 0; t < s.threads; t++) threads.emplace_back(s, space);
    }
};

}  // namespace training
