// How a token is chosen from logits, and how likely the model finds it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

// The settings of a text; generation/sampling.py says what each does.
struct Sampling {
    double temperature = 1;
    int64_t top_k = 0;  // 0 keeps all
    double top_p = 1, min_p = 0, repetition_penalty = 1;
    double presence_penalty = 0, frequency_penalty = 0;
    std::vector<std::pair<int64_t, double>> logit_bias{};  // (token, what is added to its logit)
};

// The occurrences of each token of the vocabulary in a text.
struct Occurrences {
    std::vector<char> seen;        // not 0 where the token has occurred, the prompt included
    std::vector<int32_t> written;  // how often it has occurred since the prompt
};

// The token that `uniform`, in [0, 1), falls on. logits has an element for each token of the vocabulary. Throws
// std::invalid_argument for logits with NaN or an infinite maximum.
int64_t sample(const float* logits, const Occurrences&, double uniform, const Sampling&);

// A token's log-probability, and those of the likeliest tokens in descending order, ties by number.
struct TokenLogprob {
    int64_t token;
    double logprob;
    std::vector<std::pair<int64_t, double>> top;
};

// The softmax of logits (vocab_size) is in float64. top: the number of likeliest tokens to return.
TokenLogprob token_logprob(const float* logits, int64_t vocab_size, int64_t token, int64_t top);
