// Split: few queries against many keys. The keys are split among blocks; a second kernel merges by logsumexp.
//
// Shapes: every dtype; meant for Nq from 1 to 16; d is a multiple of 8 up to 256; pointers and strides are
//     multiples of 16 bytes. Tiles of BR queries. Partial results in global memory, float32: O (B, H, Nq,
//     splits, d), m and l (B, H, Nq, splits, 2).
// Loop nest: attention_split: the grid goes over (batch, head), splits of keys and tiles of rows, a block's
//     teams of SHARERS warps in turn over STRIP keys of the split: S <- scale q K^T; m, l and O as in every
//     kernel. Then the O, m and l of the teams are merged. attention_merge: for each row, over the splits
//         O <- sum 2^(m_s - m) O_s / sum 2^(m_s - m) l_s
//     The lanes of a warp multiply (split_lanes.h), or with TENSOR the tensor cores (split_mma.h).
// Launch: B H splits ceil(Nq / BR) blocks of THREADS threads, then B H Nq blocks of MERGE_THREADS threads.
// Shared memory: the teams' O (TEAMS, BR, WIDTH), m and l (TEAMS, BR), then q, float32.
// Improves on kernels 5 and 6 for few queries, where a block a tile leaves the GPU idle. Since sm_90 the
//     merge's launch overlaps the split. Bound: memory bandwidth for one query, from 256 MiB of K and V on.
// Command: python gpt.py bench split,sdpa-efficient,sdpa-flash,sdpa-cudnn --device cuda --dtype bf16
//          --queries 1 -N 8192:131072*4 --batch 1 --heads 32 -d 64,128 --l2 cold -r 10
// Measured: NVIDIA H200, one query of 32 heads, d = 64, share of 4.65 TB/s at Nk = 8192, 32768 and 131072: bf16
//     56, 83 and 95 %, about as fast as cuDNN; fp32 75, 93 and 98 %, 2.95 to 4.49 times the best of SDPA.
#include "rules.h"

// Macros of its own, by cuda/tiles.py:
//   TENSOR         1: the tensor cores multiply, with the macros of split_mma.h
//   BLOCKS         blocks that a multiprocessor should hold: bounds the registers
//   SHARERS        warps of a team: they share a strip, each with an equal part of its columns
//   LOADS          loads of K under way in a lane
//   LANES          lanes that share a row, and compute its weight
//   WIDTH          numbers of a row, with the padding
//   MERGE_THREADS  of a block that merges: two for each of the 64 vectors of the widest row (d = 256)
//   MERGE_LANES    threads of a row there, 4 numbers each
constexpr int d = HEAD_DIM;
constexpr int TEAMS = THREADS / 32 / SHARERS;

// A block's rows and its keys from `start` to below `end`; row i sees those below sees + i. A row is a query;
// with rules it is one of the heads that share k and v, whose queries follow each other.
struct Span {
    const Call& call;
    const Element *q, *k, *v;               // without rules of the first row, and of a head
    int rows, start, end, sees, all_first;  // with rules all rows see the keys all_first to sees - 1
#if RULES
    const Block& block;
#endif
    long long q_row = call.q_strides.row, k_row = call.k_strides.row, v_row = call.v_strides.row;
    float scale = call.scale;

    // Whether some row does not see some of `count` keys from j on.
    __device__ inline bool hides(int j, int count) const {
        return j + count > min(end, sees) || (RULES && j < all_first);
    }
#if RULES
    __device__ inline const Element* query(int i) const {
        const int at = block.first_query + i;
        return q + at / call.Nq * call.q_strides.head + at % call.Nq * call.q_strides.row;
    }
    __device__ inline Row row(int i, int j) const {  // what becomes of its scores from key j on
        const int at = block.first_query + min(i, rows - 1);
        Row row(call, block.head + at / call.Nq, at % call.Nq, j);
        row.end = min(row.end, end - j);
        return row;
    }
#else
    __device__ inline const Element* query(int i) const { return q + i * q_row; }
#endif
};

// What a team found, in shared memory.
struct Result {
    float (*o)[WIDTH];  // (BR, WIDTH), not divided by l
    float *m, *l;       // (BR)
};

// Words of a row, or zeros. ld.global.nc.L1::no_allocate (PTX ISA) keeps what is read once out of L1.
__device__ inline void load_words(unsigned (&x)[4], const Element* from, bool exists) {
    x[0] = x[1] = x[2] = x[3] = 0;
    if (exists)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "l"(from));
}

#if TENSOR
#include "split_mma.h"
#else
#include "split_lanes.h"
#endif

// Since sm_90 the merge may launch early; it then waits for the split's writes (PTX ISA, griddepcontrol).
__device__ inline void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_split(const Call call, float* partial, int splits) {
    let_dependents_start();
    // sizes
    const int Nq = call.Nq, Nk = call.Nk;  // both first: else d = 192 spills half as much again (sm_90)
    const int rows = Nq * (int)heads_of_keys(call), tiles = (rows + BR - 1) / BR;
    const int i0 = blockIdx.x % tiles * BR, split = blockIdx.x / tiles % splits;
#if RULES
    const Block block = block_at(call, blockIdx.x / tiles / splits * heads_of_keys(call), i0);
    const Range keys = range_of(call, block.head, 0, Nq - 1);
    const long long seen = keys.end - keys.first;
    const int start = keys.first + seen * split / splits, end = keys.first + seen * (split + 1) / splits;
    const Span span{call,  block.q, block.k,      block.v,        rows - i0,
                    start, end,     keys.all_end, keys.all_first, block};
#else
    const int sees = call.causal ? i0 + Nk - Nq + 1 : Nk;
    const int start = (long long)Nk * split / splits;
    const int end = min((int)((long long)Nk * (split + 1) / splits), sees + BR - 1);
    const Block block = block_at(call, blockIdx.x / tiles / splits, i0);
    const Span span{call, block.q + i0 * call.q_strides.row, block.k, block.v, rows - i0, start, end, sees, 0};
#endif

    // data
    extern __shared__ __align__(16) float memory[];
    auto o_shared = (float (*)[BR][WIDTH])memory;                                    // (TEAMS, BR, WIDTH)
    auto m_shared = (float (*)[BR])(o_shared + TEAMS), l_shared = m_shared + TEAMS;  // (TEAMS, BR)
    const int team = threadIdx.x / 32 / SHARERS;
    attend_strips(span, team, {o_shared[team], m_shared[team], l_shared[team]}, (float*)(l_shared + TEAMS));
    __syncthreads();

    // Merge the teams of the block
    const long long all = (long long)call.batches * call.heads * Nq;
    for (int n = threadIdx.x; n < BR * d / 4; n += THREADS) {
        const int i = n / (d / 4), c = n % (d / 4) * 4;
        if (i0 + i >= rows) break;
        float top = m_shared[0][i];
        for (int w = 1; w < TEAMS; w++) top = fmaxf(top, m_shared[w][i]);
        float4 x = {0, 0, 0, 0};
        float total = 0;
        for (int w = 0; w < TEAMS; w++) {
            const float weight = exp2_approx(m_shared[w][i] - subtrahend(top));
            const float4 y = *(const float4*)&o_shared[w][i][c];
            x.x += weight * y.x;
            x.y += weight * y.y;
            x.z += weight * y.z;
            x.w += weight * y.w;
            total += weight * l_shared[w][i];
        }
        const long long at = (block.head * Nq + i0 + i) * splits + split;
        *(float4*)(partial + at * d + c) = x;
        if (c == 0) *(float2*)(partial + all * splits * d + at * 2) = {top, total};
    }
}

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
    attention_merge(const Call call, const float* partial, int splits) {
    wait_for_predecessor();
    constexpr int SHARES = MERGE_THREADS / MERGE_LANES;  // of the splits
    static_assert(SHARES >= 1);
    __shared__ float4 o_shared[SHARES][MERGE_LANES];
    __shared__ float2 stats_shared[SHARES];
    const long long row = blockIdx.x, all = (long long)call.batches * call.heads * call.Nq;
    const float2* stats = (const float2*)(partial + all * splits * d) + row * splits;
    const float4* o_splits = (const float4*)(partial + row * splits * d);

    const int share = threadIdx.x / MERGE_LANES, place = threadIdx.x % MERGE_LANES;
    float4 o = {0, 0, 0, 0};
    float m = -INF, l = 0;
#pragma unroll 4
    for (int s = share; s < splits; s += SHARES) {
        const float2 stat = stats[s];
        const float4 x = place < d / 4 ? o_splits[(long long)s * (d / 4) + place] : float4{0, 0, 0, 0};
        const float top = fmaxf(m, stat.x), less = subtrahend(top);
        const float shrink = exp2_approx(m - less), weight = exp2_approx(stat.x - less);
        o.x = o.x * shrink + weight * x.x;
        o.y = o.y * shrink + weight * x.y;
        o.z = o.z * shrink + weight * x.z;
        o.w = o.w * shrink + weight * x.w;
        l = l * shrink + weight * stat.y;
        m = top;
    }
    o_shared[share][place] = o;
    if (place == 0) stats_shared[share] = {m, l};
    __syncthreads();
    UNROLLED(n, SHARES) m = fmaxf(m, stats_shared[n].x);

    for (int c = threadIdx.x; c < d; c += MERGE_THREADS) {
        float x = 0, total = 0;
        UNROLLED(n, SHARES) {
            const float weight = exp2_approx(stats_shared[n].x - subtrahend(m));
            x += weight * ((const float*)&o_shared[n][0])[c];
            total += weight * stats_shared[n].y;
        }
#if RULES
        float top = m;
        x *= inverse_with_sink(call, row / call.Nq, top, total);
#else
        const float top = m;
        x /= total;
#endif
        call.out[row * d + c] = to_element(x);
        if (call.lse && c == 0) call.lse[row] = top * LN2 + logf(total);
    }
}
