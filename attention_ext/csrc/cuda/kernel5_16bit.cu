// Kernel 5 in bfloat16 and float16: the tensor cores with mma.sync (FlashAttention-2).
// Source: Dao 2023, arXiv:2307.08691. Least architecture: sm_80; in float16 sm_75.
//
// Shapes: bf16 and fp16; d is a multiple of 8 up to 256; pointers and strides are multiples of 16 bytes.
// Loop nest: that of kernel5.h. With PIPE, a loop of its own overlaps the chunks of tiles without a mask.
// Launch: B H ceil(Nq / BR) blocks of THREADS threads.
// Shared memory: K and V, STAGES * 2 * BC * STRIDE bytes, and with Q_SHARED Q, 2 BR d bytes.
// Improves on kernel 4: an instruction of the tensor cores does 2,048 multiply-adds. With PIPE, the scores of
//     the next chunk and (PIPE 2) the product of the previous one are interleaved with the exponentials.
// Bound: the exponentials at d = 32, shared memory from d = 64 on. At d = 128 O takes 128 registers a thread,
//     so Q lies in shared memory and is read again for every chunk; long chunks read it less often.
// Command: python gpt.py bench kernel5,kernel6,sdpa-flash,sdpa-cudnn --device cuda --dtype bf16 -d 32,64,128
//          --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H200, bf16, (100, 1, 4096, d), no mask, TFLOP/s at d = 32, 64 and 128: 298, 353, 322;
//     1.42, 1.22 and 1.01 times SDPA's flash backend.
#include "kernel5.h"
#if FORMAT == FP32
#error "this is kernel 5 in 16 bits: --dtype must be bf16 or fp16"
#endif

// Macros beside those of kernel5.h:
//   PIPE      0: one chunk after the other; 1: the next scores beside this softmax; 2: the product before, too
//   Q_SHARED  1: the queries' fragments are in shared memory; 0: in registers

constexpr int QK_PRODUCTS = WIDTH / 16, PV_PRODUCTS = (CHUNK / 16) * (WIDTH / 16);
static_assert(STAGES >= (PIPE ? 3 : 2), "the copies run ahead");
static_assert(PIPE < 2 || CHUNKS >= 2, "a stage is overwritten one chunk after its last use");
static_assert(BR <= STAGES * 2 * BC, "the tiles' memory takes the result");

// Four registers for 16 rows and a slice of 16 columns; with Q_SHARED at the address `at`, lane by lane.
struct Queries {
    unsigned at, registers[Q_SHARED ? 1 : M_TILES][Q_SHARED ? 1 : SLICES][4];

    __device__ inline void put(const unsigned (&a)[4], int tile, int slice) {
        if (Q_SHARED)
            store_shared(at + (tile * SLICES + slice) * 512, a);
        else
            UNROLLED(e, 4) registers[tile][slice][e] = a[e];
    }
    __device__ inline void get(unsigned (&a)[4], int tile, int slice) const {
        if (Q_SHARED)
            reload_shared(a, at + (tile * SLICES + slice) * 512);
        else
            UNROLLED(e, 4) a[e] = registers[tile][slice][e];
    }
};

// S += Q K^T, 16 of the d columns. All keys of the chunk share a load of the queries.
__device__ inline void qk_product(Scores& S, const Queries& Q, unsigned k, int slice) {
    unsigned a[M_TILES][4];
    UNROLLED(i, M_TILES) Q.get(a[i], i, slice);
    UNROLLED(pair, CHUNK / 16) {
        unsigned b[4];
        load_matrices(b, k + pair * 16 * STRIDE + slice * 32);
        UNROLLED(i, M_TILES) {
            multiply_16bit(S[i][2 * pair], a[i], b[0], b[1]);
            multiply_16bit(S[i][2 * pair + 1], a[i], b[2], b[3]);
        }
    }
}
__device__ inline void scores(Scores& S, const Queries& Q, unsigned k) {
    UNROLLED(product, QK_PRODUCTS) qk_product(S, Q, k, product);
}

// O += P V, 16 keys and 16 columns. The scores' registers, rounded in pairs, are the product's.
__device__ inline void pv_product(Output& O, const Weights& P, unsigned v, int product) {
    const int keys = product / (WIDTH / 16), pair = product % (WIDTH / 16);
    unsigned b[4];
    load_transposed(b, v + keys * 16 * STRIDE + pair * 32);
    UNROLLED(i, M_TILES) {
        multiply_16bit(O[i][2 * pair], P[i][keys], b[0], b[1]);
        multiply_16bit(O[i][2 * pair + 1], P[i][keys], b[2], b[3]);
    }
}
__device__ inline void add_values(Output& O, const Weights& P, unsigned v) {
    UNROLLED(product, PV_PRODUCTS) pv_product(O, P, v, product);
}

// The tiles without a mask: products of other chunks are interleaved with the exponentials.
__device__ inline void attend_interleaved(State& s, const Queries& Q, Tiles& tiles) {
    int n = tiles.masked;
    if (n >= tiles.clear) return;
    wait_groups<STAGES - 2>();
    __syncthreads();
    unsigned tile = tiles.ring + n % STAGES * STAGE;
    Scores S = {};
    scores(S, Q, tile + tiles.k_lane);
    Weights P_before = {};
    unsigned v_before = tile + tiles.v_lane;
    for (; n < tiles.clear; ++n) {
        unsigned next_tile = 0;
        UNROLLED(c, CHUNKS) {
            unsigned k_next = tile + tiles.k_lane + (c + 1) * (CHUNK * STRIDE);
            if (c == CHUNKS - 1) {
                // The next tile is here, and no warp reads the one before this.
                wait_groups<STAGES - 3>();
                __syncthreads();
                tiles.load(n + STAGES - 1);
                next_tile = tiles.ring + (n + 1) % STAGES * STAGE;
                k_next = next_tile + tiles.k_lane;  // past the last one: the scores are unused
            }
            Scores S_next = {};
            Weights P;
            Pairs sums;
            UNROLLED(unit, UNITS) {
#pragma unroll
                for (int product = unit * QK_PRODUCTS / UNITS; product < (unit + 1) * QK_PRODUCTS / UNITS;
                     ++product)
                    qk_product(S_next, Q, k_next, product);
                weigh<false>(P, sums, S, s.m, s.scale, unit);
                if (PIPE == 2)
#pragma unroll
                    for (int product = unit * PV_PRODUCTS / UNITS; product < (unit + 1) * PV_PRODUCTS / UNITS;
                         ++product)
                        pv_product(s.O, P_before, v_before, product);
            }
            settle<false>(s, P, sums, S);
            const unsigned v = tile + tiles.v_lane + c * (CHUNK * STRIDE);
            if (PIPE == 2) {
                v_before = v;
                UNROLLED(i, M_TILES)
                    UNROLLED(x, CHUNK / 16)
                        UNROLLED(e, 4) P_before[i][x][e] = P[i][x][e];
            } else {
                add_values(s.O, P, v);
            }
            UNROLLED(i, M_TILES)
                UNROLLED(x, CHUNK / 8)
                    UNROLLED(e, 4) S[i][x][e] = S_next[i][x][e];
        }
        tile = next_tile;
    }
    if (PIPE == 2) add_values(s.O, P_before, v_before);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_kernel5(const Call call) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int Q_WARP = Q_SHARED ? M_TILES * SLICES * 512 : 0;  // bytes of a warp's queries
    const int Nq = call.Nq, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const Block block = block_of(call, BR);
    const int warp_row = block.first_query + warp * ROWS;  // a lane's rows: warp_row + g + 16 i + 8 h
    Tiles tiles = begin_tiles(call, block, shared_address(shared) + WARPS * Q_WARP,
                              (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16,
                              TILE + lane % 16 * STRIDE + lane / 16 * 16);

    Queries Q;
    Q.at = shared_address(shared) + warp * Q_WARP + lane * 16;
    UNROLLED(i, M_TILES)
        UNROLLED(slice, SLICES) {
            unsigned a[4];
            UNROLLED(e, 4) {
                const int row = warp_row + g + 16 * i + e % 2 * 8, column = slice * 16 + e / 2 * 8 + 2 * t;
                const bool inside = row < Nq && column < D;
                a[e] = inside ? *(const unsigned*)(block.q + row * call.q_strides.row + column) : 0u;
            }
            Q.put(a, i, slice);
        }

    State s(call.scale);
    attend_all(s, Q, tiles, warp_row, [&] {
        if constexpr (PIPE == 0)
            attend<false>(s, Q, tiles, tiles.masked, tiles.clear, warp_row);
        else
            attend_interleaved(s, Q, tiles);
    });
    const long long first = block.head * Nq;
    finish(s, call, block.head, warp_row + g);

    __syncthreads();  // the tiles are no longer read: their memory takes each warp's rows
    const unsigned rows = shared_address(shared) + warp * (ROWS * STRIDE);
    UNROLLED(i, M_TILES)
        UNROLLED(h, 2)
            UNROLLED(x, WIDTH / 8)
                store_shared(rows + (16 * i + 8 * h + g) * STRIDE + x * 16 + t * 4,
                             pack(s.O[i][x][2 * h], s.O[i][x][2 * h + 1]));
    __syncwarp();
#pragma unroll
    for (int c0 = 0; c0 < ROWS * COPIES; c0 += 32) {
        const int row = (c0 + lane) / COPIES, column = (c0 + lane) % COPIES;
        if (row >= ROWS || warp_row + row >= Nq) continue;
        unsigned x[4];
        load_shared(x, rows + row * STRIDE + column * 16);
        *(uint4*)(call.out + (first + warp_row + row) * D + column * COPY) = {x[0], x[1], x[2], x[3]};
    }
}
