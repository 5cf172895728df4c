// Kernel 5 in float32: the tensor cores with mma.sync, as three products of tf32 parts (FlashAttention-2).
// Source: Dao 2023, arXiv:2307.08691. Least architecture: sm_80.
//
// Shapes: float32; d is a multiple of 8 up to 256; pointers and strides are multiples of 16 bytes.
// Loop nest: that of kernel5.h; in each chunk, over groups of keys and blocks of 32 columns:
//         T <- Q K^T by three products, S <- S + T; later T <- P V by three products, O <- O + T
// Launch: B H ceil(Nq / BR) blocks of THREADS threads.
// Shared memory: K and V, STAGES * 2 * BC * STRIDE bytes; Q, 4 BR d bytes, or 8 BR d as two parts (Q_SPLIT).
// Improves on kernel 4: an instruction of the tensor cores does 1,024 multiply-adds. x = high + low, and x y
//     = high high + high low + low high, each exact in tf32 products. The tensor cores round sums towards
//     zero, so only sums of 32 columns or one chunk of keys are left to them.
// Bound: the tensor cores, and shared memory at d = 128. Infinite numbers, and finite ones from 3.4019e38 on,
//     have no low part: a row with such a query or key is NaN, such a value makes its column NaN in rows that
//     see it.
// Command: python gpt.py bench kernel3,kernel4,kernel5,sdpa-efficient,sdpa-math --device cuda -d 32,64,128
//          --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H200, (100, 1, 4096, d), no mask, TFLOP/s at d = 32, 64 and 128: 66.0, 72.6, 61.1; that is
//     1.72, 1.69 and 1.40 times kernel 4, and 3.19, 2.04 and 1.30 times SDPA's efficient backend.
#include "kernel5.h"
#if FORMAT != FP32
#error "this is kernel 5 in float32: --dtype must be fp32"
#endif

// Macros beside those of kernel5.h: Q_SPLIT 1: the queries are kept as their two parts; 0: split at each use.

constexpr int GROUP = CHUNK >= 32 ? 4 : 2;  // 8-key tiles of scores that share a load of the queries
constexpr int Q_PARTS = Q_SPLIT ? 2 : 1;    // 16 bytes of a lane for 16 queries and SLICE columns
constexpr int Q_WARP = M_TILES * SLICES * Q_PARTS * 512;  // bytes of a warp's queries

// In shared memory: a lane's four numbers of 16 rows and SLICE columns, with Q_SPLIT high, then low parts.
struct Queries {
    unsigned lane_at;  // address of the lane's first 16 bytes; the next lane's follow
    __device__ inline unsigned at(int tile, int slice) const {
        return lane_at + (tile * SLICES + slice) * (Q_PARTS * 512);
    }
    __device__ inline void put(const float (&x)[4], int tile, int slice) const {
        unsigned high[4], low[4];
        UNROLLED(e, 4) {
            split(x[e], high[e], low[e]);
            if (!Q_SPLIT) high[e] = __float_as_uint(x[e]);
        }
        store_shared(at(tile, slice), high);
        if (Q_SPLIT) store_shared(at(tile, slice) + 512, low);
    }
    __device__ inline void get(unsigned (&high)[4], unsigned (&low)[4], int tile, int slice) const {
        reload_shared(high, at(tile, slice));
        if (Q_SPLIT)
            reload_shared(low, at(tile, slice) + 512);
        else
            split(high, high, low);
    }
};

// GROUP tiles of 8 keys and 32 of the d columns at a time. The sum over d may take any order: of 32 columns a
// lane has 8 t to 8 t + 7, in K two 16-byte loads.
__device__ inline void scores(Scores& S, const Queries& Q, unsigned k) {
    UNROLLED(block, WIDTH / 32)
#pragma unroll
        for (int n0 = 0; n0 < CHUNK / 8; n0 += GROUP) {
            float T[M_TILES][GROUP][4] = {};
            UNROLLED(half, 2) {
                unsigned high[GROUP][4], low[GROUP][4];
                UNROLLED(n, GROUP) {
                    load_shared(high[n], k + (n0 + n) * 8 * STRIDE + block * 128 + half * 16);
                    split(high[n], high[n], low[n]);
                }
                UNROLLED(slice, 2) {
                    unsigned a_high[M_TILES][4], a_low[M_TILES][4];
                    UNROLLED(i, M_TILES) Q.get(a_high[i], a_low[i], i, block * 4 + half * 2 + slice);
                    UNROLLED(n, GROUP)
                        UNROLLED(i, M_TILES)
                            multiply_tf32(T[i][n], a_low[i], high[n][2 * slice], high[n][2 * slice + 1]);
                    UNROLLED(n, GROUP)
                        UNROLLED(i, M_TILES)
                            multiply_tf32(T[i][n], a_high[i], low[n][2 * slice], low[n][2 * slice + 1]);
                    UNROLLED(n, GROUP)
                        UNROLLED(i, M_TILES)
                            multiply_tf32(T[i][n], a_high[i], high[n][2 * slice], high[n][2 * slice + 1]);
                }
            }
            UNROLLED(n, GROUP)
                UNROLLED(i, M_TILES)
                    UNROLLED(e, 4) S[i][n0 + n][e] = block ? S[i][n0 + n][e] + T[i][n][e] : T[i][n][e];
        }
}

// 32 columns at a time. The sum over the keys may take any order, and so may the columns: the scores' c0 and
// c1, keys 2 t and 2 t + 1, are a0 and a2 here; a lane has columns 4 g to 4 g + 3 of V.
__device__ inline void add_values(Output& O, const Weights& P, unsigned v) {
    UNROLLED(block, WIDTH / 32) {
        float T[M_TILES][4][4] = {};
        UNROLLED(keys, CHUNK / 8) {
            unsigned a_high[M_TILES][4], a_low[M_TILES][4], high[2][4], low[2][4];
            UNROLLED(i, M_TILES) {
                const unsigned (&p)[4] = P[i][keys];
                split({p[0], p[2], p[1], p[3]}, a_high[i], a_low[i]);
            }
            UNROLLED(j, 2) {
                load_shared(high[j], v + (keys * 8 + j) * STRIDE + block * 128);
                split(high[j], high[j], low[j]);
            }
            UNROLLED(n, 4)
                UNROLLED(i, M_TILES) multiply_tf32(T[i][n], a_low[i], high[0][n], high[1][n]);
            UNROLLED(n, 4)
                UNROLLED(i, M_TILES) multiply_tf32(T[i][n], a_high[i], low[0][n], low[1][n]);
            UNROLLED(n, 4)
                UNROLLED(i, M_TILES) multiply_tf32(T[i][n], a_high[i], high[0][n], high[1][n]);
        }
        UNROLLED(n, 4)
            UNROLLED(i, M_TILES)
                UNROLLED(e, 4) O[i][block * 4 + n][e] += T[i][n][e];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_kernel5(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int Nq = call.Nq, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const Block block = block_across_heads(call, BR);
    const int warp_row = block.first_query + warp * ROWS;  // a lane's rows: warp_row + g + 16 i + 8 h
    Tiles tiles = begin_tiles(call, block, shared_address(shared) + WARPS * Q_WARP, g * STRIDE + t * 32,
                              TILE + 2 * t * STRIDE + g * 16);

    const Queries Q{shared_address(shared) + warp * Q_WARP + lane * 16};
    UNROLLED(i, M_TILES)
        UNROLLED(b, WIDTH / 32) {
            float4 x[2][2] = {};
            UNROLLED(h, 2)
                UNROLLED(half, 2) {
                    const int row = warp_row + g + 16 * i + 8 * h, column = b * 32 + 8 * t + 4 * half;
                    if (row < Nq && column < D)
                        x[h][half] = *(const float4*)(block.q + row * call.q_strides.row + column);
                }
            UNROLLED(half, 2) {
                const float4 upper = x[0][half], lower = x[1][half];
                Q.put({upper.x, lower.x, upper.y, lower.y}, i, b * 4 + 2 * half);
                Q.put({upper.z, lower.z, upper.w, lower.w}, i, b * 4 + 2 * half + 1);
            }
        }

    State s(call.scale);
    attend_all(s, Q, tiles, warp_row, [&] { attend<false>(s, Q, tiles, tiles.masked, tiles.clear, warp_row); });
    const long long first = block.head * Nq;
    finish(s, call, block.head, warp_row + g);
    UNROLLED(i, M_TILES)
        UNROLLED(h, 2) {
            const int row = warp_row + g + 16 * i + 8 * h;
            if (row < Nq)
                UNROLLED(b, WIDTH / 32)
                    UNROLLED(half, 2) {
                        const int column = b * 32 + 8 * t + 4 * half, e = 2 * h + half;
                        if (column < D)
                            *(float4*)(call.out + (first + row) * D + column) =
                                make_float4(s.O[i][4 * b][e], s.O[i][4 * b + 1][e], s.O[i][4 * b + 2][e],
                                            s.O[i][4 * b + 3][e]);
                    }
        }
}
