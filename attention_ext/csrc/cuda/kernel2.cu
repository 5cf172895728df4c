// Kernel 2: one launch; tiles in shared memory, 4 x 4 scores a thread.
//
// Shapes: every dtype; d up to 256. Tiles of BR queries and BC keys.
// Loop nest: the grid goes over (batch, head) and tiles of queries, a block over tiles of keys. A thread has 4
//     x 4 scores of the tile and 4 x ceil(4 d / BC) numbers of O.
// Launch: B H ceil(Nq / BR) blocks of (BR / 4) (BC / 4) threads.
// Shared memory: Q, K, V and P as float32, (BR + 2 BC) (d + PADDING) + BR (BC + PADDING) numbers.
// Improves on kernel 1: the state stays in the block. Global reads are contiguous. A number of Q or K read
//     from shared memory serves four products. PADDING = 1 puts a column's rows into different banks; with 0,
//     at d = 32, they share one (2-unpadded). Bound: shared memory.
// Command: python gpt.py bench kernel2-unpadded,kernel2 --device cuda --l2 warm -r 5
// Measured: NVIDIA H200, fp32, (100, 1, 4096, 32), no mask: 20.4 TFLOP/s, 11.2 times kernel 1; without padding
//     6.32 TFLOP/s.
#include "call.h"

constexpr int d = HEAD_DIM, EACH = 4;
constexpr int COLUMNS = BC / EACH, ROWS = BR / EACH;
constexpr int PITCH = d + PADDING, P_PITCH = BC + PADDING, WIDTH = (d + COLUMNS - 1) / COLUMNS;

// Copies `rows` rows from global memory; those from `count` on are 0.
__device__ void load(float* tile, const Element* from, long long stride, int rows, int count) {
    for (int i = threadIdx.x; i < rows * d; i += THREADS) {
        const int row = i / d, c = i % d;
        tile[row * PITCH + c] = row < count ? to_float(from[row * stride + c]) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_kernel2(const Call call) {
    extern __shared__ float shared[];
    float *Q = shared, *K = Q + BR * PITCH, *V = K + BC * PITCH, *P = V + BC * PITCH;
    const Block block = block_of(call, BR);
    // A thread's rows are ROWS apart and its columns COLUMNS apart, so neighbours read neighbouring banks.
    const int x = threadIdx.x % COLUMNS, y = threadIdx.x / COLUMNS;
    load(Q, block.q + block.first_query * call.q_strides.row, call.q_strides.row, BR,
         call.Nq - block.first_query);

    float o[EACH][WIDTH] = {}, m[EACH], l[EACH] = {};
    for (float& each : m) each = -INF;
    const int keys = keys_seen(call, min(block.first_query + BR, call.Nq) - 1);
    for (int first_key = 0; first_key < keys; first_key += BC) {
        __syncthreads();  // all threads have read the previous tiles
        load(K, block.k + first_key * call.k_strides.row, call.k_strides.row, BC, call.Nk - first_key);
        load(V, block.v + first_key * call.v_strides.row, call.v_strides.row, BC, call.Nk - first_key);
        __syncthreads();

        float s[EACH][EACH] = {};
        for (int c = 0; c < d; ++c) {
            float k[EACH];
            for (int j = 0; j < EACH; ++j) k[j] = K[(x + j * COLUMNS) * PITCH + c];
            for (int i = 0; i < EACH; ++i) {
                const float q = Q[(y + i * ROWS) * PITCH + c];
                for (int j = 0; j < EACH; ++j) s[i][j] += q * k[j];
            }
        }

        for (int i = 0; i < EACH; ++i) {
            const int seen = keys_seen(call, block.first_query + y + i * ROWS) - first_key;
            float m_new = m[i];
            for (int j = 0; j < EACH; ++j) {
                s[i][j] = x + j * COLUMNS < seen ? s[i][j] * call.scale : -INF;
                m_new = fmaxf(m_new, s[i][j]);
            }
            for (int lane = COLUMNS / 2; lane > 0; lane /= 2)
                m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, lane));
            const float correction = exp2_approx(m[i] - subtrahend(m_new));
            m[i] = m_new;
            l[i] *= correction;
            for (int c = 0; c < WIDTH; ++c) o[i][c] *= correction;
            for (int j = 0; j < EACH; ++j) {
                const float p = exp2_approx(s[i][j] - subtrahend(m_new));
                l[i] += p;  // of this thread's columns; added up at the end
                P[(y + i * ROWS) * P_PITCH + x + j * COLUMNS] = p;
            }
        }
        __syncwarp();  // a warp fence is enough: a row's threads are in one warp

        for (int j = 0; j < BC; ++j) {
            float v[WIDTH];
            for (int c = 0; c < WIDTH; ++c) v[c] = x + c * COLUMNS < d ? V[j * PITCH + x + c * COLUMNS] : 0.0f;
            for (int i = 0; i < EACH; ++i) {
                const float p = P[(y + i * ROWS) * P_PITCH + j];
                for (int c = 0; c < WIDTH; ++c) o[i][c] += p * v[c];
            }
        }
    }

    for (int i = 0; i < EACH; ++i) {
        for (int lane = COLUMNS / 2; lane > 0; lane /= 2) l[i] += __shfl_xor_sync(~0u, l[i], lane);
        const int query = block.first_query + y + i * ROWS;
        if (query >= call.Nq) continue;
        const long long at = block.head * call.Nq + query;
        for (int c = 0; c < WIDTH; ++c)
            if (x + c * COLUMNS < d) call.out[at * d + x + c * COLUMNS] = to_element(o[i][c] / l[i]);
        if (x == 0 && call.lse) call.lse[at] = LN2 * subtrahend(m[i]) + logf(l[i]);
    }
}
