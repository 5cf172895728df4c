#include "decoder/weights.h"

#include <algorithm>

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
    const int64_t d = C / heads, width = round_up(3 * d, row_of(precision).vectors * simd::lanes());
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

}  // namespace

Weights::Weights(const ModelShape& s, const Tensors& tensors, Precision precision, int threads)
    : layers(s.n_layer) {
    const int64_t C = s.n_embd, V = s.vocab_size;
    const PrecisionRow& row = row_of(precision);
    matrix_bytes = (12.0 * s.n_layer * s.n_embd + s.vocab_size) * s.n_embd * row.bytes;

    const auto width = [&](int64_t out) {
        const int64_t share = round_up((out + threads - 1) / threads, row.vectors * simd::lanes());
        return std::min(MAX_PANEL_VECTORS * simd::lanes(), share);
    };
    const auto linear = [&](const std::string& name, int64_t out, int64_t in) {
        return Linear(tensors(name + ".weight", out * in), tensors(name + ".bias", out), out, in, width(out),
                      precision);
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
    head = Linear(wte, nullptr, V, C, width(V), precision);
}
