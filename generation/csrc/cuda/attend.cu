// Attention of one new token of each of many texts, over caches in slots. Lengths are read from GPU memory,
// so one CUDA graph serves all.
//
// A block has a head of a text. It stores the new key and value, and part 4's online softmax goes over the
// keys: KEY_LANES lanes take a key, a warp WARP_KEYS of them; the warps' results are merged in shared memory.
// Each key and value is read once. Macros: online.h's; HEAD_DIM is a multiple of 4 up to 128.
#include "online.h"

constexpr int STRIP = 4;
constexpr int KEY_LANES = power_of_two(HEAD_DIM / 4), WARP_KEYS = LANES / KEY_LANES;
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

__device__ inline void store4(unsigned short* p, float4 x) {
    *reinterpret_cast<uint2*>(p) = {pack(x.x, x.y), pack(x.z, x.w)};
}

extern "C" __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ Step step) {
    __shared__ __align__(16) float results[WARPS][PARTIAL];
    const int text = blockIdx.x / step.heads, head = blockIdx.x % step.heads;
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, column = 4 * (lane % KEY_LANES);
    const bool has = column < HEAD_DIM;  // whether the lane has numbers, or only fills up a power of two
    const int length = step.lengths[text];
    const long long at = (long long)text * step.row + head * HEAD_DIM + column;
    const long long cached = (step.slots[text] * step.heads + head) * step.capacity * HEAD_DIM + column;
    Element *K = step.keys + cached, *V = step.values + cached;
    float4 q = {}, new_k = {}, new_v = {};
    if (has) {
        q = load4(step.q + at) * step.scale;
        new_k = rounded(load4(step.k + at)), new_v = rounded(load4(step.v + at));
    }
    if (has && threadIdx.x < KEY_LANES) {
        store4(K + (long long)length * HEAD_DIM, new_k);
        store4(V + (long long)length * HEAD_DIM, new_v);
    }

    State<1> row;
    for (int j0 = warp * WARP_KEYS; j0 <= length; j0 += STRIP * ROUND) {
        float4 k[STRIP], v[STRIP];
        UNROLLED(i, STRIP) {
            const int j = j0 + i * ROUND + lane / KEY_LANES;
            const bool held = j < length && has;
            k[i] = held ? load4(K + (long long)j * HEAD_DIM) : new_k;
            v[i] = held ? load4(V + (long long)j * HEAD_DIM) : new_v;
        }
        float score[STRIP], top = row.m;
        UNROLLED(i, STRIP) {
            const float product = sum<1, KEY_LANES>(dot(0, q, k[i]));
            score[i] = j0 + i * ROUND + lane / KEY_LANES <= length ? product : -INF;
            top = fmaxf(top, score[i]);
        }
        row.add(score, top, [&](int j, int) { return v[j]; });
    }
    row.store<KEY_LANES>(results[warp], results[warp] + HEAD_DIM);
    __syncthreads();
    const int c = 4 * threadIdx.x;
    if (c >= HEAD_DIM) return;
    const State<1> all = merged<WARPS>(results[0] + c, results[0] + HEAD_DIM, PARTIAL);
    const float4 o = all.o[0];
    store4(step.out + ((long long)text * step.heads + head) * HEAD_DIM + c,
           {o.x / all.l, o.y / all.l, o.z / all.l, o.w / all.l});
}
