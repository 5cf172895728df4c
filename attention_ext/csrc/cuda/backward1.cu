// The backward pass in float32 arithmetic, to be read: tiles in shared memory, EACH x EACH scores a thread.
//
// Shapes: every dtype; d up to 256. Tiles of BR queries and as many keys.
// Loop nest: that of backward.h; a thread has EACH x EACH numbers of P and dS, which go through shared memory,
//     and EACH x ceil(d EACH / BR) numbers of dK and dV, or of dQ.
// Launch: after the rows', a block of (BR / EACH)^2 threads for each tile of keys, then for each of queries.
// Shared memory: Q, dO, K and V as float32, 4 BR PITCH numbers, and P and dS, 2 BR (BR + 1).
// Bound: shared memory, which delivers a number for each two products.
//
// Macros of its own: EACH, and PITCH, at least d, odd: rows begin in different banks.
#include "backward.h"

constexpr int SIDE = BR, T = SIDE / EACH, d = HEAD_DIM, WIDTH = (d + T - 1) / T;
static_assert(THREADS == T * T && PITCH >= T * WIDTH && PADDING_OF_ROWS % SIDE == 0, "tile");

struct Shared {
    float *Q, *dO, *K, *V, *P, *dS;

    __device__ inline explicit Shared(float* memory) {
        Q = memory;
        dO = Q + SIDE * PITCH;
        K = dO + SIDE * PITCH;
        V = K + SIDE * PITCH;
        P = V + SIDE * PITCH;
        dS = P + SIDE * (SIDE + 1);
    }
};

// Copies a tile's rows from global memory; those from `count` on, and columns from d on, are 0.
__device__ inline void load(float* tile, const Element* from, long long stride, int first, int count) {
    for (int n = threadIdx.x; n < SIDE * PITCH; n += THREADS) {
        const int row = n / PITCH, c = n % PITCH;
        tile[n] = first + row < count && c < d ? to_float(from[(first + row) * stride + c]) : 0.0f;
    }
}

// Lines 10 to 14: P and dS of the tiles in shared memory, of the queries from i0 and the keys from j0 on.
// dbias: null, or gets its numbers too.
__device__ inline void scores(const Call& call, const Gradients& to, const Shared& s, long long head, int i0,
                              int j0, float* dbias) {
    // A thread's rows are T apart and its columns too, so neighbours read neighbouring banks.
    const int x = threadIdx.x % T, y = threadIdx.x / T;
    float S[EACH][EACH] = {}, dP[EACH][EACH] = {};
    for (int first = 0; first < d; first += 16) {  // of short sums: one of all columns is rounded more
        float of_S[EACH][EACH] = {}, of_dP[EACH][EACH] = {};
        for (int c = first; c < min(first + 16, d); ++c) {
            float k[EACH], v[EACH];
            UNROLLED(j, EACH) k[j] = s.K[(x + j * T) * PITCH + c], v[j] = s.V[(x + j * T) * PITCH + c];
            UNROLLED(i, EACH) {
                const float q = s.Q[(y + i * T) * PITCH + c], dout = s.dO[(y + i * T) * PITCH + c];
                UNROLLED(j, EACH) of_S[i][j] += q * k[j], of_dP[i][j] += dout * v[j];
            }
        }
        UNROLLED(i, EACH)
            UNROLLED(j, EACH) S[i][j] += of_S[i][j], dP[i][j] += of_dP[i][j];
    }
    UNROLLED(i, EACH) {
        const int row = y + i * T;
        const float2 of_row = to.rows[head * padded_rows(call) + i0 + row];
        UNROLLED(j, EACH) {
            const int column = x + j * T;
            const Pair pair = pair_of(call, head, i0 + row, j0, column, S[i][j] * call.scale);
            const float p = pair.seen ? exp2_approx(pair.score - of_row.x) : 0.0f;
            s.P[row * (SIDE + 1) + column] = p;
            const float of_bias = p * (dP[i][j] - of_row.y);
            s.dS[row * (SIDE + 1) + column] = of_bias * pair.slope;
            store_bias(call, dbias, head, i0 + row, j0 + column, of_bias * pair.bias_slope);
        }
    }
}

// sums <- sums + A X: a number A[r][n] is at a[r * row + n * column].
__device__ inline void add_product(float (&sums)[EACH][WIDTH], const float* a, int row, int column,
                                   const float* X) {
    const int x = threadIdx.x % T, y = threadIdx.x / T;
    for (int n = 0; n < SIDE; ++n)
        UNROLLED(i, EACH) {
            const float factor = a[(y + i * T) * row + n * column];
            UNROLLED(c, WIDTH) sums[i][c] += factor * X[n * PITCH + x + c * T];
        }
}

// Rows `first` to `count` - 1 of a gradient, from a thread's sums.
__device__ inline void store(Element* out, const float (&sums)[EACH][WIDTH], float scale, int first,
                             int count) {
    const int x = threadIdx.x % T, y = threadIdx.x / T;
    UNROLLED(i, EACH)
        UNROLLED(c, WIDTH) {
            const int row = first + y + i * T, column = x + c * T;
            if (row < count && column < d) out[(long long)row * d + column] = to_element(sums[i][c] * scale);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_keys(const Call call, const Gradients to) {
    extern __shared__ float memory[];
    const Shared s(memory);
    const KeyBlock block = key_block_of(call, SIDE, index_across_heads(call, SIDE));
    const int j0 = block.first_key;
    const Block first = block_at(call, block.head, 0);
    load(s.K, first.k, call.k_strides.row, j0, call.Nk);
    load(s.V, first.v, call.v_strides.row, j0, call.Nk);
    float dK[EACH][WIDTH] = {}, dV[EACH][WIDTH] = {};
    const QueryRange queries = queries_of(call, block.head, j0, j0 + SIDE - 1);
    for (unsigned head = block.head; head < block.head + block.group; ++head) {
        const Block at = block_at(call, head, 0);
        for (int i0 = queries.first / SIDE * SIDE; i0 < queries.end; i0 += SIDE) {
            __syncthreads();  // all threads have read the previous tiles
            load(s.Q, at.q, call.q_strides.row, i0, call.Nq);
            load(s.dO, dout_of(call, to, head), to.dout_strides.row, i0, call.Nq);
            __syncthreads();
            scores(call, to, s, head, i0, j0, nullptr);
            __syncthreads();
            add_product(dV, s.P, 1, SIDE + 1, s.dO);  // line 12
            add_product(dK, s.dS, 1, SIDE + 1, s.Q);  // line 16
        }
    }
    const long long rows = block.of_keys * call.Nk;
    store(to.dk + rows * d, dK, call.scale * LN2, j0, call.Nk);
    store(to.dv + rows * d, dV, 1.0f, j0, call.Nk);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_queries(const Call call, const Gradients to) {
    extern __shared__ float memory[];
    const Shared s(memory);
    const Block block = block_across_heads(call, SIDE);
    const int i0 = block.first_query;
    load(s.Q, block.q, call.q_strides.row, i0, call.Nq);
    load(s.dO, dout_of(call, to, block.head), to.dout_strides.row, i0, call.Nq);
    float dQ[EACH][WIDTH] = {};
    const Range keys = range_of(call, block.head, i0, min(i0 + SIDE, call.Nq) - 1);
    for (int j0 = keys.first; j0 < keys.end; j0 += SIDE) {
        __syncthreads();  // all threads have read the previous tiles
        load(s.K, block.k, call.k_strides.row, j0, call.Nk);
        load(s.V, block.v, call.v_strides.row, j0, call.Nk);
        __syncthreads();
        scores(call, to, s, block.head, i0, j0, to.dbias);
        __syncthreads();
        add_product(dQ, s.dS, SIDE + 1, 1, s.K);  // line 15
    }
    store(to.dq + block.head * call.Nq * d, dQ, call.scale * LN2, i0, call.Nq);
}
