// How a token is chosen from logits, and how likely the model finds it.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

// The settings that are numbers, in the order of generation/sampling.py: name = the value that changes nothing.
struct SamplingNumbers {
    double SAMPLING_NUMBERS;
};

// The settings of a text.
struct Sampling : SamplingNumbers {
    std::vector<std::pair<int64_t, double>> logit_bias{};  // (token, what is added to its logit)
};

// The occurrences of each token of the vocabulary in a text.
struct Occurrences {
    std::vector<char> seen;        // not 0 where the token has occurred, the prompt included
    std::vector<int32_t> written;  // how often it has occurred since the prompt
};

// A number proportional to the probability of each token, 0 for tokens that are not kept; until the thread's
// next call. Throws std::invalid_argument for logits with NaN or an infinite maximum.
const std::vector<double>& weigh(const float* logits, const Occurrences&, const Sampling&);

// The token that `uniform`, in [0, 1), falls on, among tokens with these weights.
int64_t draw(const std::vector<double>& weight, double uniform);

constexpr int64_t NO_LOGPROB = -1;  // instead of a number of alternatives: no log-probabilities

// A token's log-probability, and those of the likeliest tokens in descending order, ties by number.
struct TokenLogprob {
    int64_t token;
    double logprob;
    std::vector<std::pair<int64_t, double>> top;
};

// The softmax of logits (vocab_size) is in float64. top: the number of likeliest tokens to return.
TokenLogprob token_logprob(const float* logits, int64_t vocab_size, int64_t token, int64_t top);

// The uniform numbers of a seed: those of torch.rand(dtype=torch.float64) on the CPU.
class Uniforms {
  public:
    // As in PyTorch, only the lower 32 bits of a seed are used.
    explicit Uniforms(uint64_t seed) : bits(static_cast<uint32_t>(seed)) {}

    // The next number in [0, 1): the lower 53 bits of two draws, the upper one first.
    double next() {
        const uint64_t upper = bits(), lower = bits();
        return static_cast<double>((upper << 32 | lower) & ((uint64_t{1} << 53) - 1)) * 0x1p-53;
    }

  protected:
    std::mt19937 bits;
};
