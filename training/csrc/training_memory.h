// All scratch of the gradients: packed weights, activations, and each thread's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "gradient.h"
#include "parts.h"
#include "products.h"
#include "scratch.h"
#include "training_step.h"

namespace training {

constexpr int64_t MOST_ROWS = 128;  // rows of a block

// A head's causal attention, or its gradient, for the queries i0 .. i0 + n - 1 and the keys before i0 + n.
template <class Call>
Call call_of(const Sizes& s, int64_t i0, int64_t n) {
    Call a{};
    a.B = 1, a.H = 1, a.Nq = n, a.Nk = i0 + n, a.d = s.d(), a.threads = 1;
    a.causal = true, a.scale = 1 / std::sqrt(static_cast<float>(s.d()));
    if constexpr (std::is_same_v<Call, Attention>) a.Br = std::min(s.Br, a.Nq), a.Bc = std::min(s.Bc, a.Nk);
    return a;
}

// One thread's scratch: for a block of rows, a head, or a tile of a weight's gradient.
struct ThreadScratch {
    simd::Matrix g, d_normal;
    float *tile, *attention, *dq, *dk, *dv;

    ThreadScratch(const Sizes& s, Scratch& scratch) {
        int64_t most = flash_backward_scratch(call_of<AttentionGradient>(s, 0, s.T));
        for (const int64_t n : {std::min(s.Br, s.T), s.T % s.Br})
            if (n > 0) most = std::max(most, flash_scratch(call_of<Attention>(s, s.T - n, n)));
        g = scratch.matrix(MOST_ROWS, 4 * s.C), d_normal = scratch.matrix(MOST_ROWS, s.C);
        tile = scratch.take(WeightGradient::scratch()), attention = scratch.take(most);
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

// What the layers use in turn: x is the residual stream, dx its gradient after a layer, dx_2 that between its
// attention and its MLP. w_head, normal and dlogits belong to the head. dqkv has one buffer for even layers and
// one for odd ones: a layer's is in use until the next one's is complete.
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
        g = scratch.matrix(M, 4 * s.C), dh = scratch.matrix(M, 4 * s.C);
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
