// A model's weights, packed once in the order in which a step, which they bound, reads them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "linear.h"

// Python fills it as an array of numbers.
struct ModelShape {
    int64_t block_size, vocab_size, n_layer, n_head, n_embd;
    int64_t tanh_gelu = 0;  // or 1
    int64_t window = 0;     // keys that a query sees in an endless model, whose positions have no table; else 0

    void check() const;  // rejects a size that is out of range
};

// A checkpoint's tensor. transposed: of a matrix, column by column. mapped: from a file, which nobody changes.
struct Tensor {
    const float* data;
    bool transposed = false, mapped = false;

    Tensor(const float* data, bool transposed = false, bool mapped = false)
        : data(data), transposed(transposed), mapped(mapped) {}

    simd::Strided strided(int64_t rows, int64_t columns) const {
        return {data, transposed ? 1 : columns, transposed ? rows : 1};
    }
    void release(int64_t first, int64_t floats) const;  // the file's pages; they are read again when needed
};

// The tensor of nanoGPT's name, which must have so many floats; null for a bias or a head that there is not.
using Tensors = std::function<Tensor(const std::string& name, int64_t floats)>;

// piece(i) for each i of 0 .. pieces - 1, perhaps at the same time.
using Parallel = std::function<void(int64_t pieces, const std::function<void(int64_t)>& piece)>;

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
    Buffer wte, wpe;  // (vocab_size, n_embd), empty if the head has the same numbers; (block_size, n_embd)
    std::vector<Layer> layers;
    LayerNorm ln_f;
    Linear head;
    double matrix_bytes = 0;

    Weights() = default;
    // threads: of the largest team, for whose members matrices that do not fit_twice() are laid out.
    Weights(
        const ModelShape&, const Tensors&, Precision, int threads = 1,
        const Parallel& = [](int64_t pieces, const auto& piece) {
            for (int64_t i = 0; i < pieces; i++) piece(i);
        });

    bool fit_twice() const { return matrix_bytes <= (64 << 20); }

    // x (n_embd) <- wte[token] + wpe[position], if there is a table of positions
    void embed(float* x, int64_t token, int64_t position) const;

    // Only the layers and the head, for a step that `members` share, if they fit_twice(): a large enough matrix
    // has a panel for each member, and each member's panels are contiguous.
    Weights shared_by(int members);

  private:
    std::vector<Linear*> matrices();  // in the order in which a step reads them

    // The places in `memory` of the panels of matrices with these shapes.
    std::vector<std::vector<float*>> lay_out(const std::vector<Panels>& shapes, const PrecisionRow&,
                                             int members);

    Buffer memory;  // holds all panels
};
