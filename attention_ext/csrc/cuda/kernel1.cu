// Kernel 1: one launch for each tile of keys; the running state is in global memory.
// Source: Dao et al. 2022, arXiv:2205.14135, Algorithm 1, with its loop over keys outside.
//
// Shapes: every dtype; d up to 256. Tiles of BR = 32 queries and BC = 32 keys.
// Loop nest: the host goes over tiles of keys, the grid over (batch, head) and tiles of queries. A thread
//     computes one score, then ceil(d / 32) numbers of O.
// Launch: ceil(Nk / 32) launches of B H ceil(Nq / 32) blocks of 32 x 32 threads.
// Shared memory: Q, K, V and S as float32, (96 d + 1024) * 4 bytes, without padding.
// Improves on the sequential loop: a block computes the scores of a tile at once.
// Bound: shared memory. Rows of K are d numbers apart, so at d = 32 a warp's reads are all in one bank. Every
//     launch also reads and writes m, l and O, (d + 2) * 4 bytes a row.
// Command: python gpt.py bench kernel1 --device cuda --l2 warm -r 5
// Measured: NVIDIA H200, fp32, (100, 1, 4096, 32), no mask: 118 ms, 1.82 TFLOP/s, 511 times sequential C++.
#include "call.h"

constexpr int TILE = BR, d = HEAD_DIM;

// state: m (B H, Nq), l (B H, Nq) and O (B H, Nq, d), one after the other.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_kernel1(const Call call, float* state, const int first_key) {
    extern __shared__ float shared[];
    float *Q = shared, *K = Q + TILE * d, *V = K + TILE * d, *S = V + TILE * d;
    const int column = threadIdx.x, row = threadIdx.y;
    const Block block = block_of(call, TILE);
    const int query = block.first_query + row;
    const int seen = keys_seen(call, query) - first_key;  // keys of this tile that the query sees
    const bool last = first_key + TILE >= call.Nk;
    const bool masked = keys_seen(call, block.first_query + TILE - 1) <= first_key;  // the whole tile
    if (masked && !last) return;

    for (int c = column; c < d; c += TILE) {
        const int key = first_key + row;
        Q[row * d + c] = query < call.Nq ? to_float(block.q[query * call.q_strides.row + c]) : 0.0f;
        K[row * d + c] = key < call.Nk ? to_float(block.k[key * call.k_strides.row + c]) : 0.0f;
        V[row * d + c] = key < call.Nk ? to_float(block.v[key * call.v_strides.row + c]) : 0.0f;
    }
    __syncthreads();

    float s = 0;
    for (int c = 0; c < d; ++c) s += Q[row * d + c] * K[column * d + c];
    S[row * TILE + column] = column < seen ? s * call.scale : -INF;
    __syncthreads();
    if (query >= call.Nq) return;

    // From here on a warp works on its own row.
    const long long at = block.head * call.Nq + query, rows = (long long)call.batches * call.heads * call.Nq;
    float *state_m = state, *state_l = state_m + rows, *state_o = state_l + rows;
    float m = first_key ? state_m[at] : -INF, l = first_key ? state_l[at] : 0;
    float m_new = m;
    for (int j = 0; j < TILE; ++j) m_new = fmaxf(m_new, S[row * TILE + j]);
    const float correction = exp2_approx(m - subtrahend(m_new));
    l *= correction;
    for (int j = 0; j < TILE; ++j) l += exp2_approx(S[row * TILE + j] - subtrahend(m_new));
    for (int c = column; c < d; c += TILE) {
        float o = first_key ? state_o[at * d + c] * correction : 0;
        for (int j = 0; j < TILE && j < seen; ++j)
            o += exp2_approx(S[row * TILE + j] - subtrahend(m_new)) * V[j * d + c];
        if (last)
            call.out[at * d + c] = to_element(o / l);
        else
            state_o[at * d + c] = o;
    }
    __syncwarp();  // every lane of the row has read m and l
    if (column > 0) return;
    state_m[at] = m_new;
    state_l[at] = l;
    if (last && call.lse) call.lse[at] = LN2 * subtrahend(m_new) + logf(l);
}
