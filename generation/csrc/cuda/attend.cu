// Attention of one new token of each of many texts, over caches in slots. The lengths are read from the GPU's
// memory, so one CUDA graph serves all of them.
//
// A block has a head of a text. It stores the new key and value, and part 4's online softmax goes over the
// keys: PARTS lanes take a key, a warp WARP_KEYS of them, STRIP times before it needs them; the warps take
// turns. Their results are merged in shared memory. Every key and value is read once: 2 length HEAD_DIM
// elements.
//
// Macros: FORMAT of call.h for the keys and values; HEAD_DIM, a multiple of 4 up to 128; THREADS.
#include "call.h"

constexpr int LANES = 32, WARPS = THREADS / LANES, STRIP = 4;
constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
constexpr int PARTS = power_of_two(HEAD_DIM / 4), WARP_KEYS = LANES / PARTS;
constexpr int ROUND = WARPS * WARP_KEYS;  // keys until a lane's next one

// Of `texts` texts, each with a block for every head.
struct Step {
    const float *q, *k, *v;            // (texts, heads, HEAD_DIM), of the new tokens
    Element *keys, *values;            // (slots, heads, capacity, HEAD_DIM)
    const long long *slots, *lengths;  // (texts): where a text is, and its tokens in the cache
    float* out;                        // (texts, heads, HEAD_DIM)
    int heads, capacity, row;          // row: numbers from one text's q, k or v to the next one's
    float scale;                       // of the scores, times log2(e)
};

__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline float4 load4(const unsigned short* p) {
    const uint2 bits = *reinterpret_cast<const uint2*>(p);
    return {to_float((unsigned short)bits.x), to_float((unsigned short)(bits.x >> 16)),
            to_float((unsigned short)bits.y), to_float((unsigned short)(bits.y >> 16))};
}
// As the cache keeps it: to the nearest, ties to even. PTX has an instruction for it from sm_80 on.
__device__ inline float rounded(float x) {
#if FORMAT == FP32
    return x;
#else
    const unsigned bits = __float_as_uint(x);
    return x != x ? x : __uint_as_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
#endif
}
__device__ inline float4 rounded(float4 x) { return {rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w)}; }
// Stores rounded numbers.
__device__ inline void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }
__device__ inline void store4(unsigned short* p, float4 x) {
    const unsigned bits[] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                             __float_as_uint(x.w)};
    *reinterpret_cast<uint2*>(p) = {bits[0] >> 16 | (bits[1] & 0xffff0000u),
                                    bits[2] >> 16 | (bits[3] & 0xffff0000u)};
}

extern "C" __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ Step step) {
    __shared__ float sums[WARPS][HEAD_DIM], states[WARPS][2];
    const int text = blockIdx.x / step.heads, head = blockIdx.x % step.heads;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, e = 4 * (lane % PARTS);
    const bool has = e < HEAD_DIM;  // whether the lane has numbers, or only fills up a power of two
    const int length = step.lengths[text];
    const long long at = (long long)text * step.row + head * HEAD_DIM + e;
    const long long cached = (step.slots[text] * step.heads + head) * step.capacity * HEAD_DIM + e;
    Element *K = step.keys + cached, *V = step.values + cached;
    float4 q = {}, new_k = {}, new_v = {};
    if (has) {
        q = load4(step.q + at), new_k = rounded(load4(step.k + at)), new_v = rounded(load4(step.v + at));
        q = {q.x * step.scale, q.y * step.scale, q.z * step.scale, q.w * step.scale};
    }
    if (has && threadIdx.x < PARTS) {
        store4(K + (long long)length * HEAD_DIM, new_k);
        store4(V + (long long)length * HEAD_DIM, new_v);
    }

    float m = -INF, l = 0;
    float4 o = {};
    for (int j0 = warp * WARP_KEYS; j0 <= length; j0 += STRIP * ROUND) {
        float4 k[STRIP], v[STRIP];
        UNROLLED(i, STRIP) {
            const int j = j0 + i * ROUND + lane / PARTS;
            const bool held = j < length && has;
            k[i] = held ? load4(K + (long long)j * HEAD_DIM) : new_k;
            v[i] = held ? load4(V + (long long)j * HEAD_DIM) : new_v;
        }
        float score[STRIP], highest = m;
        UNROLLED(i, STRIP) {
            const float product = sum<1, PARTS>(q.x * k[i].x + q.y * k[i].y + q.z * k[i].z + q.w * k[i].w);
            score[i] = j0 + i * ROUND + lane / PARTS <= length ? product : -INF;
            highest = fmaxf(highest, score[i]);
        }
        const float correction = exp2_approx(m - subtrahend(highest));
        m = highest, l *= correction;
        o = {o.x * correction, o.y * correction, o.z * correction, o.w * correction};
        UNROLLED(i, STRIP) {
            const float p = exp2_approx(score[i] - subtrahend(m));
            l += p;
            o.x = fmaf(p, v[i].x, o.x), o.y = fmaf(p, v[i].y, o.y);
            o.z = fmaf(p, v[i].z, o.z), o.w = fmaf(p, v[i].w, o.w);
        }
    }

    // Merge the lanes of a warp, then the warps.
    const float all = largest<PARTS, LANES>(m), factor = exp2_approx(m - subtrahend(all));
    l = sum<PARTS, LANES>(l * factor);
    o = {sum<PARTS, LANES>(o.x * factor), sum<PARTS, LANES>(o.y * factor), sum<PARTS, LANES>(o.z * factor),
         sum<PARTS, LANES>(o.w * factor)};
    if (has && lane < PARTS) {
        float* to = &sums[warp][e];
        to[0] = o.x, to[1] = o.y, to[2] = o.z, to[3] = o.w;
    }
    if (lane == 0) states[warp][0] = all, states[warp][1] = l;
    __syncthreads();
    for (int i = threadIdx.x; i < HEAD_DIM; i += THREADS) {
        float highest = -INF, total = 0, result = 0;
        UNROLLED(w, WARPS) highest = fmaxf(highest, states[w][0]);
        UNROLLED(w, WARPS) {
            const float share = exp2_approx(states[w][0] - subtrahend(highest));
            total = fmaf(states[w][1], share, total), result = fmaf(sums[w][i], share, result);
        }
        step.out[((long long)text * step.heads + head) * HEAD_DIM + i] = result / total;
    }
}
