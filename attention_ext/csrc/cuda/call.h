// The arguments of every kernel and shared functions. No CUDA header: NVRTC compiles each file alone, with
// the kernel's macros and these, set by cuda/driver.py and cuda/tiles.py:
//   FORMAT    0, 1 or 2: q, k, v and the output are float32, bfloat16 or float16
//   HEAD_DIM  d, a multiple of what the kernel's row in cuda/kernels.py asks for
//   BR, BC    queries and keys of a tile
//   THREADS   of a block
//   RULES     the rules of attention_ext/rules.py that are compiled in, a sum of those in arguments.h; or 0
#pragma once
#ifndef RULES
#define RULES 0
#endif

#include "arguments.h"

// A loop that is unrolled, so that arrays which i indexes can be in registers.
#define UNROLLED(i, count) _Pragma("unroll") for (int i = 0; i < (count); ++i)

constexpr float LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)

// What is subtracted from a row's scores: m, or 0 before the first key, because 2^(-inf + inf) is NaN.
__device__ inline float subtrahend(float m) { return m == -INF ? 0.0f : m; }

// The largest of x, and the sum, over the lanes whose numbers differ in the bits from `low` to below `high`.
template <int low, int high> __device__ inline float largest(float x) {
#pragma unroll
    for (int far = low; far < high; far *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, far));
    return x;
}
template <int low, int high> __device__ inline float sum(float x) {
#pragma unroll
    for (int far = low; far < high; far *= 2) x += __shfl_xor_sync(~0u, x, far);
    return x;
}

// A tile of queries, and where its head begins.
struct Block {
    const Element *q, *k, *v;
    long long head;  // of all batches
    int first_query;
};

// How many heads of q read a head of k and v.
__device__ inline unsigned heads_of_keys(const Call& call) {
#if RULES
    return call.rules.group;
#else
    return 1;
#endif
}

__device__ inline Block block_at(const Call& call, unsigned head, int first_query) {
    const unsigned b = head / call.heads, h = head % call.heads, shared = h / heads_of_keys(call);
    return {call.q + b * call.q_strides.batch + h * call.q_strides.head,
            call.k + b * call.k_strides.batch + shared * call.k_strides.head,
            call.v + b * call.v_strides.batch + shared * call.v_strides.head, head, first_query};
}

// The block's own. The grid is flat: its other dimensions are at most 65,535. A head's tiles are neighbours,
// for the L2 cache; under a causal mask the tiles with most keys come first.
__device__ inline Block block_of(const Call& call, int rows) {
    const unsigned tiles = (call.Nq + rows - 1) / rows;
    const unsigned tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
    Block block = block_at(call, head, 0);
    block.first_query = (call.causal ? tiles - 1 - tile : tile) * rows;
    return block;
}

// Under a mask, tiles with most keys first over all heads: blocks end together, but it takes more bandwidth.
__device__ inline Block block_across_heads(const Call& call, int rows) {
    if (!call.causal) return block_of(call, rows);
    const unsigned tiles = (call.Nq + rows - 1) / rows, all = call.batches * call.heads;
    return block_at(call, blockIdx.x % all, (tiles - 1 - blockIdx.x / all) * rows);
}

// The end of the keys that a query sees; without rules they are the first ones.
__device__ inline int keys_seen(const Call& call, int query) {
#if RULES
    if (call.rules.right < call.Nq - 1 - query) return max(query + 1 + call.Nk - call.Nq + call.rules.right, 0);
    return call.Nk;
#else
    return call.causal ? min(query + 1 + call.Nk - call.Nq, call.Nk) : call.Nk;
#endif
}
