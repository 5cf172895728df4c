// Kernel 3: a row for each thread, with its state in shared memory, in spilled local arrays, or in registers.
//
// Shapes: every dtype; d up to 256. Tiles of THREADS / SHARE queries and BC keys.
// Loop nest: the grid goes over (batch, head) and tiles of queries, a block over tiles of keys, a thread over
//     the tile's keys, STRIP at a time. SHARE threads have a part of the columns of one row each, so that the
//     row fits their registers.
// Launch: B H ceil(Nq SHARE / THREADS) blocks of THREADS threads.
// Shared memory: K and V as float32, 2 BC d numbers; with O_SHARED also O, THREADS d / SHARE numbers.
// Improves on kernel 2: the weights stay in their thread, so P needs no shared memory. A warp reads the same
//     four numbers of K for 32 rows, but such a 16-byte load of one address takes two wavefronts. Wider heads
//     are slower than in kernel 2, of which a thread has 8 columns of O at d = 128. Bound: shared memory;
//     3-spilled also waits for local memory, 3-shared reads and writes O for every strip.
// Command: python gpt.py bench kernel2,kernel3-shared,kernel3-spilled,kernel3 --device cuda -d 32,64,128
//          --l2 warm -r 5
// Measured: NVIDIA H200, fp32, (100, 1, 4096, d), no mask, TFLOP/s at d = 32, 64 and 128: 3-shared 21.3, 19.5,
//     17.6; 3-spilled 20.8, 14.7, 10.3; 3 25.7, 23.4, 20.4, at d = 32 1.26 times kernel 2.
#include "call.h"

// Macros of its own, by cuda/tiles.py:
//   SHARE     threads of a row
//   PITCH     numbers of a row in shared memory; what is beyond d is 0
//   STRIP     keys at a time: 8 scores hide the latency of the multiply-adds, and O is rescaled once for 8 keys
//   BLOCKS    blocks that a multiprocessor should hold: bounds the registers
//   O_SHARED  1: O is in shared memory; 0: in local arrays
constexpr int d = HEAD_DIM, QUADS = PITCH / (4 * SHARE);  // of a thread's columns

__device__ void load(float* tile, const Element* from, long long stride, int count) {
    for (int i = threadIdx.x; i < BC * PITCH; i += THREADS) {
        const int row = i / PITCH, c = i % PITCH;
        tile[i] = row < count && c < d ? to_float(from[row * stride + c]) : 0.0f;
    }
}

// The thread's own fours are SHARE apart, so that the threads of a row read neighbouring ones.
__device__ float4 read(const float* tile, int row, int i, int sharer) {
    return reinterpret_cast<const float4*>(tile)[row * (PITCH / 4) + i * SHARE + sharer];
}

__device__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ void add(float4& o, float p, float4 v) {
    o.x = fmaf(p, v.x, o.x);
    o.y = fmaf(p, v.y, o.y);
    o.z = fmaf(p, v.z, o.z);
    o.w = fmaf(p, v.w, o.w);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_kernel3(const Call call) {
    extern __shared__ float4 aligned[];
    float *K = reinterpret_cast<float*>(aligned), *V = K + BC * PITCH;
    const Block block = block_of(call, BR);
    const int sharer = threadIdx.x % SHARE, query = block.first_query + threadIdx.x / SHARE;
    float4 q[QUADS];
    UNROLLED(i, QUADS) {
        float quad[4] = {};
        for (int c = 0; c < 4; ++c) {
            const int column = 4 * (i * SHARE + sharer) + c;
            if (query < call.Nq && column < d)
                quad[c] = call.scale * to_float(block.q[query * call.q_strides.row + column]);
        }
        q[i] = {quad[0], quad[1], quad[2], quad[3]};
    }
#if O_SHARED
    float4* o = aligned + 2 * BC * PITCH / 4 + threadIdx.x;  // a thread's fours are THREADS apart
#define O(i) o[(i) * THREADS]
#else
    float4 o[QUADS];
#define O(i) o[i]
#endif
    UNROLLED(i, QUADS) O(i) = {0, 0, 0, 0};
    float m = -INF, l = 0;

    const int seen = keys_seen(call, query), keys = keys_seen(call, min(block.first_query + BR, call.Nq) - 1);
    for (int first_key = 0; first_key < keys; first_key += BC) {
        __syncthreads();  // all threads have read the previous tiles
        load(K, block.k + first_key * call.k_strides.row, call.k_strides.row, call.Nk - first_key);
        load(V, block.v + first_key * call.v_strides.row, call.v_strides.row, call.Nk - first_key);
        __syncthreads();
        for (int j0 = 0; j0 < BC && first_key + j0 < keys; j0 += STRIP) {
            float s[STRIP] = {};
            UNROLLED(i, QUADS)
                UNROLLED(j, STRIP) s[j] = dot(q[i], read(K, j0 + j, i, sharer), s[j]);
            float m_new = m;
            UNROLLED(j, STRIP) {
                for (int lane = SHARE / 2; lane > 0; lane /= 2) s[j] += __shfl_xor_sync(~0u, s[j], lane);
                if (first_key + j0 + j >= seen) s[j] = -INF;
                m_new = fmaxf(m_new, s[j]);
            }
            const float correction = exp2_approx(m - subtrahend(m_new));
            m = m_new;
            l *= correction;
            UNROLLED(i, QUADS) {
                float4& all = O(i);
                all.x *= correction;
                all.y *= correction;
                all.z *= correction;
                all.w *= correction;
            }
            UNROLLED(j, STRIP) l += s[j] = exp2_approx(s[j] - subtrahend(m));
            UNROLLED(i, QUADS) {
                float4 sum = O(i);
                UNROLLED(j, STRIP) add(sum, s[j], read(V, j0 + j, i, sharer));
                O(i) = sum;
            }
        }
    }

    if (query >= call.Nq) return;
    const long long at = block.head * call.Nq + query;
    UNROLLED(i, QUADS) {
        const float4 all = O(i);
        const float quad[4] = {all.x, all.y, all.z, all.w};
        for (int c = 0; c < 4; ++c) {
            const int column = 4 * (i * SHARE + sharer) + c;
            if (column < d) call.out[at * d + column] = to_element(quad[c] / l);
        }
    }
    if (sharer == 0 && call.lse) call.lse[at] = LN2 * subtrahend(m) + logf(l);
}
