// The arguments of every kernel and the functions that the kernels share. No header of CUDA is needed: NVRTC
// compiles each file alone, with these macros, which cuda/gpu.py and cuda/tiles.py set, and those of the
// kernel itself:
//   FORMAT    0, 1 or 2: q, k, v and the output are float32, bfloat16 or float16
//   HEAD_DIM  d, a multiple of what the kernel's row in cuda/kernels.py asks for
//   BR, BC    queries and keys of a tile
//   THREADS   of a block
#pragma once

#define FP32 0
#define BF16 1
#define FP16 2

#if FORMAT == FP32
using Element = float;
#else
using Element = unsigned short;  // the bits
#endif

// The name of a 16-bit format in PTX
#if FORMAT == FP16
#define KIND "f16"
#else
#define KIND "bf16"
#endif

// Elements from one batch, head and row to the next. The numbers of a row lie side by side.
struct Strides {
    long long batch, head, row;
};

// softmax(scale q k^T) v for every batch and head. q is (B, H, Nq, d); k and v are (B, H, Nk, d); out is
// (B, H, Nq, d), contiguous; lse, (B, H, Nq), gets the rows' logsumexp unless it is null.
//   causal  query i sees the keys j <= i + Nk - Nq. The score of a masked key becomes -inf and its weight 0. A
//           NaN or infinity in its value may reach the rows of the same tile, because 0 times NaN is NaN.
//   scale   of the scores, times log2(e), because the softmax takes powers of two
struct Call {
    const Element *q, *k, *v;
    Element* out;
    float* lse;
    Strides q_strides, k_strides, v_strides;
    int batches, heads, Nq, Nk;
    int causal;
    float scale;
};

// A loop that is unrolled, so that arrays which i indexes can be in registers.
#define UNROLLED(i, count) _Pragma("unroll") for (int i = 0; i < (count); ++i)

constexpr float LN2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)

// ex2.approx: 2^x by the multiprocessor's unit for such functions (MUFU), to about 2 units in the last place;
// 2^-inf is 0. Source: PTX ISA, 'Floating Point Instructions: ex2'.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_approx(float x) {  // to one unit in the last place
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The 32-bit address within shared memory that PTX instructions take.
__device__ inline unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// An element as float32, and float32 rounded to an element (.rn: to nearest, ties to even).
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(unsigned short bits) {
#if FORMAT == FP16
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    return __uint_as_float((unsigned)bits << 16);
#endif
}

__device__ inline Element to_element(float x) {
#if FORMAT == FP32
    return x;
#elif FORMAT == BF16 && __CUDA_ARCH__ < 800  // has no such instruction
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
#else
    unsigned short bits;
    asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#endif
}

// Two numbers rounded to 16 bits in one register, `low` in the lower half. PTX names the upper one first.
__device__ inline unsigned pack(float low, float high) {
#if __CUDA_ARCH__ < 800
    return (unsigned)to_element(low) | (unsigned)to_element(high) << 16;
#else
    unsigned both;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

// What is subtracted from a row's scores: its maximum m, or 0 while the row has seen no key. Its weights are
// then 2^-inf = 0 and not 2^(-inf + inf) = NaN.
__device__ inline float subtrahend(float m) { return m == -INF ? 0.0f : m; }

// The largest of x, and the sum, over the lanes whose numbers differ in the bits from `low` to below `high`.
template <int low, int high>
__device__ inline float largest(float x) {
#pragma unroll
    for (int far = low; far < high; far *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, far));
    return x;
}
template <int low, int high>
__device__ inline float sum(float x) {
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

__device__ inline Block block_at(const Call& call, unsigned head, int first_query) {
    const unsigned b = head / call.heads, h = head % call.heads;
    return {call.q + b * call.q_strides.batch + h * call.q_strides.head,
            call.k + b * call.k_strides.batch + h * call.k_strides.head,
            call.v + b * call.v_strides.batch + h * call.v_strides.head, head, first_query};
}

// The block's own. The grid is flat, because its other dimensions are at most 65,535. A head's tiles are
// neighbours, so that its keys and values stay in the L2 cache; with a causal mask the tiles with most keys
// come first.
__device__ inline Block block_of(const Call& call, int rows) {
    const unsigned tiles = (call.Nq + rows - 1) / rows;
    const unsigned tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
    Block block = block_at(call, head, 0);
    block.first_query = (call.causal ? tiles - 1 - tile : tile) * rows;
    return block;
}

// The block's own, where with a causal mask the tiles with most keys come first over all heads, so that all
// blocks end together. It reads the keys of many heads at a time, which takes more bandwidth.
__device__ inline Block block_across_heads(const Call& call, int rows) {
    if (!call.causal) return block_of(call, rows);
    const unsigned tiles = (call.Nq + rows - 1) / rows, all = call.batches * call.heads;
    return block_at(call, blockIdx.x % all, (tiles - 1 - blockIdx.x / all) * rows);
}

// How many keys a query sees; they are the first ones.
__device__ inline int keys_seen(const Call& call, int query) {
    return call.causal ? min(query + 1 + call.Nk - call.Nq, call.Nk) : call.Nk;
}
