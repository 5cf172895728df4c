// A draft by n-grams: the likeliest next tokens after a text's last tokens, as many as the table knows.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/ngrams_table.h"
#include "draft.h"

class Ngrams : public Draft {
  public:
    struct Pair {
        uint8_t token, code;  // a code c stands for the probability (c / 255)^2
    };

    // tags: (CONTEXTS). pairs: (CONTEXTS, LISTED), tokens below vocab_size.
    Ngrams(std::vector<uint32_t> tags, std::vector<Pair> pairs, int64_t vocab_size)
        : tags(std::move(tags)), pairs(std::move(pairs)), vocab_size(vocab_size) {}

    Guess guess(const Tail& tail, double uniform, const Occurrences&, const Sampling&) const override;

  private:
    const Pair* find(const Tail& tail) const;

    std::vector<uint32_t> tags;
    std::vector<Pair> pairs;
    int64_t vocab_size;
};
