#include "weights.h"

#include <algorithm>
#include <utility>

#include "buffer.h"
#include "refuse.h"

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

void ModelShape::check() const {
    constexpr int64_t MOST = int64_t{1} << 31;
    ::check("block_size", block_size, 1, MOST);
    ::check("vocab_size", vocab_size, 1, MOST);
    ::check("n_layer", n_layer, 1, MOST);
    ::check("n_head", n_head, 1, MOST);
    ::check("n_embd", n_embd, 1, MOST);
    if (n_embd % n_head) refuse("n_embd", n_embd, "a multiple of n_head=" + std::to_string(n_head));
}

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
        if (s.tanh_gelu) layers[l].gelu = portable::gelu_tanh;
    }
    ln_f = layer_norm(tensors, "transformer.ln_f", C);
    const float* own = tensors("lm_head.weight", V * C);
    head = Linear(own ? own : wte, nullptr, V, C, panel_width(V, 1, row), precision);
}

void Weights::embed(float* x, int64_t token, int64_t position) const {
    const int64_t C = head.inputs();
    for (int64_t i = 0; i < C; i++) x[i] = wte[token * C + i] + wpe[position * C + i];
}

std::vector<Linear*> Weights::matrices() {
    std::vector<Linear*> all;
    for (Layer& w : layers) all.insert(all.end(), {&w.qkv, &w.proj, &w.fc, &w.out});
    all.push_back(&head);
    return all;
}

Weights Weights::shared_by(int members) {
    Weights shared;
    for (const Layer& w : layers) shared.layers.push_back({w.ln_1, w.ln_2, {}, {}, {}, {}, w.gelu});
    shared.ln_f = ln_f;
    const std::vector<Linear*> from = matrices(), to = shared.matrices();
    const auto width = [&](size_t i) {  // a panel of q, k and v stays a head's
        const Linear& w = *from[i];
        return i % 4 == 0 && i / 4 < layers.size() ? w.width() : panel_width(w.outputs(), members, w.kept_in());
    };
    std::vector<std::vector<float*>> panels(from.size());
    const auto lay_out = [&](Scratch at) {
        for (int member = 0; member < members; member++)
            for (size_t i = 0; i < from.size(); i++) {
                const int64_t count = (from[i]->outputs() + width(i) - 1) / width(i);
                panels[i].resize(count);
                for (int64_t p = count * member / members; p < count * (member + 1) / members; p++)
                    panels[i][p] = at.take(from[i]->panel_words(width(i)));
            }
        return at.taken();
    };
    shared.memory = Buffer(lay_out(Scratch()));
    lay_out(Scratch(shared.memory));
    for (size_t i = 0; i < from.size(); i++) *to[i] = from[i]->with_width(width(i), std::move(panels[i]));
    return shared;
}
