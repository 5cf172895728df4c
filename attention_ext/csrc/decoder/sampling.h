// How a token is chosen from logits.
#pragma once

#include <cstdint>
#include <vector>

// The settings of a text; generation/sampling.py says what each does.
struct Sampling {
    double temperature = 1;
    int64_t top_k = 0;  // 0 keeps all
    double top_p = 1, min_p = 0, repetition_penalty = 1;
};

// The token that `uniform`, in [0, 1), falls on. logits and seen have an element for each token; seen[i] is not
// 0 where token i has occurred. Throws std::invalid_argument for logits with NaN or an infinite maximum.
int64_t sample(const float* logits, const std::vector<char>& seen, double uniform, const Sampling&);
