// What the decoder's kernels share: quads of numbers, and part 4's online softmax in a warp.
//
// Macros: FORMAT of call.h for the keys and values; HEAD_DIM; THREADS of a block.
#pragma once

#include "call.h"

constexpr int LANES = 32, WARPS = THREADS / LANES;
constexpr int PARTIAL = HEAD_DIM + 4;  // numbers of a partial result: O, not divided by its sum; m and l

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline float4 load4(const unsigned short* p) {  // bfloat16
    const uint2 bits = *reinterpret_cast<const uint2*>(p);
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
            __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ inline void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }

__device__ inline float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ inline float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ inline float4 operator*(float4 a, float b) { return {a.x * b, a.y * b, a.z * b, a.w * b}; }
__device__ inline float4 operator-(float4 a, float b) { return {a.x - b, a.y - b, a.z - b, a.w - b}; }

__device__ inline void add_multiple(float4& sum, float a, float4 x) {
    sum.x = fmaf(a, x.x, sum.x);
    sum.y = fmaf(a, x.y, sum.y);
    sum.z = fmaf(a, x.z, sum.z);
    sum.w = fmaf(a, x.w, sum.w);
}

__device__ inline float dot(float sum, float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// As the cache keeps them.
__device__ inline float rounded(float x) { return to_float(to_element(x)); }
__device__ inline float4 rounded(float4 x) { return {rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w)}; }

// A row's state in a lane, which has 4 * quads columns of O.
template <int quads> struct State {
    float m = -INF, l = 0;
    float4 o[quads] = {};

    // m <- top, P <- 2^(S - m), l <- l + rowsum(P), O <- O + P V. top: the largest of m and the scores.
    // value(j, c): quad c of the lane's part of value j.
    template <int keys, class Value>
    __device__ inline void add(const float (&score)[keys], float top, const Value& value) {
        const float correction = exp2_approx(m - subtrahend(top));
        m = top;
        l *= correction;
        UNROLLED(c, quads) o[c] = o[c] * correction;
        UNROLLED(j, keys) {
            const float p = exp2_approx(score[j] - subtrahend(m));
            l += p;
            UNROLLED(c, quads) add_multiple(o[c], p, value(j, c));
        }
    }

    // Merges the lanes that have the same columns, which every `lanes`-th lane has, and stores the result.
    template <int lanes> __device__ inline void store(float* output, float* state) {
        const int lane = threadIdx.x % LANES;
        const float top = largest<lanes, LANES>(m), factor = exp2_approx(m - subtrahend(top));
        UNROLLED(c, quads) {
            const float4 x = o[c] * factor;
            const float4 total = {sum<lanes, LANES>(x.x), sum<lanes, LANES>(x.y), sum<lanes, LANES>(x.z),
                                  sum<lanes, LANES>(x.w)};
            if (lane < lanes && 4 * quads * lane < HEAD_DIM) store4(output + 4 * (quads * lane + c), total);
        }
        const float total = sum<lanes, LANES>(l * factor);
        if (lane == 0) {
            state[0] = top;
            state[1] = total;
        }
    }
};

// A quad of a row's O, m and l of `count` partial results: of each the quad is at `output`, and m and l at
// `state`; those of the next are `pitch` numbers further.
template <int count> __device__ inline State<1> merged(const float* output, const float* state, int pitch) {
    State<1> row;
    UNROLLED(n, count) row.m = fmaxf(row.m, state[n * pitch]);
    UNROLLED(n, count) {
        const float factor = exp2_approx(state[n * pitch] - subtrahend(row.m));
        row.l = fmaf(state[n * pitch + 1], factor, row.l);
        add_multiple(row.o[0], factor, load4(output + n * pitch));
    }
    return row;
}
