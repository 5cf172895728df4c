// A guess of a text's next token by its draft, by one warp. generation/distributions.py makes its tables.
#pragma once

#include "choose.h"

constexpr int CONTEXT = 5;                // tokens of the longest context
constexpr int WAYS = 4;                   // contexts of a bucket, each of which a lane looks at
constexpr int WORDS = (OF_LANE + 3) / 4;  // of a lane's codes
constexpr float SHARPNESS = 1.15f;        // as in generation/csrc/ngrams.cpp
constexpr float GREEDY = 64;              // from this exponent on, only the likeliest token counts
constexpr unsigned long long FACTOR = 0x9e3779b97f4a7c15ull;

// What a text's settings say to its guesses.
struct Taste {
    float exponent;  // of the root of a probability
    bool greedy, filtered;

    __device__ explicit Taste(const double* settings)  // never 0, so that the power of 0 is 0
        : exponent(2 * SHARPNESS * fmaxf(fminf(settings[INVERSE_TEMPERATURE], 1e30f), 1e-30f)),
          greedy(settings[TEMPERATURE] == 0 || exponent > GREEDY),
          filtered(Filters{settings}.any()) {}
};

// recent: the last tokens, a byte each, the latest one lowest; `known` of them count. memory: as in filter().
__device__ inline int guess(const Work& work, unsigned long long recent, int known, float uniform,
                            const Taste& taste, const double* settings, double* memory) {
    const int lane = threadIdx.x % LANES, length = lane / WAYS;
    unsigned long long hash = FACTOR;  // of the last `length + 1` tokens
    UNROLLED(i, CONTEXT) {
        unsigned long long extended = (hash ^ ((recent >> 8 * i & 255) + 1)) * FACTOR;
        extended ^= extended >> 29;
        if (i <= length) hash = extended;
    }
    uint2 context = {0, 0};
    if (length < min(known, CONTEXT))
        context = work.contexts[unsigned(hash >> (64 - work.context_bits)) * WAYS + lane % WAYS];
    const unsigned found = __ballot_sync(~0u, context.y > 0 && context.x == unsigned(hash));
    const unsigned longest = __shfl_sync(~0u, context.y, 31 - __clz(found | 1));
    const unsigned row = found ? longest : 0;
    unsigned codes[WORDS];
    UNROLLED(i, WORDS) codes[i] = work.codes[(row * LANES + lane) * WORDS + i];
    float weight[OF_LANE], best = -INF;  // the logarithm of the probability's root
    UNROLLED(e, OF_LANE) {
        weight[e] = __log2f((codes[e / 4] >> e % 4 * 8 & 255) * (1 / 255.0f));
        best = fmaxf(best, weight[e]);
    }
    if (taste.greedy) {
        best = largest<1, LANES>(best);
        int likeliest = VOCAB - 1;
        UNROLLED(e, OF_LANE)
            if (weight[e] == best) likeliest = min(likeliest, lane * OF_LANE + e);
        return __reduce_min_sync(~0u, likeliest);
    }
    UNROLLED(e, OF_LANE) weight[e] = exp2_approx(taste.exponent * weight[e]);
    if (taste.filtered) filter(Filters{settings}, memory, weight);
    return max(pick(weight, uniform), 0);
}
