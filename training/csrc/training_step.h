// The training step of nanoGPT without biases: gradients, then Muon, AdamW and the average of the weights.
//
//   x <- wte[id] + wpe[t];  each layer: x <- x + attention(LN(x)), x <- x + MLP(LN(x));  logits <- LN(x) wte^T
//
// No torch header: the training step builds alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "threads.h"

namespace training {

// B sequences of T tokens; V characters, width C, H heads, L layers; attention's tile Br x Bc. All at least 1,
// C a multiple of H. window: that of an endless model, which has no table of positions; else 0.
struct Sizes {
    int64_t B, T, V, C, H, L, Br, Bc;
    int threads;
    int64_t window = 0;
    Pool* pool = nullptr;

    int64_t rows() const { return B * T; }
    int64_t d() const { return C / H; }
};

// The parameters in their order: wte (V, C), wpe (T, C) or empty, for each layer these, ln_f (C). Matrices are
// (out, in): c_attn (3C, C), attn_proj (C, C), c_fc (4C, C), mlp_proj (C, 4C); ln_1, ln_2 (C).
enum OfLayer { LN_1, C_ATTN, ATTN_PROJ, LN_2, C_FC, MLP_PROJ, OF_LAYER };
constexpr int64_t WTE = 0, WPE = 1, FIRST_LAYER = 2;

// Muon trains the layers' matrices, each (rows, cols), c_attn as three; AdamW the rest, with rows = cols = 0.
struct Shape {
    int64_t count;  // numbers
    int64_t rows, cols;
};

std::vector<Shape> shapes(const Sizes&);

// A parameter with its gradient, the average of its values and its optimizer's state.
struct Parameter {
    Shape shape;
    float *value, *gradient, *average;
    float *first, *second;  // Muon: momentum and null; AdamW: averages of the gradient and of its square
    float* updates;         // AdamW: how many there were; Muon: null
};

// clip: gradients with a larger norm are scaled to this one. The rates are the learning rates' peaks. quintic,
// least_norm: as in training/muon.py. Recipe.optimizer() of training/recipe.py has the same order.
struct Settings {
    double clip, muon_rate, adam_rate, position_rate, weight_decay, momentum, beta_1, beta_2, epsilon;
    double quintic[3];
    double least_norm;
};

struct Result {
    float loss, norm;  // the mean cross-entropy in nats; the norm of all gradients before they are clipped
};

// scratch: scratch_floats(sizes), with any content.
struct TrainingStep {
    Sizes sizes;
    Settings settings;
    std::vector<Parameter> parameters;
    float* scratch;
    std::map<std::string, double> seconds{};  // of each kind of work, summed over all threads

    // Writes the clipped gradients of the mean cross-entropy. tokens (B, T + 1): a row's, and the next one.
    Result gradients(const int64_t* tokens);

    // to (B, T) <- the cross-entropy of each row by the averages. tokens as above; no gradient changes.
    void losses(const int64_t* tokens, float* to);

    // Updates all parameters and their averages. fraction: of the peak rates; average: the averages' decay.
    void update(double fraction, double average);
};

int64_t gradients_scratch(const Sizes&);
int64_t update_scratch(const Sizes&);
inline int64_t scratch_floats(const Sizes& s) { return std::max(gradients_scratch(s), update_scratch(s)); }

}  // namespace training
