// The choice of a token from its logits, by one warp.
#pragma once

#include "decoder.h"

// Numbers of other lanes: CUDA's functions for double need a header.
__device__ inline double from_lane(double x, int lane) {
    return __hiloint2double(__shfl_sync(~0u, __double2hiint(x), lane),
                            __shfl_sync(~0u, __double2loint(x), lane));
}

template <class Merge> __device__ inline double over_warp(double x, const Merge& merge) {
#pragma unroll
    for (int far = LANES / 2; far > 0; far /= 2) x = merge(x, from_lane(x, (threadIdx.x % LANES) ^ far));
    return x;
}

// The largest of the lanes' numbers: first its upper half, in an order that an integer has, then its lower one.
__device__ inline double largest_of_warp(double x) {
    const long long bits = __double_as_longlong(x), ordered = bits < 0 ? bits ^ 0x7fffffffffffffffll : bits;
    const int high = __reduce_max_sync(~0u, int(ordered >> 32));
    const unsigned low = __reduce_max_sync(~0u, int(ordered >> 32) == high ? unsigned(ordered) : 0u);
    const long long largest = (long long)high << 32 | low;
    return __longlong_as_double(largest < 0 ? largest ^ 0x7fffffffffffffffll : largest);
}

constexpr int OF_LANE = (VOCAB + LANES - 1) / LANES;  // tokens of a lane

// What of a text's settings leaves tokens out.
struct Filters {
    const double* settings;
    double top_k = settings[TOP_K];
    double top_p = settings[TOP_P];
    double min_p = settings[MIN_P];
    double typical_p = settings[TYPICAL_P];
    __device__ bool any() const { return top_k > 0 || typical_p < 1 || top_p < 1 || min_p > 0; }
};

// Sets the weights that the filters leave out to 0, by one warp; a lane's OF_LANE tokens are neighbours.
__device__ inline void filter(const Filters& by, double* memory, float (&of_lane)[OF_LANE]) {
    const auto larger = [](double a, double b) { return a > b ? a : b; };
    const auto smaller = [](double a, double b) { return a < b ? a : b; };
    const auto plus = [](double a, double b) { return a + b; };
    const int first = threadIdx.x % LANES * OF_LANE;
    double weight[OF_LANE];
    UNROLLED(e, OF_LANE) weight[e] = of_lane[e];

    // Each weight is compared with all, not sorted: the order of equal weights must not matter.
    double least = 0;
    const auto share_out = [&] {
        __syncwarp();
        UNROLLED(e, OF_LANE)
            if (first + e < VOCAB) memory[first + e] = weight[e];
        __syncwarp();
    };
    if (by.top_k > 0 && by.top_k < VOCAB) {
        share_out();
#pragma unroll 1
        for (int e = 0; e < OF_LANE; e++) {
            int above = 0, as_large = 0;
#pragma unroll 1
            for (int j = 0; j < VOCAB; j++) above += memory[j] > weight[e], as_large += memory[j] >= weight[e];
            if (above < by.top_k && by.top_k <= as_large && first + e < VOCAB) least = weight[e];
        }
        least = over_warp(least, larger);
    }
    if (by.typical_p < 1) {
        share_out();
        double total = 0, mean = 0, farthest = 0;
        const auto kept = [&](double w) { return w > 0 && w >= least; };
        UNROLLED(e, OF_LANE)
            if (kept(weight[e])) {
                total += weight[e];
                mean += weight[e] * log(weight[e]);
            }
        total = over_warp(total, plus);
        mean = over_warp(mean, plus) / total;
        const auto distance = [&](double w) { return fabs(log(w) - mean); };
#pragma unroll 1
        for (int e = 0; e < OF_LANE; e++) {
            if (!kept(weight[e])) continue;
            double nearer = 0;  // the weight of all tokens that are nearer
#pragma unroll 1
            for (int j = 0; j < VOCAB; j++)
                if (kept(memory[j]) && distance(memory[j]) < distance(weight[e])) nearer += memory[j];
            if (nearer < by.typical_p * total) farthest = larger(farthest, distance(weight[e]));
        }
        farthest = over_warp(farthest, larger);
        UNROLLED(e, OF_LANE)
            if (!kept(weight[e]) || distance(weight[e]) > farthest) weight[e] = 0;
    }
    if (by.top_p < 1) {
        share_out();
        double total = 0, lowest = INF;
        UNROLLED(e, OF_LANE) total += weight[e] >= least ? weight[e] : 0;
        total = over_warp(total, plus);
#pragma unroll 1
        for (int e = 0; e < OF_LANE; e++) {
            if (!(weight[e] >= least) || first + e >= VOCAB) continue;
            double above = 0;
#pragma unroll 1
            for (int j = 0; j < VOCAB; j++) above += memory[j] > weight[e] ? memory[j] : 0;
            if (above < by.top_p * total) lowest = smaller(lowest, weight[e]);
        }
        least = over_warp(lowest, smaller);
    }
    if (by.min_p > 0) {
        double highest = 0;
        UNROLLED(e, OF_LANE) highest = larger(highest, weight[e]);
        least = larger(least, by.min_p * over_warp(highest, larger));
    }
    UNROLLED(e, OF_LANE) of_lane[e] = weight[e] >= least ? float(weight[e]) : 0;
}

// The token that `uniform` falls on among weights, 0 where a token is left out; -1 if all are. By one warp.
__device__ inline int pick(const float (&weight)[OF_LANE], float uniform) {
    const int lane = threadIdx.x % LANES, first = lane * OF_LANE;
    float sum = 0;
    UNROLLED(e, OF_LANE) sum += weight[e];
    float before = sum;  // the sum of all lanes up to this one
#pragma unroll
    for (int far = 1; far < LANES; far *= 2) {
        const float other = __shfl_sync(~0u, before, max(lane - far, 0));
        if (lane >= far) before += other;
    }
    const float point = uniform * __shfl_sync(~0u, before, LANES - 1);
    float reached = before - sum;
    int token = VOCAB, last = -1;  // last: if rounding leaves a remainder
    UNROLLED(e, OF_LANE) {
        if (weight[e] == 0) continue;
        reached += weight[e];
        last = first + e;
        if (token == VOCAB && reached > point) token = first + e;
    }
    token = __reduce_min_sync(~0u, token);
    return token < VOCAB ? token : __reduce_max_sync(~0u, last);
}

// The token that `uniform` falls on, by generation/csrc/sampling.cpp's rules; -1 if the logits hold NaN, or the
// largest is infinite. By one warp. at: where the slot's numbers of tokens begin. memory: VOCAB numbers.
__device__ inline int choose(const Work& work, long long at, const float* logits, const double* settings,
                             double uniform, double* memory) {
    const Filters filters{settings};
    const double temperature = settings[TEMPERATURE];
    const double repetition = settings[REPETITION_PENALTY];
    const double presence = settings[PRESENCE_PENALTY];
    const double frequency = settings[FREQUENCY_PENALTY];
    const bool adjusted = settings[ADJUSTED] != 0, penalised = presence != 0 || frequency != 0;
    const int lane = threadIdx.x % LANES, first = lane * OF_LANE;
    float logit[OF_LANE], largest = -INF;
    bool numbers = true;
    UNROLLED(e, OF_LANE) {
        logit[e] = first + e < VOCAB ? logits[first + e] : -INF;
        numbers = numbers && logit[e] == logit[e];
        largest = fmaxf(largest, logit[e]);
    }
    float below[OF_LANE];  // less the largest
    if (adjusted) {
        double weight[OF_LANE], best = -INF;
        UNROLLED(e, OF_LANE) {
            const int i = first + e;
            double w = logit[e];
            if (i < VOCAB) {
                if (repetition != 1 && __ldcg(work.seen + at + i)) w = w > 0 ? w / repetition : w * repetition;
                if (const int count = penalised ? __ldcg(work.written + at + i) : 0)
                    w -= count * frequency + presence;
                w += work.bias[at + i];
            }
            weight[e] = w;
            best = best > w ? best : w;
        }
        best = largest_of_warp(best);
        largest = float(best);
        UNROLLED(e, OF_LANE) below[e] = float(weight[e] - best);
    } else {
        largest = ::largest<1, LANES>(largest);
        UNROLLED(e, OF_LANE) below[e] = logit[e] - largest;
    }
    if (!__all_sync(~0u, numbers) || largest == INF || largest == -INF) return -1;
    if (temperature == 0) {
        int likeliest = VOCAB;
        UNROLLED(e, OF_LANE)
            if (below[e] == 0) likeliest = min(likeliest, first + e);
        return __reduce_min_sync(~0u, likeliest);
    }
    // float32's exp and sums err by less than the logits do.
    float kept[OF_LANE];  // 0 where a filter leaves a token out
    const float inverse = fmaxf(fminf(settings[INVERSE_TEMPERATURE], 3e38f), 1e-30f);  // 0 stays 0
    UNROLLED(e, OF_LANE) kept[e] = expf(below[e] * inverse);
    if (filters.any()) filter(filters, memory, kept);
    return pick(kept, float(uniform));
}

// Begins a row with the tokens chosen in the row before; returns whether any is to be read. By all threads.
template <class Shared> __device__ inline bool begin_row(Shared& s, int row, int texts) {
    const int thread = threadIdx.x;
    if (row > 0 && thread < texts) {
        s.length[thread] += s.token[thread] >= 0;
        s.token[thread] = s.next[thread];
    }
    __syncthreads();
    bool reads = false;
    for (int t = 0; t < texts; t++) reads = reads || s.token[t] >= 0;
    return reads;
}

// Text t's logits, those of the slot if it reads no token. They are kept if it is the last row, and given away
// if work.every asks for them. By one warp.
template <class Shared>
__device__ inline float* logits_of(const Work& work, Shared& s, int t, int place, bool last) {
    float *logits = s.various[t], *kept = work.logits + (long long)s.slot[t] * VOCAB;
    const bool known = s.token[t] < 0;
    for (int i = threadIdx.x % LANES; i < VOCAB && (known || last || work.every); i += LANES) {
        if (known) logits[i] = kept[i];
        if (work.every) work.every[(long long)place * VOCAB + i] = logits[i];
        if (last) kept[i] = logits[i];
    }
    __syncwarp();
    return logits;
}

// Writes a token that was chosen, and counts it. By one lane, which does not wait for the memory.
__device__ inline void write_token(const Work& work, long long at, int place, int token) {
    work.chosen[place] = token;
    if (token < 0) return;
    atomicAdd(work.seen + at + token, 1);
    atomicAdd(work.written + at + token, 1);
}
