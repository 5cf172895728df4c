// The model that is trained, as pointers into its parameters: nanoGPT without biases.
//
//   x <- wte[id] + wpe[t];  each layer: x <- x + attention(LN(x)), x <- x + MLP(LN(x));  logits <- LN(x) wte^T
//
// No torch header: the step builds alone.
#pragma once

#include <cstdint>
#include <vector>

namespace training {

// B sequences of T tokens; V characters, width C, H heads, L layers. All at least 1, C a multiple of H.
struct Sizes {
    int64_t B, T, V, C, H, L;
    int threads;

    int64_t rows() const { return B * T; }
    int64_t d() const { return C / H; }
};

// Matrices (out, in), row-major, as in PyTorch: c_attn (3C, C), attn_proj (C, C), c_fc (4C, C), mlp_proj
// (C, 4C); ln_1, ln_2 (C).
template <class Float>
struct LayerOf {
    Float *ln_1, *c_attn, *attn_proj, *ln_2, *c_fc, *mlp_proj;
};

// wte (V, C), wpe (T, C), ln_f (C).
template <class Float>
struct ModelOf {
    Float *wte, *wpe;
    std::vector<LayerOf<Float>> layers;
    Float* ln_f;
};

// A contiguous part of the parameters or of their gradients.
struct Run {
    float* data;
    int64_t count;
};

struct Batch {
    const int64_t *ids, *targets;  // (B, T), each of 0 .. V - 1
};

// The kinds of a step's work; the seconds of each are summed over all threads.
enum Kind {
    PACKING,
    EMBEDDING,
    NORM,
    PRODUCTS,
    ATTENTION,
    GELU,
    LOSS,
    PRODUCTS_BACKWARD,
    ATTENTION_BACKWARD,
    GELU_BACKWARD,
    WEIGHT_GRADIENTS,
    CLIPPING,
    MUON,
    ADAMW,
    WAITING,
    KINDS
};

struct Result {
    float loss, norm;  // the mean cross-entropy in nats; the norm of all gradients before they are clipped
};

// The scratch of gradients(), in floats.
int64_t gradients_scratch(const Sizes&);

// Writes the gradients of the mean cross-entropy, scaled so that their norm is at most `clip`. `runs` are the
// same gradients as contiguous parts. Adds to seconds[KINDS].
Result gradients(const Sizes&, const Batch&, const ModelOf<const float>&, const ModelOf<float>& grads,
                 const std::vector<Run>& runs, float clip, float* scratch, double* seconds);

}  // namespace training
