// Intermediate values of the model for a text: Q, K and V of every layer and head, and attention's weights.
//
// The pass is the decoder's prefill, all tokens at once, with the decoder's own packed weights; part 4 attends.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "checkpoint.h"
#include "model/csrc/weights.h"
#include "parts.h"
#include "scratch.h"

namespace {

const Part& FLASH = *find_part("part4_flash");
constexpr int64_t BR = 64, BC = 128;

struct Observation {
    int64_t T, H, d, width, ldQ;
    std::vector<Buffer> qkv;  // each layer's (T, ldQ): q, k and v of a head together, `width` per head

    // q, k or v (which: 0, 1, 2) of a head; rows are ldQ apart.
    const float* head(int64_t layer, int64_t h, int64_t which) const {
        return qkv[layer] + h * width + which * d;
    }
    float scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(d))); }
};

// A (T, H d) <- attention of all heads
void attend(const Observation& o, int64_t layer, float* A) {
    const int64_t T = o.T, d = o.d;
    Attention a{};
    a.B = 1, a.H = 1, a.Nq = a.Nk = T, a.d = d;
    a.causal = true, a.scale = o.scale();
    a.Br = std::min(BR, T), a.Bc = std::min(BC, T);
    a.threads = 1;
    const Buffer out(T * d), scratch(FLASH.scratch(a));
    a.out = out;
    for (int64_t h = 0; h < o.H; h++) {
        a.q = {o.head(layer, h, 0), 0, 0, o.ldQ, 1};
        a.k = {o.head(layer, h, 1), 0, 0, o.ldQ, 1};
        a.v = {o.head(layer, h, 2), 0, 0, o.ldQ, 1};
        FLASH.attention(a, scratch);
        for (int64_t t = 0; t < T; t++) std::copy_n(out + t * d, d, A + (t * o.H + h) * d);
    }
}

}  // namespace

EXPORT(observe)
Observation* observe(const Checkpoint* checkpoint, int32_t precision, const int32_t* ids, int32_t count) {
    const ModelShape& s = checkpoint->shape;
    const Weights weights(s, checkpoint->lookup(), PRECISIONS[precision].precision);
    const int64_t T = count, C = s.n_embd, width = weights.layers[0].qkv.width();
    const int64_t ldX = row_stride(C), ldY = weights.layers[0].fc.columns();
    auto* o = new Observation{T, s.n_head, C / s.n_head, width, weights.layers[0].qkv.columns(), {}};
    const Buffer X(T * ldX), N(T * C), A(T * C), Y(T * ldY), O(T * weights.layers[0].out.operand_words());

    const auto normalised = [&](const LayerNorm& norm, const Linear& w) {
        for (int64_t t = 0; t < T; t++) norm(N + t * C, X + t * ldX);
        return w.operand({N, C}, T, O);
    };
    const auto set = [&](const Linear& w, simd::Matrix y, simd::ConstMatrix x) {
        for (int64_t p = 0; p < w.panels(); p++) w.set(y, x, T, p);
    };
    const auto add = [&](const Linear& w, simd::ConstMatrix x) {
        for (int64_t p = 0; p < w.panels(); p++) w.add({X, ldX}, x, T, p);
    };
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < C; i++) X[t * ldX + i] = weights.wte[ids[t] * C + i] + weights.wpe[t * C + i];
    for (int64_t l = 0; l < s.n_layer; l++) {
        const Layer& w = weights.layers[l];
        o->qkv.emplace_back(T * o->ldQ);
        set(w.qkv, {o->qkv[l], o->ldQ}, normalised(w.ln_1, w.qkv));
        attend(*o, l, A);
        add(w.proj, w.proj.operand({A, C}, T, O));
        set(w.fc, {Y, ldY}, normalised(w.ln_2, w.fc));
        portable::gelu(Y, T * ldY);
        add(w.out, w.out.operand({Y, ldY}, T, O));
    }
    return o;
}

EXPORT(close_observation) void close_observation(Observation* o) { delete o; }

// to (T, d) <- q, k or v of a head
EXPORT(observed) void observed(const Observation* o, int32_t layer, int32_t head, int32_t which, float* to) {
    for (int64_t t = 0; t < o->T; t++)
        std::copy_n(o->head(layer, head, which) + t * o->ldQ, o->d, to + t * o->d);
}

// P (T, T) <- softmax(scale q k^T), causal; 0 where a key is hidden. In double: the page shows the values.
EXPORT(observed_weights) void observed_weights(const Observation* o, int32_t layer, int32_t head, float* P) {
    const int64_t T = o->T, d = o->d;
    const float *Q = o->head(layer, head, 0), *K = o->head(layer, head, 1);
    std::vector<double> row(T);
    for (int64_t i = 0; i < T; i++) {
        portable::dot_rows(P + i * T, Q + i * o->ldQ, {K, o->ldQ}, i + 1, d, o->scale());
        const float m = *std::max_element(P + i * T, P + i * T + i + 1);
        double l = 0;
        for (int64_t j = 0; j <= i; j++) l += row[j] = std::exp(static_cast<double>(P[i * T + j] - m));
        for (int64_t j = 0; j < T; j++) P[i * T + j] = j <= i ? static_cast<float>(row[j] / l) : 0;
    }
}
