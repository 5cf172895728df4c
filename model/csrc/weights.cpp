#include "weights.h"

#include <algorithm>
#include <utility>

#include "round_up.h"

namespace {

constexpr int64_t MAX_PANEL_VECTORS = 8;

Buffer copied(const float* data, int64_t floats) {
    Buffer b(floats);
    std::copy_n(data, floats, static_cast<float*>(b));
    return b;
}

LayerNorm layer_norm(const Tensors& tensors, const std::string& name, int64_t n) {
    const float *weight = tensors(name + ".weight", n), *bias = tensors(name + ".bias", n);
    return {{weight, weight + n}, bias ? std::vector<float>(bias, bias + n) : std::vector<float>()};
}

// The rows of c_attn are all heads' q, then all k, then all v. Here a panel holds one head's q, k and v.
Linear by_head(const float* W, const float* b, int64_t heads, int64_t C, Precision precision) {
    const int64_t d = C / heads, width = round_up(3 * d, row_of(precision).vectors * portable::lanes());
    Buffer rows(heads * width * C), bias(heads * width);
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t which = 0; which < 3; which++) {
            const int64_t from = which * C + h * d, to = h * width + which * d;
            std::copy_n(W + from * C, d * C, rows + to * C);
            if (b) std::copy_n(b + from, d, bias + to);
        }
    }
    return Linear(rows, b ? static_cast<float*>(bias) : nullptr, heads * width, C, width, precision);
}

// The width of panels of `out` outputs when `members` share them.
int64_t panel_width(int64_t out, int members, const PrecisionRow& row) {
    const int64_t share = round_up((out + members - 1) / members, row.vectors * portable::lanes());
    return std::min(MAX_PANEL_VECTORS * portable::lanes(), share);
}

}  // namespace

Weights::Weights(const ModelShape& s, const Tensors& tensors, Precision precision) : layers(s.n_layer) {
    const int64_t C = s.n_embd, V = s.vocab_size;
    const PrecisionRow& row = row_of(precision);
    matrix_bytes = (12.0 * s.n_layer * s.n_embd + s.vocab_size) * s.n_embd * row.bytes;

    const auto linear = [&](const std::string& name, int64_t out, int64_t in) {
        return Linear(tensors(name + ".weight", out * in), tensors(name + ".bias", out), out, in,
                      panel_width(out, 1, row), precision);
    };

    wte = copied(tensors("transformer.wte.weight", V * C), V * C);
    wpe = copied(tensors("transformer.wpe.weight", s.block_size * C), s.block_size * C);
    for (int64_t l = 0; l < s.n_layer; l++) {
        const std::string name = "transformer.h." + std::to_string(l) + ".";
        layers[l].ln_1 = layer_norm(tensors, name + "ln_1", C);
        layers[l].qkv = by_head(tensors(name + "attn.c_attn.weight", 3 * C * C),
                                tensors(name + "attn.c_attn.bias", 3 * C), s.n_head, C, precision);
        layers[l].proj = linear(name + "attn.c_proj", C, C);
        layers[l].ln_2 = layer_norm(tensors, name + "ln_2", C);
        layers[l].fc = linear(name + "mlp.c_fc", 4 * C, C);
        layers[l].out = linear(name + "mlp.c_proj", C, 4 * C);
    }
    ln_f = layer_norm(tensors, "transformer.ln_f", C);
    head = Linear(wte, nullptr, V, C, panel_width(V, 1, row), precision);
}

void Weights::embed(float* x, int64_t token, int64_t position) const {
    const int64_t C = head.inputs();
    for (int64_t i = 0; i < C; i++) x[i] = wte[token * C + i] + wpe[position * C + i];
}

Weights Weights::shared_by(int members) const {
    struct Matrix {
        const Linear& linear;
        int64_t width, words, panels;

        Matrix(const Linear& linear, int64_t width)
            : linear(linear),
              width(width),
              words(linear.panel_words(width)),
              panels((linear.outputs() + width - 1) / width) {}
    };
    std::vector<Matrix> matrices;  // in the order in which a step reads them
    const auto divide = [&](const Linear& w) {
        matrices.emplace_back(w, panel_width(w.outputs(), members, w.kept_in()));
    };
    for (const Layer& w : layers) {
        matrices.emplace_back(w.qkv, w.qkv.width());
        divide(w.proj), divide(w.fc), divide(w.out);
    }
    divide(head);

    const auto owner = [&](const Matrix& w, int64_t p) { return ((p + 1) * members - 1) / w.panels; };
    std::vector<int64_t> next(members + 1);  // where a member's next panel goes
    for (const Matrix& w : matrices)
        for (int64_t p = 0; p < w.panels; p++) next[owner(w, p) + 1] += w.words;
    for (int m = 0; m < members; m++) next[m + 1] += next[m];
    Weights shared;
    shared.memory = Buffer(next[members]);
    std::vector<Linear> made;
    for (const Matrix& w : matrices) {
        made.push_back(w.linear.with_width(w.width, [&](int64_t p) {
            int64_t& at = next[owner(w, p)];
            return shared.memory + std::exchange(at, at + w.words);
        }));
    }
    auto taken = made.begin();
    const auto take = [&] { return std::move(*taken++); };
    for (const Layer& w : layers) {
        Layer& to = shared.layers.emplace_back();
        to.ln_1 = w.ln_1, to.ln_2 = w.ln_2;
        to.qkv = take(), to.proj = take(), to.fc = take(), to.out = take();
    }
    shared.ln_f = ln_f;
    shared.head = take();
    return shared;
}
