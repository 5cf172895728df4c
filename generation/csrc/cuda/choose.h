// The choice of a token from its logits, by one warp.
#pragma once

#include "decoder.h"

// Numbers of other lanes: CUDA's functions for double need a header.
__device__ inline double from_lane(double x, int lane) {
    return __hiloint2double(__shfl_sync(~0u, __double2hiint(x), lane),
                            __shfl_sync(~0u, __double2loint(x), lane));
}

template <class Merge>
__device__ inline double over_warp(double x, const Merge& merge) {
#pragma unroll
    for (int far = LANES / 2; far > 0; far /= 2) x = merge(x, from_lane(x, (threadIdx.x % LANES) ^ far));
    return x;
}

// The largest of the lanes' numbers: first its upper half, in an order that an integer has, then its lower one.
__device__ inline double largest_of_warp(double x) {
    const long long bits = __double_as_longlong(x), ordered = bits < 0 ? bits ^ 0x7fffffffffffffffll : bits;
    const int high = __reduce_max_sync(~0u, int(ordered >> 32));
    const unsigned low = __reduce_max_sync(~0u, int(ordered >> 32) == high ? unsigned(ordered) : 0u);
    const long long found = (long long)high << 32 | low;
    return __longlong_as_double(found < 0 ? found ^ 0x7fffffffffffffffll : found);
}

// Counts a token that was written. No thread waits for the memory.
__device__ inline void count_token(const Work& work, long long at) {
    atomicAdd(work.seen + at, 1);
    atomicAdd(work.written + at, 1);
}

constexpr int EACH = (VOCAB + LANES - 1) / LANES;  // tokens of a lane

// Sets the weights that the filters leave out to 0. A lane has EACH tokens that follow each other. By one warp.
// memory: VOCAB numbers.
__device__ inline void filter(double top_k, double typical_p, double top_p, double min_p, double* memory,
                              float (&of_lane)[EACH]) {
    const auto larger = [](double a, double b) { return a > b ? a : b; };
    const auto smaller = [](double a, double b) { return a < b ? a : b; };
    const auto plus = [](double a, double b) { return a + b; };
    const int first = threadIdx.x % LANES * EACH;
    double weight[EACH];
    UNROLLED(e, EACH) weight[e] = of_lane[e];

    // What the filters keep does not depend on the order of equal weights, so none is sorted: each weight is
    // compared with all.
    double least = 0;
    const auto share_out = [&] {
        __syncwarp();
        UNROLLED(e, EACH)
            if (first + e < VOCAB) memory[first + e] = weight[e];
        __syncwarp();
    };
    if (top_k > 0 && top_k < VOCAB) {
        share_out();
#pragma unroll 1
        for (int e = 0; e < EACH; e++) {
            int above = 0, as_large = 0;
#pragma unroll 1
            for (int j = 0; j < VOCAB; j++) above += memory[j] > weight[e], as_large += memory[j] >= weight[e];
            if (above < top_k && top_k <= as_large && first + e < VOCAB) least = weight[e];
        }
        least = over_warp(least, larger);
    }
    if (typical_p < 1) {
        share_out();
        double total = 0, mean = 0, farthest = 0;
        const auto kept = [&](double w) { return w > 0 && w >= least; };
        UNROLLED(e, EACH)
            if (kept(weight[e])) total += weight[e], mean += weight[e] * log(weight[e]);
        total = over_warp(total, plus), mean = over_warp(mean, plus) / total;
        const auto distance = [&](double w) { return fabs(log(w) - mean); };
#pragma unroll 1
        for (int e = 0; e < EACH; e++) {
            if (!kept(weight[e])) continue;
            double nearer = 0;  // the weight of all tokens that are nearer
#pragma unroll 1
            for (int j = 0; j < VOCAB; j++)
                if (kept(memory[j]) && distance(memory[j]) < distance(weight[e])) nearer += memory[j];
            if (nearer < typical_p * total) farthest = larger(farthest, distance(weight[e]));
        }
        farthest = over_warp(farthest, larger);
        UNROLLED(e, EACH)
            if (!kept(weight[e]) || distance(weight[e]) > farthest) weight[e] = 0;
    }
    if (top_p < 1) {
        share_out();
        double total = 0, lowest = INF;
        UNROLLED(e, EACH) total += weight[e] >= least ? weight[e] : 0;
        total = over_warp(total, plus);
#pragma unroll 1
        for (int e = 0; e < EACH; e++) {
            if (!(weight[e] >= least) || first + e >= VOCAB) continue;
            double above = 0;
#pragma unroll 1
            for (int j = 0; j < VOCAB; j++) above += memory[j] > weight[e] ? memory[j] : 0;
            if (above < top_p * total) lowest = smaller(lowest, weight[e]);
        }
        least = over_warp(lowest, smaller);
    }
    if (min_p > 0) {
        double highest = 0;
        UNROLLED(e, EACH) highest = larger(highest, weight[e]);
        least = larger(least, min_p * over_warp(highest, larger));
    }
    UNROLLED(e, EACH) of_lane[e] = weight[e] >= least ? float(weight[e]) : 0;
}

// The token that `uniform` falls on among weights, 0 where a token is left out; -1 if all are. By one warp.
__device__ inline int pick(const float (&weight)[EACH], float uniform) {
    const int lane = threadIdx.x % LANES, first = lane * EACH;
    float sum = 0;
    UNROLLED(e, EACH) sum += weight[e];
    float before = sum;  // the sum of all lanes up to this one
#pragma unroll
    for (int far = 1; far < LANES; far *= 2) {
        const float other = __shfl_sync(~0u, before, max(lane - far, 0));
        if (lane >= far) before += other;
    }
    const float point = uniform * __shfl_sync(~0u, before, LANES - 1);
    float reached = before - sum;
    int found = VOCAB, last = -1;  // last: if rounding leaves a remainder
    UNROLLED(e, EACH) {
        if (weight[e] == 0) continue;
        reached += weight[e], last = first + e;
        if (found == VOCAB && reached > point) found = first + e;
    }
    found = __reduce_min_sync(~0u, found);
    return found < VOCAB ? found : __reduce_max_sync(~0u, last);
}

// The token that `uniform` falls on, by generation/csrc/sampling.cpp's rules; -1 if the logits hold NaN, or the
// largest is infinite. By one warp. memory: VOCAB numbers.
__device__ inline int choose(const float* logits, const double* settings, const double* bias, const int* seen,
                             const int* written, double uniform, double* memory) {
    const double temperature = settings[0], top_k = settings[1], top_p = settings[2], min_p = settings[3],
                 typical_p = settings[4], repetition = settings[5], presence = settings[6],
                 frequency = settings[7];
    const bool adjusted = settings[8] != 0, penalised = presence != 0 || frequency != 0;
    const int lane = threadIdx.x % LANES, first = lane * EACH;
    float logit[EACH], largest = -INF;
    bool numbers = true;
    UNROLLED(e, EACH) {
        logit[e] = first + e < VOCAB ? logits[first + e] : -INF;
        numbers = numbers && logit[e] == logit[e];
        largest = fmaxf(largest, logit[e]);
    }
    float below[EACH];  // less the largest
    if (adjusted) {
        double weight[EACH], best = -INF;
        UNROLLED(e, EACH) {
            const int i = first + e;
            double w = logit[e];
            if (i < VOCAB) {
                if (repetition != 1 && __ldcg(seen + i)) w = w > 0 ? w / repetition : w * repetition;
                if (const int count = penalised ? __ldcg(written + i) : 0) w -= count * frequency + presence;
                w += bias[i];
            }
            weight[e] = w, best = best > w ? best : w;
        }
        best = largest_of_warp(best), largest = float(best);
        UNROLLED(e, EACH) below[e] = float(weight[e] - best);
    } else {
        largest = ::largest<1, LANES>(largest);
        UNROLLED(e, EACH) below[e] = logit[e] - largest;
    }
    if (!__all_sync(~0u, numbers) || largest == INF || largest == -INF) return -1;
    if (temperature == 0) {
        int likeliest = VOCAB;
        UNROLLED(e, EACH)
            if (below[e] == 0) likeliest = min(likeliest, first + e);
        return __reduce_min_sync(~0u, likeliest);
    }
    // float32's exp and sums err by less than the logits do.
    float kept[EACH];                                                // 0 where a filter leaves a token out
    const float inverse = fmaxf(fminf(settings[9], 3e38f), 1e-30f);  // of the temperature; 0 stays 0
    UNROLLED(e, EACH) kept[e] = expf(below[e] * inverse);
    if (top_k > 0 || typical_p < 1 || top_p < 1 || min_p > 0)
        filter(top_k, typical_p, top_p, min_p, memory, kept);
    return pick(kept, float(uniform));
}
