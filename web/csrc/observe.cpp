// Intermediate values of the model for a text: Q, K and V of every layer and head, and attention's weights.
// The pass is the decoder's prefill, with its packed weights; part 4 attends.
#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "generation/csrc/team.h"
#include "model/csrc/block.h"
#include "model/csrc/endless.h"
#include "page.h"
#include "parts.h"

namespace {

const Part& FLASH = *find_part("part4_flash");
constexpr int64_t BR = 64, BC = 128;

struct Observation {
    int64_t T, H, d, width, ldQ;
    Endless endless;
    std::vector<Buffer> qkv;  // each layer's (T, ldQ): q, k and v of a head together, `width` per head

    // q, k or v (which: 0, 1, 2) of a head; rows are ldQ apart.
    const float* head(int64_t layer, int64_t h, int64_t which) const {
        return qkv[layer] + h * width + which * d;
    }
    Matrices matrix(int64_t layer, int64_t h, int64_t which) const {
        return {head(layer, h, which), 0, 0, ldQ, 1};
    }
    AttentionSizes sizes(int64_t h) const {
        const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
        const int64_t Br = std::min(BR, T), Bc = std::min(BC, T);
        return {1, 1, T, T, d, /* causal */ true, scale, Br, Bc, /* threads */ 1, endless.rules(h)};
    }
};

}  // namespace

EXPORT(observe)
Observation* page_observe(const Checkpoint* checkpoint, int32_t precision, const int32_t* ids, int32_t count) {
    const ModelShape& s = checkpoint->shape;
    const Weights weights(s, checkpoint->lookup(), PRECISIONS[precision].precision);
    const int64_t T = count, C = s.n_embd;
    const Layer& first = weights.layers[0];
    auto* o = new Observation{
        T, s.n_head, C / s.n_head, first.qkv.width(), first.qkv.columns(), {s.n_head, s.window}, {}};
    Rows rows{T};
    const auto lay_out = [&](Scratch at) {
        rows.X = at.matrix(T, first.proj.columns());
        rows.A = at.matrix(T, C);
        rows.Y = at.matrix(T, first.fc.columns());
        rows.N = at.matrix(T, C);
        rows.O = at.matrix(T, first.out.operand_words());
        return at.taken();
    };
    const Buffer memory(lay_out(Scratch()));
    lay_out(Scratch(memory));
    for (int64_t t = 0; t < T; t++) weights.embed(rows.X.row(t), ids[t], t);
    Attention a{o->sizes(0)};
    const Buffer out(T * o->d), scratch(FLASH.scratch(a));
    a.out = out;
    Trace off(1);
    Member alone(off, 0);
    for (int64_t l = 0; l < s.n_layer; l++) {
        o->qkv.emplace_back(T * o->ldQ);
        rows.Q = {o->qkv[l], o->ldQ};
        Block<Member> block(rows, alone);
        block.qkv(weights.layers[l], 0, true, [&](int64_t h, int64_t, int64_t) {  // all rows: it is alone
            a.rules = o->endless.rules(h);
            a.q = o->matrix(l, h, 0);
            a.k = o->matrix(l, h, 1);
            a.v = o->matrix(l, h, 2);
            FLASH.attention(a, scratch);
            for (int64_t t = 0; t < T; t++) std::copy_n(out + t * o->d, o->d, rows.A.row(t) + h * o->d);
        });
        block.rest(weights.layers[l]);
    }
    return o;
}

EXPORT(close_observation) void page_close_observation(Observation* o) { delete o; }

// to (3, T, d) <- q, k and v of a head
EXPORT(observed) void page_observed(const Observation* o, int32_t layer, int32_t head, float* to) {
    for (int64_t which = 0; which < 3; which++)
        for (int64_t t = 0; t < o->T; t++) to = std::copy_n(o->head(layer, head, which) + t * o->ldQ, o->d, to);
}

// ALiBi's slope of a head, or 0.
EXPORT(observed_slope) float page_observed_slope(const Observation* o, int32_t head) {
    const Rules* rules = o->endless.rules(head);
    return rules ? *rules->slopes : 0;
}

// P (T, T) <- the weights of attention; 0 where a key is masked. In double: the page shows the values.
EXPORT(observed_weights)
void page_observed_weights(const Observation* o, int32_t layer, int32_t head, float* P) {
    const AttentionSizes a = o->sizes(head);
    const float *Q = o->head(layer, head, 0), *K = o->head(layer, head, 1);
    std::vector<double> row(a.Nk);
    std::fill_n(P, a.Nq * a.Nk, 0.0f);
    for (int64_t i = 0; i < a.Nq; i++) {
        const Range seen = a.keys(0, i);
        float* const S = P + i * a.Nk + seen.first;
        portable::dot_rows(S, Q + i * o->ldQ, {K + seen.first * o->ldQ, o->ldQ}, seen.count(), a.d, a.scale);
        a.change_row(0, i, S, seen);
        const float m = *std::max_element(S, S + seen.count());
        double l = 0;
        for (int64_t j = 0; j < seen.count(); j++) l += row[j] = std::exp(static_cast<double>(S[j] - m));
        for (int64_t j = 0; j < seen.count(); j++) S[j] = static_cast<float>(row[j] / l);
    }
}
