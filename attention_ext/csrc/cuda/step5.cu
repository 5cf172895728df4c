// Step 5: the tensor cores, with mma.sync (FlashAttention-2); float32 as three products of tf32 parts.
// Source: Dao 2023, arXiv:2307.08691. Least architecture: sm_80.
//
// Shapes: q (B, H, Nq, d), k and v (B, H, Nk, d), out (B, H, Nq, d); every dtype; d is a multiple of 8 up to
//     256; pointers and strides are multiples of 16 bytes. Tiles of BR = 16 M_TILES WARPS queries and BC keys.
// Loop nest: the grid goes over (batch, head) and tiles of queries, a block over tiles of keys, the last first:
//         for chunks of CHUNK keys; every warp has 16 M_TILES queries and all the keys
//             S <- Q K^T                                         tensor cores
//             P <- 2^(scale S - m), l <- l + rowsum(P)           registers; S becomes P without leaving them
//             O <- O + P V                                       tensor cores
//     then O <- O / l, L <- m + log(l).
// Launch: B H ceil(Nq / BR) blocks of 32 WARPS threads.
// Shared memory: K and V, STAGES * 2 * BC * STRIDE bytes, and Q where registers are short, BR * d * 2 bytes (in
//     float32 4, or 8 as two parts). 30, 54 and 100 KiB at d = 32, 64 and 128 in bf16; 68, 98 and 98 in fp32.
//     STRIDE is a row rounded up to an odd number of 16 bytes, against bank conflicts of ldmatrix and 16-byte
//     loads.
// Registers: 164, 255 and 255 at d = 32, 64 and 128 in bf16; 228, 253 and 241 in fp32; sm_90, none spilled at
//     these widths.
// Improves on step 4: an instruction of the tensor cores does 2,048 multiply-adds (1,024 in tf32). The softmax
//     then takes as long as the products, and is kept short:
//   - m is the maximum of some earlier chunk. Only a sum of weights beyond LIMIT raises it. So a score costs a
//     multiply-add, an exponential, an addition and half a conversion; O is seldom rescaled.
//   - With PIPE, the scores of the next chunk and (PIPE 2) the product of the previous one are interleaved with
//     the exponentials. Tensor cores and exponentials work at the same time.
//   - Tiles with hidden keys come first, in a loop of their own. The fast loop has no mask.
//   - The fast loop does not look for NaN or infinity. A row whose result is not finite is computed again.
//   - Float32: x = high + low, and x y = high high + high low + low high, each exact in tf32 products. The
//     tensor cores round sums towards zero. Over thousands of keys the error grows to 40 times SDPA's, so only
//     sums of 32 columns or one chunk of keys are left to them.
// Bound: in bf16 the exponentials at d = 32, shared memory from d = 64 on; in fp32 the tensor cores, and shared
//     memory at d = 128. In bf16 at d = 128 O takes 128 registers a thread, so Q lies in shared memory and is
//     read again for every chunk. Chunks of 64 keys make that 6 of 38 GiB moved, chunks of 16 would 25 of 56;
//     they leave no registers for a second chunk, so PIPE is 0 and the other block's products run beside the
//     exponentials.
// Command: python gpt.py bench step5,step6,sdpa-flash,sdpa-cudnn --device cuda --dtype bf16 -d 32,64,128
//          --mask none,causal --l2 warm -r 5
//          python gpt.py bench step3,step4,step5,sdpa-efficient,sdpa-math --device cuda -d 32,64,128
//          --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H200, (100, 1, 4096, d), TFLOP/s at d = 32, 64 and 128; in brackets over SDPA's flash
//     backend in bf16, over its efficient backend in fp32:
//         bf16, no mask  294 (1.40), 345 (1.17), 338 (1.04)
//         bf16, causal   250 (1.29), 310 (1.12), 312 (1.02)
//         fp32, no mask  67.1 (3.24), 71.0 (1.99), 59.7 (1.28)
//         fp32, causal   61.5 (3.14), 65.6 (1.95), 56.8 (1.27)
//     In fp32 that is 1.73, 1.68 and 1.37 times step 4; causal 1.56, 1.55 and 1.30 times.
#include "call.h"
#include "mma.h"

// Sizes
#ifndef WARPS
#define WARPS 4  // warps of a block
#endif
#ifndef M_TILES
#define M_TILES 2  // a warp has 16 M_TILES queries
#endif
#ifndef BC
#define BC 64  // keys of a tile in shared memory
#endif
#ifndef CHUNK
#define CHUNK 16  // keys whose scores are in registers at a time
#endif
#ifndef STAGES
#define STAGES 3  // tiles in shared memory
#endif
// 0: one chunk after the other; 1: the next scores beside this softmax; 2: also the previous product
#ifndef PIPE
#define PIPE 2
#endif
#ifndef Q_SHARED
#define Q_SHARED 0  // the queries' fragments in shared memory instead of registers
#endif
#ifndef Q_SPLIT
#define Q_SPLIT 1  // float32: the queries are kept as their two parts; 0: split at each use
#endif
#ifndef BLOCKS
#define BLOCKS 2  // resident on a multiprocessor
#endif

constexpr int THREADS = 32 * WARPS, ROWS = 16 * M_TILES, BR = WARPS * ROWS;
constexpr int D = HEAD_DIM, SIZE = sizeof(Element);
constexpr int LANE_ELEMENTS = 16 / SIZE;  // of a 16-byte copy
#if FORMAT == FP32
constexpr int DP = (D + 31) / 32 * 32;      // d as the products see it; the added columns of k and v are 0
constexpr int K_STEP = 8;                   // of a product: numbers summed
constexpr int GROUP = CHUNK >= 32 ? 4 : 2;  // 8-key tiles of scores that share a load of the queries
constexpr int QK_PARTS = (DP / 32) * (CHUNK / 8 / GROUP), PV_PARTS = DP / 32;
#else
constexpr int DP = (D + 15) / 16 * 16;
constexpr int K_STEP = 16;
constexpr int QK_PARTS = DP / 16, PV_PARTS = (CHUNK / 16) * (DP / 16);
#endif
constexpr int STRIDE = ((DP * SIZE / 16) | 1) * 16;  // bytes of a row in shared memory: an odd number of 16
constexpr int TILE = BC * STRIDE, STAGE = 2 * TILE;  // K and V
constexpr int CHUNKS = BC / CHUNK, UNITS = M_TILES * (CHUNK / 8);
constexpr int Q_STEPS = DP / K_STEP, Q_REGISTERS = FORMAT == FP32 && Q_SPLIT ? 8 : 4;
constexpr int Q_BYTES = Q_SHARED ? WARPS * M_TILES * Q_STEPS * Q_REGISTERS * 128 : 0;
// The largest sum of a lane's weights in a chunk. Float16 ends at 65,504: 2^14 leaves a factor of 4. Elsewhere
// 2^24 leaves float32's sums over 2^31 keys far below 2^128, and m seldom moves.
constexpr float LIMIT = FORMAT == FP16 ? 16384.0f : 16777216.0f;

static_assert(BC % CHUNK == 0 && CHUNK % 16 == 0 && STAGES >= (PIPE ? 3 : 2), "tile");
static_assert(PIPE < 2 || CHUNKS >= 2, "a stage is overwritten one chunk after its last use");
static_assert(FORMAT == FP32 || BR <= STAGES * 2 * BC, "the tiles' memory takes the result");

using Scores = float[M_TILES][CHUNK / 8][4];
#if FORMAT == FP32
using Weights = float[M_TILES][CHUNK / 8][4];
#else
using Weights = unsigned[M_TILES][CHUNK / 16][4];
#endif
using Pairs = float[M_TILES][2];  // of a lane's rows g and g + 8 of each tile

// The left operands of Q K^T: for a tile of 16 rows and a step of K_STEP columns four registers, in float32
// with Q_SPLIT eight, the high parts and the low ones.
struct Queries {
#if Q_SHARED
    unsigned fragments;  // address of the lane's first 16 bytes; the next lane's follow
#else
    unsigned fragments[M_TILES][Q_STEPS][Q_REGISTERS];
#endif
    __device__ inline void put(const unsigned (&a)[4], int tile, int step, int part = 0) {
#if Q_SHARED
        store_shared(fragments + ((tile * Q_STEPS + step) * (Q_REGISTERS / 4) + part) * 512,
                     make_uint4(a[0], a[1], a[2], a[3]));
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) fragments[tile][step][4 * part + e] = a[e];
#endif
    }
    __device__ inline void get(unsigned (&a)[4], int tile, int step, int part = 0) const {
#if Q_SHARED
        const uint4 x = reload_shared(fragments + ((tile * Q_STEPS + step) * (Q_REGISTERS / 4) + part) * 512);
        a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = fragments[tile][step][4 * part + e];
#endif
    }
#if FORMAT == FP32
    __device__ inline void put_split(const float (&x)[4], int tile, int step) {
        unsigned high[4], low[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            split(x[e], high[e], low[e]);
            if (!Q_SPLIT) high[e] = __float_as_uint(x[e]);
        }
        put(high, tile, step);
        if (Q_SPLIT) put(low, tile, step, 1);
    }
    __device__ inline void get(unsigned (&high)[4], unsigned (&low)[4], int tile, int step) const {
        get(high, tile, step);
        if (Q_SPLIT)
            get(low, tile, step, 1);
        else
#pragma unroll
            for (int e = 0; e < 4; ++e) split(__uint_as_float(high[e]), high[e], low[e]);
    }
#endif
};

__device__ inline void clear(Scores& S) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][n][e] = 0.0f;
}

#if FORMAT == FP32

// The tensor cores round sums towards zero, an error that grows with the number of products. So they sum only
// 32 columns or one chunk of keys; these sums are added in float32.

// S += Q K^T, GROUP tiles of 8 keys and 32 of the d columns at a time. The sum over d may take any order: of 32
// columns a lane has 8 t to 8 t + 7, in K two 16-byte loads.
__device__ inline void qk_part(Scores& S, const Queries& Q, unsigned k_lane, int part) {
    const int block = part / (CHUNK / 8 / GROUP), n0 = part % (CHUNK / 8 / GROUP) * GROUP;
    float T[M_TILES][GROUP][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned high[GROUP][4], low[GROUP][4];
#pragma unroll
        for (int n = 0; n < GROUP; ++n) {
            const uint4 x = load_shared(k_lane + (n0 + n) * 8 * STRIDE + block * 128 + half * 16);
            split(__uint_as_float(x.x), high[n][0], low[n][0]);
            split(__uint_as_float(x.y), high[n][1], low[n][1]);
            split(__uint_as_float(x.z), high[n][2], low[n][2]);
            split(__uint_as_float(x.w), high[n][3], low[n][3]);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            unsigned a_high[M_TILES][4], a_low[M_TILES][4];
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) Q.get(a_high[i], a_low[i], i, block * 4 + half * 2 + step);
#pragma unroll
            for (int n = 0; n < GROUP; ++n)
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
                    multiply(T[i][n], a_low[i], high[n][2 * step], high[n][2 * step + 1]);
#pragma unroll
            for (int n = 0; n < GROUP; ++n)
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
                    multiply(T[i][n], a_high[i], low[n][2 * step], low[n][2 * step + 1]);
#pragma unroll
            for (int n = 0; n < GROUP; ++n)
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
                    multiply(T[i][n], a_high[i], high[n][2 * step], high[n][2 * step + 1]);
        }
    }
#pragma unroll
    for (int n = 0; n < GROUP; ++n)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[i][n0 + n][e] = block ? S[i][n0 + n][e] + T[i][n][e] : T[i][n][e];
}

// O += P V, a chunk of keys and 32 columns at a time. The sum over the keys may take any order, and so may the
// columns: the scores' c0 and c1, keys 2 t and 2 t + 1, are a0 and a2 here; a lane has columns 4 g to 4 g + 3
// of V.
__device__ inline void pv_part(float (&O)[M_TILES][DP / 8][4], const Weights& P, unsigned v_lane, int block) {
    float T[M_TILES][4][4] = {};
#pragma unroll
    for (int keys = 0; keys < CHUNK / 8; ++keys) {
        unsigned a_high[M_TILES][4], a_low[M_TILES][4], high[2][4], low[2][4];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            split(P[i][keys][0], a_high[i][0], a_low[i][0]);
            split(P[i][keys][2], a_high[i][1], a_low[i][1]);
            split(P[i][keys][1], a_high[i][2], a_low[i][2]);
            split(P[i][keys][3], a_high[i][3], a_low[i][3]);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint4 x = load_shared(v_lane + (keys * 8 + k) * STRIDE + block * 128);
            split(__uint_as_float(x.x), high[k][0], low[k][0]);
            split(__uint_as_float(x.y), high[k][1], low[k][1]);
            split(__uint_as_float(x.z), high[k][2], low[k][2]);
            split(__uint_as_float(x.w), high[k][3], low[k][3]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) multiply(T[i][n], a_low[i], high[0][n], high[1][n]);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) multiply(T[i][n], a_high[i], low[0][n], low[1][n]);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) multiply(T[i][n], a_high[i], high[0][n], high[1][n]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[i][block * 4 + n][e] += T[i][n][e];
}

#else

// S += Q K^T, 16 of the d columns at a time. All keys of the chunk share a load of the queries.
__device__ inline void qk_part(Scores& S, const Queries& Q, unsigned k_lane, int step) {
    unsigned a[M_TILES][4];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) Q.get(a[i], i, step);
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; ++pair) {
        unsigned b[4];
        load_matrices(b, k_lane + pair * 16 * STRIDE + step * 32);
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            multiply(S[i][2 * pair], a[i], b[0], b[1]);
            multiply(S[i][2 * pair + 1], a[i], b[2], b[3]);
        }
    }
}

// O += P V, 16 keys and 16 columns at a time. The scores' registers, rounded in pairs, are the product's.
__device__ inline void pv_part(float (&O)[M_TILES][DP / 8][4], const Weights& P, unsigned v_lane, int part) {
    const int keys = part / (DP / 16), pair = part % (DP / 16);
    unsigned b[4];
    load_transposed(b, v_lane + keys * 16 * STRIDE + pair * 32);
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
        multiply(O[i][2 * pair], P[i][keys], b[0], b[1]);
        multiply(O[i][2 * pair + 1], P[i][keys], b[2], b[3]);
    }
}

#endif

// P <- 2^(scale S - m), 8 keys of a tile of 16 rows; sums <- rowsum(P), the lane's share of it
template <bool SCALED>
__device__ inline void weigh(Weights& P, Pairs& sums, const Scores& S, const Pairs& m, float scale, int unit) {
    const int i = unit / (CHUNK / 8), n = unit % (CHUNK / 8);
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
        p[e] = exp2_approx(SCALED ? S[i][n][e] - m[i][e / 2] : fmaf(S[i][n][e], scale, -m[i][e / 2]));
    sums[i][0] = n ? sums[i][0] + (p[0] + p[1]) : p[0] + p[1];
    sums[i][1] = n ? sums[i][1] + (p[2] + p[3]) : p[2] + p[3];
#if FORMAT == FP32
#pragma unroll
    for (int e = 0; e < 4; ++e) P[i][n][e] = p[e];
#else
    P[i][n / 2][n % 2 * 2] = pack(p[0], p[1]);
    P[i][n / 2][n % 2 * 2 + 1] = pack(p[2], p[3]);
#endif
}

__device__ inline float largest_of_row(float x) {  // a row's numbers are in four neighbouring lanes
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float sum_of_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

struct State {  // of a warp's rows; a lane has its share of l
    float O[M_TILES][DP / 8][4];
    Pairs m, l;
    float scale;
};

// Adds the chunk's sums to l once its weights are known to be in range. m is the maximum of some earlier chunk,
// so a later score may exceed it. If a sum of weights reaches LIMIT, or is NaN as in a row's first chunk (m =
// -inf), the warp updates m, rescales l and O, and computes the weights again.
template <bool SCALED>
__device__ inline void settle(State& s, Weights& P, Pairs& sums, const Scores& S) {
    bool in_range = true;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) in_range = in_range && sums[i][0] < LIMIT && sums[i][1] < LIMIT;
    if (__any_sync(~0u, !in_range)) {
        const float scale = SCALED ? 1.0f : s.scale;
        Pairs subtracted;
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float largest = -INF;
#pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n)
                    largest = fmaxf(largest, fmaxf(S[i][n][2 * h] * scale, S[i][n][2 * h + 1] * scale));
                const float m_new = fmaxf(s.m[i][h], largest_of_row(largest));
                subtracted[i][h] = subtrahend(m_new);
                const float correction = exp2_approx(s.m[i][h] - subtracted[i][h]);
                s.m[i][h] = m_new;
                s.l[i][h] *= correction;
#pragma unroll
                for (int n = 0; n < DP / 8; ++n) {
                    s.O[i][n][2 * h] *= correction;
                    s.O[i][n][2 * h + 1] *= correction;
                }
            }
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) weigh<SCALED>(P, sums, S, subtracted, s.scale, unit);
    }
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) s.l[i][0] += sums[i][0], s.l[i][1] += sums[i][1];
}

// Computes a row again whose result is not finite: 0 times a hidden NaN, or the low part of an infinite number,
// may have spoilt it. The lanes span 32 keys for the scores, then the columns for O.
__device__ __noinline__ void repeat_row(const Element* q, const Element* k, const Element* v, long long k_row,
                                        long long v_row, int visible, float scale, Element* out, float* lse) {
    const int lane = threadIdx.x % 32;
    float m = -INF, l = 0.0f, acc[(D + 31) / 32];
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; ++i) acc[i] = 0.0f;
    for (int j0 = 0; j0 < visible; j0 += 32) {
        float score = -INF;
        if (j0 + lane < visible) {
            float sum = 0.0f;
            for (int c = 0; c < D; ++c) sum = fmaf(to_float(q[c]), to_float(k[(j0 + lane) * k_row + c]), sum);
            score = sum * scale;
        }
        float m_new = score;
#pragma unroll
        for (int offset = 16; offset; offset /= 2) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, offset));
        m_new = fmaxf(m, m_new);
        const float subtracted = subtrahend(m_new), correction = exp2_approx(m - subtracted);
        const float p = j0 + lane < visible ? exp2_approx(score - subtracted) : 0.0f;
        float sum = p;
#pragma unroll
        for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        l = l * correction + sum;
        m = m_new;
#pragma unroll
        for (int i = 0; i < (D + 31) / 32; ++i) acc[i] *= correction;
        for (int j = j0; j < min(j0 + 32, visible); ++j) {
            const float weight = __shfl_sync(~0u, p, j - j0);
#pragma unroll
            for (int i = 0; i < (D + 31) / 32; ++i)
                if (lane + 32 * i < D) acc[i] = fmaf(weight, to_float(v[j * v_row + lane + 32 * i]), acc[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; ++i)
        if (lane + 32 * i < D) out[lane + 32 * i] = to_element(acc[i] / l);
    if (lse && lane == 0) *lse = (m + log2f(l)) * LN2;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_step5(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int Nq = call.Nq, Nk = call.Nk;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

    // The block's head and queries: blocks of one head run together, with the longest rows first.
    const int tiles_of_head = (Nq + BR - 1) / BR;
    const int head_index = blockIdx.x / tiles_of_head;
    int q_tile = blockIdx.x - head_index * tiles_of_head;
    if (call.causal) q_tile = tiles_of_head - 1 - q_tile;
    const int batch = head_index / call.heads, head = head_index - batch * call.heads;
    const int i0 = q_tile * BR, row0 = i0 + warp * ROWS + g;  // a lane's rows: row0 + 16 i + 8 h
    const Element* q = call.q + batch * call.q_strides.batch + head * call.q_strides.head;
    const Element* k = call.k + batch * call.k_strides.batch + head * call.k_strides.head;
    const Element* v = call.v + batch * call.v_strides.batch + head * call.v_strides.head;

    // Keys: all rows see those below `common`, some row of the block those below `end`.
    const int shift = Nk - Nq;
    const int end = call.causal ? max(0, min(Nk, min(i0 + BR, Nq) + shift)) : Nk;
    const int common = call.causal ? max(0, min(Nk, i0 + 1 + shift)) : Nk;
    const int tiles = (end + BC - 1) / BC, masked = tiles - common / BC;

    // A thread's 16 bytes of a tile's rows
    constexpr int PER_ROW = D / LANE_ELEMENTS, COPIES = BC * PER_ROW;
    const unsigned ring = shared_address(shared) + Q_BYTES;
    const auto load_tile = [&](int n) {  // the n-th tile to be processed; the last keys come first
        if (n < tiles) {
            const int j0 = (tiles - 1 - n) * BC;
            const unsigned to = ring + n % STAGES * STAGE;
            const Element *k_tile = k + j0 * call.k_strides.row, *v_tile = v + j0 * call.v_strides.row;
#pragma unroll
            for (int c0 = 0; c0 < COPIES; c0 += THREADS) {
                const int c = c0 + threadIdx.x;
                if (COPIES % THREADS != 0 && c >= COPIES) break;
                const int row = THREADS % PER_ROW == 0 ? c0 / PER_ROW + threadIdx.x / PER_ROW : c / PER_ROW;
                const int column = (THREADS % PER_ROW == 0 ? threadIdx.x : c) % PER_ROW;
                const bool inside = j0 + row < Nk;
                const int source = inside ? row : 0;
                copy_async(to + row * STRIDE + column * 16,
                           k_tile + source * call.k_strides.row + column * LANE_ELEMENTS, inside ? 16 : 0);
                copy_async(to + TILE + row * STRIDE + column * 16,
                           v_tile + source * call.v_strides.row + column * LANE_ELEMENTS, inside ? 16 : 0);
            }
        }
        close_group();
    };
    if (D != DP) {
        constexpr int ADDED = D == DP ? 1 : (DP - D) / LANE_ELEMENTS;
        for (int c = threadIdx.x; c < STAGES * 2 * BC * ADDED; c += THREADS)
            store_shared(ring + c / ADDED * STRIDE + PER_ROW * 16 + c % ADDED * 16, make_uint4(0, 0, 0, 0));
    }
#pragma unroll
    for (int n = 0; n < STAGES - 1; ++n) load_tile(n);

    // The queries, as the products' left operands
    Queries Q;
#if Q_SHARED
    Q.fragments = shared_address(shared) + warp * (M_TILES * Q_STEPS * Q_REGISTERS * 128) + lane * 16;
#endif
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
        const int row = row0 + 16 * i;
        const bool inside[2] = {row < Nq, row + 8 < Nq};
        const Element* rows[2] = {q + row * call.q_strides.row, q + (row + 8) * call.q_strides.row};
#if FORMAT == FP32
#pragma unroll
        for (int block = 0; block < DP / 32; ++block) {
            float x[2][8];
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int column = block * 32 + 8 * t + 4 * half;
                    float4 y = make_float4(0, 0, 0, 0);
                    if (inside[h] && column < D) y = *(const float4*)(rows[h] + column);
                    x[h][4 * half] = y.x, x[h][4 * half + 1] = y.y, x[h][4 * half + 2] = y.z,
                             x[h][4 * half + 3] = y.w;
                }
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const float a[4] = {x[0][2 * step], x[1][2 * step], x[0][2 * step + 1], x[1][2 * step + 1]};
                Q.put_split(a, i, block * 4 + step);
            }
        }
#else
#pragma unroll
        for (int step = 0; step < Q_STEPS; ++step) {
            unsigned a[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = step * 16 + e / 2 * 8 + 2 * t;
                a[e] = inside[e % 2] && column < D ? *(const unsigned*)(rows[e % 2] + column) : 0u;
            }
            Q.put(a, i, step);
        }
#endif
    }

    State s;
    s.scale = call.scale;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) s.m[i][h] = -INF, s.l[i][h] = 0.0f;
#pragma unroll
        for (int n = 0; n < DP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s.O[i][n][e] = 0.0f;
    }

    // Where a lane reads K and V within a tile
#if FORMAT == FP32
    const unsigned k_offset = g * STRIDE + t * 32, v_offset = TILE + 2 * t * STRIDE + g * 16;
#else
    const unsigned k_offset = (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16;
    const unsigned v_offset = TILE + lane % 16 * STRIDE + lane / 16 * 16;
#endif

    // Tiles in which some row of the block does not see some key
    int n = 0;
    for (; n < masked; ++n) {
        wait_groups<STAGES - 2>();
        __syncthreads();
        load_tile(n + STAGES - 1);
        const unsigned tile = ring + n % STAGES * STAGE;
        const int j0 = (tiles - 1 - n) * BC;
#pragma unroll 1
        for (int c = CHUNKS - 1; c >= 0; --c) {
            const int j = j0 + c * CHUNK;  // the chunk's first key
            const int last_row = i0 + warp * ROWS + ROWS - 1;
            if (j >= Nk || (call.causal && j > last_row + shift)) continue;
            Scores S;
            clear(S);
#pragma unroll
            for (int part = 0; part < QK_PARTS; ++part)
                qk_part(S, Q, tile + k_offset + c * (CHUNK * STRIDE), part);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = row0 + 16 * i + 8 * h;
                    const int visible = (call.causal ? min(Nk, row + shift + 1) : Nk) - j - 2 * t;
#pragma unroll
                    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            S[i][n][2 * h + e] = 8 * n + e < visible ? S[i][n][2 * h + e] * s.scale : -INF;
                }
            Weights P;
            Pairs sums;
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) weigh<true>(P, sums, S, s.m, s.scale, unit);
            settle<true>(s, P, sums, S);
#pragma unroll
            for (int part = 0; part < PV_PARTS; ++part)
                pv_part(s.O, P, tile + v_offset + c * (CHUNK * STRIDE), part);
        }
    }

#if PIPE == 0
    for (; n < tiles; ++n) {
        wait_groups<STAGES - 2>();
        __syncthreads();
        load_tile(n + STAGES - 1);
        const unsigned tile = ring + n % STAGES * STAGE;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            Scores S;
            clear(S);
#pragma unroll
            for (int part = 0; part < QK_PARTS; ++part)
                qk_part(S, Q, tile + k_offset + c * (CHUNK * STRIDE), part);
            Weights P;
            Pairs sums;
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) weigh<false>(P, sums, S, s.m, s.scale, unit);
            settle<false>(s, P, sums, S);
#pragma unroll
            for (int part = 0; part < PV_PARTS; ++part)
                pv_part(s.O, P, tile + v_offset + c * (CHUNK * STRIDE), part);
        }
    }
#else
    if (n < tiles) {
        wait_groups<STAGES - 2>();
        __syncthreads();
        Scores S;
        clear(S);
        unsigned tile = ring + n % STAGES * STAGE;
#pragma unroll
        for (int part = 0; part < QK_PARTS; ++part) qk_part(S, Q, tile + k_offset, part);
#if PIPE == 2
        Weights P_before = {};
        unsigned v_before = tile + v_offset;
#endif
        for (; n < tiles; ++n) {
            unsigned next_tile = 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                unsigned k_next = tile + k_offset + (c + 1) * (CHUNK * STRIDE);
                if (c == CHUNKS - 1) {
                    // The next tile is here, and no warp reads the one before this.
                    wait_groups<STAGES - 3>();
                    __syncthreads();
                    load_tile(n + STAGES - 1);
                    next_tile = ring + (n + 1) % STAGES * STAGE;
                    k_next = next_tile + k_offset;  // past the last tile: the scores are unused
                }
                Scores S_next;
                clear(S_next);
                Weights P;
                Pairs sums;
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
                    for (int part = unit * QK_PARTS / UNITS; part < (unit + 1) * QK_PARTS / UNITS; ++part)
                        qk_part(S_next, Q, k_next, part);
                    weigh<false>(P, sums, S, s.m, s.scale, unit);
#if PIPE == 2
#pragma unroll
                    for (int part = unit * PV_PARTS / UNITS; part < (unit + 1) * PV_PARTS / UNITS; ++part)
                        pv_part(s.O, P_before, v_before, part);
#endif
                }
                settle<false>(s, P, sums, S);
#if PIPE == 2
                v_before = tile + v_offset + c * (CHUNK * STRIDE);
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                    for (int x = 0; x < CHUNK / K_STEP; ++x)
#pragma unroll
                        for (int e = 0; e < 4; ++e) P_before[i][x][e] = P[i][x][e];
#else
#pragma unroll
                for (int part = 0; part < PV_PARTS; ++part)
                    pv_part(s.O, P, tile + v_offset + c * (CHUNK * STRIDE), part);
#endif
#pragma unroll
                for (int i = 0; i < M_TILES; ++i)
#pragma unroll
                    for (int x = 0; x < CHUNK / 8; ++x)
#pragma unroll
                        for (int e = 0; e < 4; ++e) S[i][x][e] = S_next[i][x][e];
            }
            tile = next_tile;
        }
#if PIPE == 2
#pragma unroll
        for (int part = 0; part < PV_PARTS; ++part) pv_part(s.O, P_before, v_before, part);
#endif
    }
#endif

    // O <- O / l, L <- m + log(l)
    const long long first_row = (long long)head_index * Nq;
    unsigned spoilt[M_TILES][2];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float l = sum_of_row(s.l[i][h]), inverse = 1.0f / l;
            const int row = row0 + 16 * i + 8 * h;
            float zero = 0.0f * l;
#pragma unroll
            for (int x = 0; x < DP / 8; ++x)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    zero = fmaf(0.0f, s.O[i][x][2 * h + e], zero);
                    s.O[i][x][2 * h + e] *= inverse;
                }
            spoilt[i][h] = __ballot_sync(~0u, !(zero == 0.0f) && row < Nq);
            if (call.lse && t == 0 && row < Nq) call.lse[first_row + row] = (s.m[i][h] + log2f(l)) * LN2;
        }
#if FORMAT == FP32
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + 16 * i + 8 * h;
            if (row < Nq)
#pragma unroll
                for (int block = 0; block < DP / 32; ++block)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int column = block * 32 + 8 * t + 4 * half;
                        if (column < D)
                            *(float4*)(call.out + (first_row + row) * D + column) = make_float4(
                                s.O[i][4 * block][2 * h + half], s.O[i][4 * block + 1][2 * h + half],
                                s.O[i][4 * block + 2][2 * h + half], s.O[i][4 * block + 3][2 * h + half]);
                    }
        }
#else
    __syncthreads();  // the tiles are no longer read: their memory takes each warp's rows
    const unsigned rows = shared_address(shared) + warp * (ROWS * STRIDE);
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int x = 0; x < DP / 8; ++x)
                store_shared(rows + (16 * i + 8 * h + g) * STRIDE + x * 16 + t * 4,
                             pack(s.O[i][x][2 * h], s.O[i][x][2 * h + 1]));
    __syncwarp();
#pragma unroll
    for (int c0 = 0; c0 < ROWS * PER_ROW; c0 += 32) {
        const int c = c0 + lane, row = c / PER_ROW, column = c % PER_ROW;
        if (row < ROWS && i0 + warp * ROWS + row < Nq)
            *(uint4*)(call.out + (first_row + i0 + warp * ROWS + row) * D + column * LANE_ELEMENTS) =
                load_shared(rows + row * STRIDE + column * 16);
    }
#endif
    __syncwarp();

#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            for (unsigned lanes = spoilt[i][h]; lanes;) {
                const int lane_of_row = __ffs(lanes) - 1;
                lanes &= ~(0xfu << (lane_of_row & ~3));
                const int row = i0 + warp * ROWS + 16 * i + 8 * h + lane_of_row / 4;
                const int visible = call.causal ? max(0, min(Nk, row + shift + 1)) : Nk;
                repeat_row(q + row * call.q_strides.row, k, v, call.k_strides.row, call.v_strides.row, visible,
                           call.scale, call.out + (first_row + row) * D,
                           call.lse ? call.lse + first_row + row : nullptr);
            }
}
