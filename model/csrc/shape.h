// A checkpoint as the C++ code takes it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

struct ModelShape {
    int64_t block_size, vocab_size, n_layer, n_head, n_embd;
};

// A checkpoint's tensor by nanoGPT's name; null for a bias that the model does not have. `floats` is the size
// that the tensor must have.
using Tensors = std::function<const float*(const std::string& name, int64_t floats)>;
