// A draft by n-grams: for contexts of up to Tail::MOST tokens the likeliest next tokens, each with its
// probability; all others are as likely as after the context without its first token, times a factor.
//
// generation/draft.py makes the file. It may come from anywhere, so all of it is checked when it is opened.
#pragma once

#include <cstdint>
#include <vector>

#include "draft.h"

// The tables of a file. A context's record lies in the bucket that its hash names: bytes starts[b] .. starts[b
// + 1] of records. A record is 3 bytes, the lower 8 bits of the context's tag, the upper 2 bits with the number
// n of tokens in the other 6, and the code of the factor; then n pairs of a token and the code of its
// probability. A code c stands for (c / 255)^2, of the factor for (c / 128)^2.
struct NgramTables {
    std::vector<uint8_t> first;    // (V), the codes of all tokens' probabilities without context
    std::vector<uint32_t> starts;  // (buckets + 1); the number of buckets is a power of 2
    std::vector<uint8_t> records;
};

class Ngrams : public Draft {
  public:
    // Throws std::invalid_argument if the tables are damaged, or not for a vocabulary of this size.
    Ngrams(NgramTables tables, int64_t vocab_size);

    Guess guess(const Tail& tail, double uniform, const Occurrences&, const Sampling&) const override;

  private:
    static constexpr int CODES = 256;
    static constexpr size_t MOST_POWERS = 4;  // temperatures at a time
    struct Powers {                           // of the numbers that codes stand for
        double exponent;
        std::vector<float> share, factor;
    };

    const Powers& powers(double exponent) const;
    void weigh_all(const Tail& tail, double exponent, float* weight) const;

    NgramTables tables;
    int64_t vocab_size;
    int bits = 0;                        // of a bucket's number
    mutable std::vector<Powers> cached;  // only the decoder's caller guesses
    mutable size_t oldest = 0;
};
