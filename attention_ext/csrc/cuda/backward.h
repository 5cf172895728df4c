// What the kernels of the backward pass share: their arguments, the sums of rows, and which queries see a key.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 2, as three launches; two runs give the same bits. S
// and P are computed again in both of the last two:
//   attention_backward_rows      D <- rowsum(dO * O) - dlse                                        line 4
//   attention_backward_keys      a block for each tile of keys, over the queries that see some:
//       P <- exp(S - lse);  dS <- P * (dO V^T - D);  dV <- dV + P^T dO;  dK <- dK + dS^T Q         lines 10-16
//   attention_backward_queries   a block for each tile of queries, over their keys:  dQ <- dQ + dS K
// That is seven products instead of five. backward4 has five: its blocks for tiles of keys add to dQ in turns,
// and the last launch rounds it. Heads of q that share one of k and v are one loop.
#pragma once
#include "rules.h"

// A head's rows and those of the last tile that are none: their logsumexp is infinite, so P is 0.
constexpr int PADDING_OF_ROWS = 256;
__device__ inline long long padded_rows(const Call& call) {
    return (call.Nq + PADDING_OF_ROWS - 1LL) / PADDING_OF_ROWS * PADDING_OF_ROWS;
}

__device__ inline const Element* dout_of(const Call& call, const Gradients& to, unsigned head) {
    return to.dout + head / call.heads * to.dout_strides.batch + head % call.heads * to.dout_strides.head;
}

#ifdef TURN_ROWS
// In backward4 the rows are the logsumexps, then -D. After them: the sums in float32 of tiles of TURN_ROWS
// rows, of dQ, or of dV and dK if blocks own queries; then counters that the rows' launch clears: how many
// works blocks have taken, and for each tile of sums how many have been added.
constexpr bool OWNS_QUERIES = WIDTH > 128;
constexpr int tile_sums = TURN_ROWS * WIDTH * (1 + OWNS_QUERIES);
__device__ inline long long turns_of(const Call& call) {
    const long long heads = (long long)call.batches * call.heads;
    if (OWNS_QUERIES) return heads / heads_of_keys(call) * ((call.Nk + TURN_ROWS - 1) / TURN_ROWS);
    return heads * padded_rows(call) / TURN_ROWS;
}
__device__ inline float* sums_of(const Call& call, const Gradients& to) {
    return (float*)(to.rows + (long long)call.batches * call.heads * padded_rows(call));
}
__device__ inline unsigned* counters_of(const Call& call, const Gradients& to) {
    return (unsigned*)(sums_of(call, to) + turns_of(call) * tile_sums);
}
#endif

// ROW_LANES lanes for each row, which read 16 bytes at a time; without it a warp, as rows may begin anywhere.
#ifdef ROW_LANES
constexpr int LANES = ROW_LANES, VECTOR = 16 / sizeof(Element);
#else
constexpr int LANES = 32, VECTOR = 1;
#endif
struct alignas(VECTOR * sizeof(Element)) Piece {
    Element numbers[VECTOR];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_rows(const Call call, const Gradients to) {
    const int lane = threadIdx.x % LANES;
    const long long padded = padded_rows(call), row = (blockIdx.x * (long long)THREADS + threadIdx.x) / LANES;
    const unsigned head = (unsigned)(row / PADDING_OF_ROWS) / (unsigned)(padded / PADDING_OF_ROWS);
    const bool exists = head < (unsigned)(call.batches * call.heads);
#ifdef TURN_ROWS
    for (long long n = blockIdx.x * (long long)THREADS + threadIdx.x; n <= turns_of(call);
         n += gridDim.x * THREADS)
        counters_of(call, to)[n] = 0;
#endif
    const long long i = row - head * padded, at = head * (long long)call.Nq + i;
    float lse = -INF, D = 0;
    if (exists && i < call.Nq) {
        const Element* const dout = dout_of(call, to, head) + i * to.dout_strides.row;
        const Element* const out = call.out + head / call.heads * call.out_strides.batch +
                                   head % call.heads * call.out_strides.head + i * call.out_strides.row;
        for (int c = lane * VECTOR; c < HEAD_DIM; c += LANES * VECTOR) {
            const Piece x = *(const Piece*)(dout + c), y = *(const Piece*)(out + c);
            UNROLLED(e, VECTOR) D += to_float(x.numbers[e]) * to_float(y.numbers[e]);
        }
        if (to.dlse && lane == 0) D -= to.dlse[at];
        lse = call.lse[at] / LN2;
    }
    D = sum<1, LANES>(D);
    // -inf: there is no such query, or it sees no key
    if (!exists || lane != 0) return;
    const float2 numbers = {lse == -INF ? INF : lse, lse == -INF ? 0.0f : D};
#ifdef TURN_ROWS
    float* const split = (float*)to.rows + row;
    split[0] = numbers.x;
    split[call.batches * call.heads * padded] = -numbers.y;
#else
    to.rows[row] = numbers;
#endif
}

// A tile of keys of a head of k and v, whose gradients are sums over `group` heads of q from `head` on.
struct KeyBlock {
    unsigned head, group;
    long long of_keys;  // the head among those of k and v
    int first_key;
};

// The block's own, or the index-th. A head's tiles are neighbours, as in block_of(); under a causal mask the
// first have most queries.
__device__ inline KeyBlock key_block_of(const Call& call, int rows, unsigned index = blockIdx.x) {
    const unsigned tiles = (call.Nk + rows - 1) / rows, group = heads_of_keys(call);
    const unsigned head = index / tiles;
    return {head * group, group, head, (int)(index % tiles * rows)};
}

// The index of a block's tile for key_block_of() in the order of block_across_heads().
__device__ inline unsigned index_across_heads(const Call& call, int rows) {
    const unsigned tiles = (call.Nk + rows - 1) / rows, all = call.batches * call.heads / heads_of_keys(call);
    return call.causal ? blockIdx.x % all * tiles + blockIdx.x / all : blockIdx.x;
}

// The queries `first` to `end` - 1 of a head of all batches hold all that see some of the keys j to `last`; may
// be empty.
struct QueryRange {
    int first, end;
};
__device__ inline QueryRange queries_of(const Call& call, long long head, int j, int last) {
#if RULES
    const long long end = (long long)last + 1 - call.Nk + call.Nq + call.rules.left;
    QueryRange range{max(j - call.Nk + (call.Nq - call.rules.right), 0),
                     (int)min((long long)call.Nq, max(end, 0LL))};
#if RULES & DOCUMENTS
    range.first = max(range.first, document_of(call, head, j).first - call.Nk + call.Nq);
    range.end = min(range.end, max(document_of(call, head, last).end - call.Nk + call.Nq, 0));
#endif
    return range;
#else
    return {call.causal ? max(j - call.Nk + call.Nq, 0) : 0, call.Nq};
#endif
}

// The queries `first` to `end` - 1 see all of the keys j to `last`.
__device__ inline QueryRange queries_of_all(const Call& call, long long head, int j, int last) {
#if RULES & DOCUMENTS
    if (document_of(call, head, j).numbers) return {call.Nq, 0};
#endif
    return {queries_of(call, head, last, last).first, queries_of(call, head, j, j).end};
}

// Whether query i sees key j0 + c, its score there, times log2(e), and the derivatives of that by `score` and
// by a bias.
struct Pair {
    bool seen;
    float score, slope, bias_slope;
};
__device__ inline Pair pair_of(const Call& call, long long head, int i, int j0, int c, float score) {
#if RULES
    const Row row(call, head, i, j0, true);
    bool seen = row.sees(c);
#if RULES & DOCUMENTS
    const long long* const numbers = numbers_of(call, head);  // less than their extents, for a single key
    seen = seen && numbers[j0 + c] == numbers[min(i, call.Nq - 1) + call.Nk - call.Nq];
#endif
    const float given = row.given(score, c), slope = row.modified_slope(given, c);
    return {seen, row.modified(given, c), row.derivative(score) * slope, slope};
#else
    return {j0 + c < keys_seen(call, i), score, 1.0f, 1.0f};
#endif
}

// dbias[head, i, j] <- x with BIAS_GRADIENT, if there are such a query and key; each pair is one thread's.
__device__ inline void store_bias(const Call& call, float* dbias, long long head, int i, int j, float x) {
    if (RULES & BIAS_GRADIENT && dbias && i < call.Nq && j < call.Nk)
        dbias[(head * call.Nq + i) * call.Nk + j] = x;
}
