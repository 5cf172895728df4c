// A guess of a text's next token by its draft, by one warp.
#pragma once

#include "choose.h"
#include "ngrams_table.h"

constexpr float GREEDY = 64;  // from this exponent on, only the likeliest token counts

// What a text's settings say to its guesses.
struct Taste {
    float exponent;  // of the root of a probability
    bool greedy, filtered;

    __device__ explicit Taste(const double* settings)  // never 0, so that the power of 0 is 0
        : exponent(2 * float(SHARPNESS) * fmaxf(fminf(settings[INVERSE_TEMPERATURE], 1e30f), 1e-30f)),
          greedy(settings[TEMPERATURE] == 0 || exponent > GREEDY),
          filtered(Filters{settings}.any()) {}
};

// recent: the last tokens, a byte each, the latest one lowest; `known` of them count. memory: as in filter().
__device__ inline int guess(const Work& work, unsigned long long recent, int known, float uniform,
                            const Taste& taste, const double* settings, double* memory) {
    const int lane = threadIdx.x % LANES, length = lane / WAYS + 1;
    const unsigned long long hash = context_hash(recent, min(length, ORDER));
    const unsigned context = unsigned(hash >> BUCKET_SHIFT) * WAYS + lane % WAYS;
    const bool same = length <= min(known, ORDER) && work.tags[context] == unsigned(hash >> TAG_SHIFT);
    const unsigned found = __ballot_sync(~0u, same);  // without one, any guess will do
    const uint4 pairs = work.pairs[__shfl_sync(~0u, context, 31 - __clz(found | 1))];
    const unsigned words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
    float weight[OF_LANE], best = -INF;  // the logarithm of the probability's root
    UNROLLED(e, OF_LANE) weight[e] = -INF;
    UNROLLED(i, LISTED) {
        const unsigned pair = words[i / 2] >> i % 2 * 16, token = pair & 255;
        const float root = __log2f((pair >> 8 & 255) * (1 / 255.0f));
        UNROLLED(e, OF_LANE)
            if (token == lane * OF_LANE + e) weight[e] = fmaxf(weight[e], root);
        best = fmaxf(best, root);
    }
    if (taste.greedy) {
        int likeliest = VOCAB - 1;
        UNROLLED(e, OF_LANE)
            if (weight[e] == best) likeliest = min(likeliest, lane * OF_LANE + e);
        return __reduce_min_sync(~0u, likeliest);
    }
    UNROLLED(e, OF_LANE) weight[e] = exp2_approx(taste.exponent * weight[e]);
    if (taste.filtered) filter(Filters{settings}, memory, weight);
    return max(pick(weight, uniform), 0);
}
