// A model's weights, packed once in the order in which a step, which they bound, reads them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "linear.h"

struct ModelShape {
    int64_t block_size, vocab_size, n_layer, n_head, n_embd;
    bool tanh_gelu = false;

    void check() const;  // rejects a size that is out of range
};

// A checkpoint's tensor by nanoGPT's name; null for a bias or a head that the model does not have. `floats` is
// the size that the tensor must have.
using Tensors = std::function<const float*(const std::string& name, int64_t floats)>;

// Ba, Kiros & Hinton 2016 (arXiv:1607.06450), with PyTorch's epsilon.
struct LayerNorm {
    std::vector<float> weight, bias;  // bias may be empty

    void operator()(float* y, const float* x) const {
        portable::layer_norm(y, x, weight.data(), bias.empty() ? nullptr : bias.data(), weight.size());
    }
};

struct Layer {
    LayerNorm ln_1, ln_2;
    Linear qkv;  // a panel is one head's q, k and v
    Linear proj, fc, out;
    void (*gelu)(float* x, int64_t n) = portable::gelu;
};

struct Weights {
    Buffer wte, wpe;  // (vocab_size, n_embd), (block_size, n_embd)
    std::vector<Layer> layers;
    LayerNorm ln_f;
    Linear head;
    double matrix_bytes = 0;

    Weights() = default;
    Weights(const ModelShape&, const Tensors&, Precision);

    // x (n_embd) <- wte[token] + wpe[position]
    void embed(float* x, int64_t token, int64_t position) const;

    // Only the layers and the head, for a step that `members` share: a large enough matrix has a panel for each
    // member, and each member's panels are contiguous.
    Weights shared_by(int members);

  private:
    std::vector<Linear*> matrices();  // in the order in which a step reads them

    Buffer memory;  // holds shared panels
};
