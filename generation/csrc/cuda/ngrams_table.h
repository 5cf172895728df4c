// The table of a draft's contexts, which the decoder and the cuda engine read as the file has it.
//
// A bucket has the tags of WAYS contexts. Each context has LISTED pairs: a token, and the code of its
// probability. model/draft.py describes the file, generation/draft_maker.py makes it.
#pragma once

constexpr int CONTEXT = 5;  // the most tokens of a context
constexpr int BUCKET_BITS = 13, WAYS = 4, LISTED = 8, CONTEXTS = WAYS << BUCKET_BITS;
constexpr int BUCKET_SHIFT = 64 - BUCKET_BITS, TAG_SHIFT = BUCKET_SHIFT - 32;  // of a hash
constexpr double SHARPNESS = 1.15;  // the model is surer; with this exponent the guesses of shakes256 hit most

// The hash of the last `length` tokens of `recent`, a byte each, the latest one lowest.
inline unsigned long long context_hash(unsigned long long recent, int length) {
    const unsigned long long tokens = recent & ((1ull << 8 * length) - 1);
    return (tokens | (unsigned long long)length << 8 * CONTEXT) * 0x9e3779b97f4a7c15ull;
}
