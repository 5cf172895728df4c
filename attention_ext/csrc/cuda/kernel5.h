// What kernel5_16bit.cu and kernel5_tf32.cu share: the ring of tiles in shared memory, the softmax, and the
// loop over chunks of keys. Each defines Queries, scores() and add_values() in its arithmetic.
//
// Loop nest: the grid goes over (batch, head) and tiles of BR queries, a block over tiles of BC keys, the last
//     first:
//         for chunks of CHUNK keys; every warp has 16 M_TILES queries and all the keys
//             S <- Q K^T                                         tensor cores
//             P <- 2^(scale S - m), l <- l + rowsum(P)           registers; S becomes P without leaving them
//             O <- O + P V                                       tensor cores
//     then O <- O / l, L <- m + log(l). Tiles with masked keys have a loop of their own.
// Shared memory: STAGES tiles of K and V; one stage is filled in halves, with one more barrier a tile.
//     STRIDE: a row rounded up to an odd number of 16 bytes, against bank conflicts.
// Softmax: m is the maximum of an earlier chunk; a sum of weights beyond LIMIT raises it, so O is seldom
//     rescaled. Values beyond 2^127 / (LIMIT Nk) may overflow O, where SDPA's do not.
//
// Macros of its own, by cuda/tiles.py:
//   M_TILES  tiles of 16 queries of a warp
//   CHUNK    keys whose scores are in registers at a time
//   STAGES   tiles in shared memory
//   BLOCKS   blocks that a multiprocessor should hold: bounds the registers
//   WIDTH    d as the products see it; added columns are 0
//   STRIDE   bytes of a row in shared memory
#pragma once
#include "call.h"
#include "mma.h"
#include "rules.h"

constexpr int WARPS = THREADS / 32, ROWS = 16 * M_TILES;
constexpr int D = HEAD_DIM, SIZE = sizeof(Element);
constexpr int COPY = 16 / SIZE, COPIES = D / COPY;   // elements of a 16-byte copy, copies of a row
constexpr int SLICE = FORMAT == FP32 ? 8 : 16;       // numbers that a product sums
constexpr int TILE = BC * STRIDE, STAGE = 2 * TILE;  // K and V
constexpr int CHUNKS = BC / CHUNK, UNITS = M_TILES * (CHUNK / 8), SLICES = WIDTH / SLICE;
// The largest sum of a lane's weights in a chunk. Float16 ends at 65,504: 2^14 leaves a factor of 4. Elsewhere
// 2^24 leaves float32's sums over 2^31 keys far below 2^128, and m seldom moves.
constexpr float LIMIT = FORMAT == FP16 ? 16384.0f : 16777216.0f;

static_assert(BC % CHUNK == 0 && CHUNK % 16 == 0 && (STAGES > 1 || CHUNKS == 1), "tile");

using Scores = float[M_TILES][CHUNK / 8][4];
using Weights = unsigned[M_TILES][CHUNK / SLICE][4];  // the bits of a float32, or of two 16-bit numbers
using Output = float[M_TILES][WIDTH / 8][4];
using Pairs = float[M_TILES][2];  // of a lane's rows g and g + 8 of each tile of 16

struct Queries;  // of a warp, the left operands of Q K^T
// S <- S + Q K^T. k: where the lane reads the chunk's keys.
__device__ inline void scores(Scores& S, const Queries& Q, unsigned k);
// O <- O + P V. v: where the lane reads the chunk's values.
__device__ inline void add_values(Output& O, const Weights& P, unsigned v);

// The tiles that a block visits, the last keys first. STAGES of them are in shared memory.
struct Tiles {
    const Call& call;
    const Block& block;
    unsigned ring;            // address of the first stage
    unsigned k_lane, v_lane;  // where the lane reads a tile's K and V
    int first;                // key
    int count;
    int masked, clear;  // in those before `masked` and from `clear` on some row does not see some key, or all
                        // scores change

#if __CUDA_ARCH__ >= 800
    // The copies of tile n begin, of its keys, its values or both.
    template <bool KEYS = true, bool VALUES = true> __device__ inline void load(int n) {
        if (n < count) {
            const int j0 = first_key(n);
            const unsigned to = ring + n % STAGES * STAGE;
            const Element *k_tile = block.k + j0 * call.k_strides.row,
                          *v_tile = block.v + j0 * call.v_strides.row;
            each_piece<BC, COPIES>([&](int, int row, int column) {
                const bool inside = j0 + row < call.Nk;
                const int source = inside ? row : 0;
                if (KEYS)
                    copy_async(to + row * STRIDE + column * 16,
                               k_tile + source * call.k_strides.row + column * COPY, inside ? 16 : 0);
                if (VALUES)
                    copy_async(to + TILE + row * STRIDE + column * 16,
                               v_tile + source * call.v_strides.row + column * COPY, inside ? 16 : 0);
            });
        }
        close_group();
    }

    __device__ inline void start() {
        if (STAGES == 1) load<true, false>(0);
        UNROLLED(n, STAGES - 1) load(n);
    }

    // Tile n's first byte, once it is here. The copies of the tile STAGES - 1 further begin. With one stage
    // only the keys are here then, and the copies of the values begin.
    __device__ inline unsigned next(int n) {
        wait_groups<STAGES == 1 ? 0 : STAGES - 2>();
        __syncthreads();
        load<STAGES != 1, true>(n + STAGES - 1);
        return ring + n % STAGES * STAGE;
    }

    // With one stage: tile n's values are here, and the copies of the next tile's keys begin.
    __device__ inline void wait_for_values(int n) {
        if (STAGES > 1) return;
        wait_groups<0>();
        __syncthreads();
        load<true, false>(n + 1);
    }
#else
    // Without cp.async the thread's part of the next tile is in registers while it computes.
    uint4 held[2][(BC * COPIES + THREADS - 1) / THREADS];
    static_assert(STAGES == 2, "one tile is on its way");

    __device__ inline void load(int n) {
        if (n >= count) return;
        const int j0 = first_key(n);
        each_piece<BC, COPIES>([&](int i, int row, int column) {
            const bool inside = j0 + row < call.Nk;
            const long long at = j0 + row;
            held[0][i] = inside ? *(const uint4*)(block.k + at * call.k_strides.row + column * COPY) : uint4{};
            held[1][i] = inside ? *(const uint4*)(block.v + at * call.v_strides.row + column * COPY) : uint4{};
        });
    }

    __device__ inline void start() { load(0); }

    __device__ inline unsigned next(int n) {
        const unsigned to = ring + n % STAGES * STAGE;
        each_piece<BC, COPIES>([&](int i, int row, int column) {
            UNROLLED(n, 2) store_shared(to + n * TILE + row * STRIDE + column * 16, held[n][i]);
        });
        __syncthreads();
        load(n + 1);
        return to;
    }
    __device__ inline void wait_for_values(int) {}
#endif

    __device__ inline int first_key(int n) const { return first + (count - 1 - n) * BC; }
};

// The tiles of this block; the first copies have begun.
__device__ inline Tiles begin_tiles(const Call& call, const Block& block, unsigned ring, unsigned k_lane,
                                    unsigned v_lane) {
    const int i0 = block.first_query;
    const Range keys = range_of(call, block.head, i0, min(i0 + BR, call.Nq) - 1);
    const int first = keys.first, count = (keys.end - first + BC - 1) / BC;
    int unmasked = (keys.all_end - first) / BC, before = 0;  // the tiles before them have a mask, too
    if (RULES) {
        before = CHANGES ? count : min((keys.all_first - first + BC - 1) / BC, count);
        unmasked = max(unmasked, before);
    }
    Tiles tiles{call, block, ring, k_lane, v_lane, first, count, count - unmasked, count - before};
    if (D != WIDTH) {
        constexpr int ADDED = D == WIDTH ? 1 : (WIDTH - D) / COPY;
        for (int c = threadIdx.x; c < STAGES * 2 * BC * ADDED; c += THREADS)
            store_shared(ring + c / ADDED * STRIDE + COPIES * 16 + c % ADDED * 16, uint4{});
    }
    tiles.start();
    return tiles;
}

struct State {  // of a warp's rows; four neighbouring lanes share a row, and a lane has its share of l
    Output O = {};
    Pairs m, l = {};
    float scale;

    __device__ inline explicit State(float scale) : scale(scale) {
        UNROLLED(i, M_TILES) m[i][0] = m[i][1] = -INF;
    }
};

// P <- 2^(scale S - m), 8 keys of a tile of 16 rows; sums <- rowsum(P), the lane's share of it
template <bool SCALED>
__device__ inline void weigh(Weights& P, Pairs& sums, const Scores& S, const Pairs& m, float scale, int unit) {
    const int i = unit / (CHUNK / 8), n = unit % (CHUNK / 8);
    float p[4];
    UNROLLED(e, 4)
        p[e] = exp2_approx(SCALED ? S[i][n][e] - m[i][e / 2] : fmaf(S[i][n][e], scale, -m[i][e / 2]));
    sums[i][0] = n ? sums[i][0] + (p[0] + p[1]) : p[0] + p[1];
    sums[i][1] = n ? sums[i][1] + (p[2] + p[3]) : p[2] + p[3];
    if constexpr (FORMAT == FP32) {
        UNROLLED(e, 4) P[i][n][e] = __float_as_uint(p[e]);
    } else {
        P[i][n / 2][n % 2 * 2] = pack(p[0], p[1]);
        P[i][n / 2][n % 2 * 2 + 1] = pack(p[2], p[3]);
    }
}

// Adds the chunk's sums to l. If one reaches LIMIT or is NaN, the warp first updates m, rescaling l and O.
template <bool SCALED> __device__ inline void settle(State& s, Weights& P, Pairs& sums, const Scores& S) {
    bool in_range = true;
    UNROLLED(i, M_TILES) in_range = in_range && sums[i][0] < LIMIT && sums[i][1] < LIMIT;
    if (__any_sync(~0u, !in_range)) {
        const float scale = SCALED ? 1.0f : s.scale;
        Pairs subtracted;
        UNROLLED(i, M_TILES)
            UNROLLED(h, 2) {
                float most = -INF;
                UNROLLED(n, CHUNK / 8)
                    most = fmaxf(most, fmaxf(S[i][n][2 * h] * scale, S[i][n][2 * h + 1] * scale));
                const float m_new = fmaxf(s.m[i][h], largest<1, 4>(most));
                subtracted[i][h] = subtrahend(m_new);
                const float correction = exp2_approx(s.m[i][h] - subtracted[i][h]);
                s.m[i][h] = m_new;
                s.l[i][h] *= correction;
                UNROLLED(n, WIDTH / 8) {
                    s.O[i][n][2 * h] *= correction;
                    s.O[i][n][2 * h + 1] *= correction;
                }
            }
        UNROLLED(unit, UNITS) weigh<SCALED>(P, sums, S, subtracted, s.scale, unit);
    }
    UNROLLED(i, M_TILES) s.l[i][0] += sums[i][0], s.l[i][1] += sums[i][1];
}

// Tiles `from` to `to` - 1. MASKED: some row may not see some key; warp_row: the warp's first row.
template <bool MASKED>
__device__ inline void attend(State& s, const Queries& Q, Tiles& tiles, int from, int to, int warp_row) {
    const Call& call = tiles.call;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#if RULES
    const Range of_warp = range_of(call, tiles.block.head, warp_row, warp_row + ROWS - 1);
    const auto unseen = [&](int key) { return key >= of_warp.end || key + CHUNK <= of_warp.first; };
    const auto all_seen = [&](int key) { return key >= of_warp.all_first && key + CHUNK <= of_warp.all_end; };
#else
    const auto unseen = [&](int key) { return key >= keys_seen(call, warp_row + ROWS - 1); };
#endif
    for (int tile = from; tile < to; ++tile) {
        const unsigned at = tiles.next(tile);
#pragma unroll(MASKED ? 1 : CHUNKS)
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int c = MASKED ? CHUNKS - 1 - chunk : chunk;
            const int key = tiles.first_key(tile) + c * CHUNK;
            if (MASKED && unseen(key)) {
                tiles.wait_for_values(tile);
                continue;
            }

            Scores S = {};
            scores(S, Q, at + tiles.k_lane + c * (CHUNK * STRIDE));
            if (MASKED) {
                UNROLLED(i, M_TILES)
                    UNROLLED(h, 2) {
#if RULES
                        const Row row(call, tiles.block.head, warp_row + 16 * i + 8 * h + g, key + 2 * t);
                        const auto score = [&](int n) -> float& { return S[i][n / 2][2 * h + n % 2]; };
                        UNROLLED(n, CHUNK / 4) score(n) *= s.scale;
                        apply<CHUNK / 4>(row, score, all_seen(key));
#else
                        const int seen = keys_seen(call, warp_row + 16 * i + 8 * h + g) - key - 2 * t;
                        UNROLLED(n, CHUNK / 8)
                            UNROLLED(e, 2)
                                S[i][n][2 * h + e] = 8 * n + e < seen ? S[i][n][2 * h + e] * s.scale : -INF;
#endif
                    }
            }
            Weights P;
            Pairs sums;
            UNROLLED(unit, UNITS) weigh<MASKED>(P, sums, S, s.m, s.scale, unit);
            settle<MASKED>(s, P, sums, S);
            tiles.wait_for_values(tile);
            add_values(s.O, P, at + tiles.v_lane + c * (CHUNK * STRIDE));
        }
    }
}

// All tiles. unmasked(): those from tiles.masked on to tiles.clear.
template <class Unmasked>
__device__ inline void attend_all(State& s, const Queries& Q, Tiles& tiles, int warp_row,
                                  const Unmasked& unmasked) {
#pragma unroll 1
    for (int part = 0; part < (RULES ? 2 : 1); part++) {
        attend<true>(s, Q, tiles, part ? tiles.clear : 0, part ? tiles.count : tiles.masked, warp_row);
        if (!CHANGES && part == 0) unmasked();
    }
}

// O <- O / l, L <- m + log(l). row0: the lane's first of a head's rows; head: of all batches.
__device__ inline void finish(State& s, const Call& call, long long head, int row0) {
    UNROLLED(i, M_TILES)
        UNROLLED(h, 2) {
#if RULES
            float l = sum<1, 4>(s.l[i][h]);
            const float inverse = inverse_with_sink(call, head, s.m[i][h], l);
#else
            const float l = sum<1, 4>(s.l[i][h]), inverse = 1.0f / l;
#endif
            const int row = row0 + 16 * i + 8 * h;
            UNROLLED(n, WIDTH / 8) s.O[i][n][2 * h] *= inverse, s.O[i][n][2 * h + 1] *= inverse;
            if (call.lse && threadIdx.x % 4 == 0 && row < call.Nq)
                call.lse[head * call.Nq + row] = (s.m[i][h] + log2f(l)) * LN2;
        }
}
