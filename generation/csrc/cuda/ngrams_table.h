// The table of a draft's contexts, which the decoder and the cuda engine read as the file has it.
//
// A bucket has the tags of WAYS contexts. Each context has LISTED pairs: a token, and the code of its
// probability. model/draft.py describes the file and defines the macros, generation/draft_maker.py makes it.
#pragma once

constexpr double SHARPNESS = 1.15;  // the model is surer; with this exponent the guesses of shakes256 hit most

// The hash of the last `length` tokens of `recent`, a byte each, the latest one lowest.
inline unsigned long long context_hash(unsigned long long recent, int length) {
    const unsigned long long tokens = recent & ((1ull << 8 * length) - 1);
    return (tokens | (unsigned long long)length << 8 * ORDER) * (unsigned long long)FACTOR;
}
