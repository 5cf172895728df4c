// What backward2.cu and backward3.cu share, the passes on the tensor cores with mma.sync; each defines scores()
// and add_product() in its arithmetic.
// Source: Dao 2023, arXiv:2307.08691. Least architecture: sm_80.
//
// Loop nest: that of backward.h. Both passes are one loop. A warp owns 16 M rows, of K and V or of Q and dO, as
//     left operands X and Y; tiles of TILE rows of the others, Z and W, go through shared memory:
//         for chunks of CHUNK rows of Z and W
//             S <- X Z^T,  dP <- Y W^T            tensor cores; S^T and dP^T, if the warp has keys
//             P <- 2^(scale S - lse),  dS <- P * (dP - D)     registers; left operands of products as they lie
//             dX <- dX + dS Z  and, if the warp has keys,  dY <- dY + P W                     tensor cores
// Launch: after the rows', a block of THREADS threads for each BC keys, then for each BR queries.
// Shared memory: STAGES tiles of Z and W, 2 TILE STRIDE bytes, with the rows' numbers, 8 TILE; X and Y, where
//     they are not in registers.
//
// Macros of its own, by cuda/tiles.py:
//   K_M, Q_M          tiles of 16 rows of a warp, in the pass over keys and in that over queries
//   K_CHUNK, Q_CHUNK  rows of Z and W whose scores are in registers at a time
//   K_HELD, Q_HELD    1: X and Y are in registers; 0: in shared memory, and read again for each chunk
//   K_BLOCKS, Q_BLOCKS  blocks that a multiprocessor should hold: bounds the registers
//   K_PAIRED          1: two warps share the rows of the pass over keys, with half of the sums each
//   TILE, STAGES      rows of Z and W in a tile, tiles in shared memory
//   WIDTH, STRIDE     d as the products see it, bytes of a row in shared memory
#pragma once
#include "backward.h"
#include "mma.h"

constexpr int D = HEAD_DIM, WARPS = THREADS / 32, SIZE = sizeof(Element);
constexpr int COPY = 16 / SIZE, COPIES = D / COPY;  // elements of a 16-byte copy, copies of a row
constexpr int SLICE = FORMAT == FP32 ? 8 : 16;      // numbers that a product sums
constexpr int SLICES = WIDTH / SLICE;
constexpr int W_TILE = TILE * STRIDE, STAGE = 2 * W_TILE + 8 * TILE;
static_assert(BC * (1 + K_PAIRED) == 16 * K_M * WARPS && BR == 16 * Q_M * WARPS && TILE / 2 <= THREADS &&
                  STAGES > 1,
              "tile");
static_assert(PADDING_OF_ROWS % BR == 0 && PADDING_OF_ROWS % TILE == 0, "rows");
static_assert(!K_PAIRED || WARPS < 16, "each pair has two of the 16 barriers");
static_assert(TILE % K_CHUNK == 0 && TILE % Q_CHUNK == 0 && K_CHUNK % 16 == 0 && Q_CHUNK % 16 == 0, "chunk");

// S <- S + X Z^T of a chunk, or dP <- dP + Y W^T. z: where the lane reads the rows of Z.
template <class Rows, int M, int N>
__device__ inline void scores(float (&S)[M][N][4], const Rows& X, unsigned z);
// sums <- sums + A Z, where the lane reads the chunk's rows from z on.
template <int M, int N>
__device__ inline void add_product(float (&sums)[M][WIDTH / 8][4], const unsigned (&A)[M][N][4], unsigned z);

// A matrix's rows in global memory, from the first one on.
struct Matrix {
    const Element* data;
    long long stride;
    int count;
};

// Left operands of 16 M rows: a lane's four registers for 16 rows and SLICE columns. In float32 a lane has of
// each 32 columns 8 t to 8 t + 7: the products' sum may take any order.
template <int M, bool HELD> struct Rows {
    unsigned at, registers[HELD ? M : 1][HELD ? SLICES : 1][4];  // at: the lane's address in shared memory

    __device__ inline void load(const Matrix& from, int first) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(i, M)
            UNROLLED(slice, SLICES) {
                unsigned a[4];
                UNROLLED(e, 4) {
                    const int row = first + g + 16 * i + e % 2 * 8;
                    const int column = FORMAT == FP32 ? slice / 4 * 32 + 8 * t + slice % 4 * 2 + e / 2
                                                      : slice * 16 + e / 2 * 8 + 2 * t;
                    const bool inside = row < from.count && column < D;
                    a[e] = inside ? *(const unsigned*)(from.data + row * from.stride + column) : 0u;
                }
                if (HELD)
                    UNROLLED(e, 4) registers[i][slice][e] = a[e];
                else
                    store_shared(at + (i * SLICES + slice) * 512, a);
            }
    }
    __device__ inline void get(unsigned (&a)[4], int i, int slice) const {
        if (HELD)
            UNROLLED(e, 4) a[e] = registers[i][slice][e];
        else
            reload_shared(a, at + (i * SLICES + slice) * 512);
    }
};

// Where a lane reads a tile's rows, as right operands of S, and its columns, as those of sums.
__device__ inline unsigned lane_of_rows() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    return FORMAT == FP32 ? g * STRIDE + t * 32 : (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 16;
}
__device__ inline unsigned lane_of_columns() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    return FORMAT == FP32 ? 2 * t * STRIDE + g * 16 : lane % 16 * STRIDE + lane / 16 * 16;
}

template <bool OF_KEYS> struct Pass {
    static constexpr int M = OF_KEYS ? K_M : Q_M, CHUNK = OF_KEYS ? K_CHUNK : Q_CHUNK, ROWS = 16 * M;
    static constexpr bool HELD = OF_KEYS ? K_HELD : Q_HELD;
    using Scores = float[M][CHUNK / 8][4];
    using Weights = unsigned[M][CHUNK / SLICE][4];  // the bits of a float32, or of two 16-bit numbers
    using Sums = float[M][WIDTH / 8][4];

    const Call& call;
    int first_row;         // of the warp's
    const float2* of_row;  // if they are queries, their logsumexp and D, from the lane's first on
    float* dbias;          // of the queries
    Rows<M, HELD> X, Y;
    Sums dX = {}, dY = {};

    __device__ inline void load(unsigned ring, const Matrix& x, const Matrix& y) {
        constexpr unsigned BYTES = M * SLICES * 512;
        X.at = ring + STAGES * STAGE + threadIdx.x / 32 * 2 * BYTES + threadIdx.x % 32 * 16,
        Y.at = X.at + BYTES;
        X.load(x, first_row), Y.load(y, first_row);
    }

    // The copies of a tile begin: rows of Z and W from `first` on, and of queries their logsumexp and D.
    __device__ inline static void copy(unsigned to, const Matrix& Z, const Matrix& W, const float2* rows,
                                       int first) {
        each_piece<TILE, COPIES>([&](int, int row, int column) {
            const bool inside = first + row < Z.count;
            const long long source = inside ? first + row : 0;
            const unsigned at = to + row * STRIDE + column * 16;
            copy_async(at, Z.data + source * Z.stride + column * COPY, inside ? 16 : 0);
            copy_async(at + W_TILE, W.data + source * W.stride + column * COPY, inside ? 16 : 0);
        });
        if (OF_KEYS && threadIdx.x < TILE / 2)
            copy_async(to + 2 * W_TILE + threadIdx.x * 16, rows + first + 2 * threadIdx.x, 16);
    }

    // Two of a row's weights as the left operand of a product has them.
    __device__ inline static void put(Weights& A, int i, int n, int h, float first, float second) {
        if constexpr (FORMAT == FP32) {
            A[i][n][2 * h] = __float_as_uint(first);
            A[i][n][2 * h + 1] = __float_as_uint(second);
        } else {
            A[i][n / 2][n % 2 * 2 + h] = pack(first, second);
        }
    }

    // A number that put() has put.
    __device__ inline static float weight(const Weights& A, int i, int n, int h, int e) {
        if constexpr (FORMAT == FP32)
            return __uint_as_float(A[i][n][2 * h + e]);
        else
            return to_float((unsigned short)(A[i][n / 2][n % 2 * 2 + h] >> 16 * e));
    }

    // P and dS; with HALF P and P times the scores' derivative, with GIVEN dS alone, from what HALF gave as P.
    // first: of the chunk's rows; rows: the address of its queries' numbers.
    template <bool MASKED, bool HALF = false, bool GIVEN = false>
    __device__ inline static void weigh(const Call& call, int first_row, Weights& P, Weights& dS,
                                        const Scores& S, const Scores& dP, long long head, int first,
                                        unsigned rows, const float2* of_row = nullptr, float* dbias = nullptr) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(n, CHUNK / 8) {
            unsigned of_column[4];  // two queries' logsumexp and D
            if (OF_KEYS) load_shared(of_column, rows + (8 * n + 2 * t) * 8);
            UNROLLED(i, M)
                UNROLLED(h, 2) {
                    float p[2], ds[2];
                    const float2 own = OF_KEYS ? float2{} : of_row[16 * i + 8 * h];
                    UNROLLED(e, 2) {
                        float score = S[i][n][2 * h + e] * call.scale, slope = 1.0f, bias_slope = 1.0f;
                        const float lse = OF_KEYS ? __uint_as_float(of_column[2 * e]) : own.x;
                        const float d = OF_KEYS ? __uint_as_float(of_column[2 * e + 1]) : own.y;
                        bool seen = true;
                        if (MASKED) {
                            const int row = 16 * i + 8 * h + g, column = 8 * n + 2 * t + e;
                            const Pair pair = OF_KEYS
                                                  ? pair_of(call, head, first + column, first_row, row, score)
                                                  : pair_of(call, head, first_row + row, first, column, score);
                            seen = pair.seen;
                            score = pair.score;
                            slope = pair.slope;
                            bias_slope = pair.bias_slope;
                        }
                        p[e] = MASKED && !seen ? 0.0f : exp2_approx(score - lse);
                        if (GIVEN) p[e] = weight(P, i, n, h, e);
                        ds[e] = HALF ? p[e] : p[e] * (dP[i][n][2 * h + e] - d);
                        if (MASKED && !OF_KEYS)
                            store_bias(call, dbias, head, first_row + 16 * i + 8 * h + g,
                                       first + 8 * n + 2 * t + e, ds[e] * bias_slope);
                        if (MASKED) ds[e] *= slope;
                    }
                    if (OF_KEYS && !GIVEN) put(P, i, n, h, p[0], p[1]);
                    put(dS, i, n, h, ds[0], ds[1]);
                }
        }
    }

    // A tile in shared memory, of rows from `first` on; total: the queries or keys that there are.
    __device__ inline void attend(unsigned tile, long long head, int first, int total) {
        const unsigned z = tile + lane_of_rows(), z_transposed = tile + lane_of_columns();
#pragma unroll 1
        for (int c = 0; c < TILE; c += CHUNK) {
            const int at = first + c, i = OF_KEYS ? at : first_row, j = OF_KEYS ? first_row : at;
            if (at >= total) break;
            const Range keys = range_of(call, head, i, i + (OF_KEYS ? CHUNK : ROWS) - 1);
            const int last = OF_KEYS ? min(j + ROWS, call.Nk) - 1 : j + CHUNK - 1;
            if (j >= keys.end || last < keys.first) continue;
            Scores S = {}, dP = {};
            scores(S, X, z + c * STRIDE), scores(dP, Y, z + W_TILE + c * STRIDE);
            Weights P, dS;
            const unsigned rows = tile + 2 * W_TILE + c * 8;
            if (CHANGES || j < keys.all_first || last >= keys.all_end)
                weigh<true>(call, first_row, P, dS, S, dP, head, at, rows, of_row, dbias);
            else
                weigh<false>(call, first_row, P, dS, S, dP, head, at, rows, of_row, dbias);
            add_product(dX, dS, z_transposed + c * STRIDE);
            if (OF_KEYS) add_product(dY, P, z_transposed + W_TILE + c * STRIDE);
        }
    }

    // The warp's rows of a gradient, of `count` in all.
    __device__ inline static void store(Element* out, const Sums& sums, float scale, int first_row, int count) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(i, M)
            UNROLLED(h, 2) {
                const int row = first_row + 16 * i + 8 * h + g;
                Element* const to = out + (long long)row * D;
                if (row >= count) continue;
#if FORMAT == FP32
                UNROLLED(n, WIDTH / 16) {
                    const int column = n / 2 * 32 + 8 * t + n % 2 * 4, e = 2 * h + n % 2, b = n / 2 * 4;
                    const auto x = [&](int n) { return sums[i][b + n][e] * scale; };
                    if (column < D) *(float4*)(to + column) = float4{x(0), x(1), x(2), x(3)};
                }
#else
                UNROLLED(n, D / 8)
                    *(unsigned*)(to + 8 * n + 2 * t) =
                        pack(sums[i][n][2 * h] * scale, sums[i][n][2 * h + 1] * scale);
#endif
            }
    }
};

// The ring's memory, which that of X and Y follows; columns that are added are 0.
__device__ inline unsigned begin() {
    extern __shared__ __align__(128) unsigned char shared[];
    const unsigned ring = shared_address(shared);
    if (D != WIDTH) {
        constexpr int ADDED = D == WIDTH ? 1 : (WIDTH - D) / COPY;
        for (int n = threadIdx.x; n < STAGES * 2 * TILE * ADDED; n += THREADS) {
            const int row = n / ADDED, stage = row / (2 * TILE);
            store_shared(ring + stage * STAGE + row % (2 * TILE) * STRIDE + (COPIES + n % ADDED) * 16, uint4{});
        }
    }
    return ring;
}

// copy(n, to) and attend(n, tile) for tiles 0 to count - 1; STAGES - 1 of them are on their way.
template <class Copy, class Attend>
__device__ inline void each_tile(int count, unsigned ring, const Copy& copy, const Attend& attend) {
    const auto load = [&](int n) {
        if (n < count) copy(n, ring + n % STAGES * STAGE);
        close_group();
    };
    UNROLLED(n, STAGES - 1) load(n);
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        wait_groups<STAGES - 2>();
        __syncthreads();  // the tile is here, and no warp reads the one before
        load(n + STAGES - 1);
        attend(n, ring + n % STAGES * STAGE);
    }
}

// The tiles of the queries that see some of the block's keys, for a Pass or a Half.
template <class Worker>
__device__ inline void over_queries(Worker& worker, const Call& call, const Gradients& to,
                                    const KeyBlock& block, unsigned ring) {
    const QueryRange queries = queries_of(call, block.head, block.first_key, block.first_key + BC - 1);
    const int first = queries.first / TILE * TILE;
    const int tiles = max((queries.end - first + TILE - 1) / TILE, 0);  // of each head
    const auto head_of = [&](int n) { return block.head + n / tiles; };
    const auto first_of = [&](int n) { return first + n % tiles * TILE; };
    each_tile(
        tiles * block.group, ring,
        [&](int n, unsigned at) {
            const unsigned head = head_of(n);
            Pass<true>::copy(at, {block_at(call, head, 0).q, call.q_strides.row, call.Nq},
                             {dout_of(call, to, head), to.dout_strides.row, call.Nq},
                             to.rows + head * padded_rows(call), first_of(n));
        },
        [&](int n, unsigned tile) { worker.attend(tile, head_of(n), first_of(n), call.Nq); });
}

#if K_PAIRED
// Two warps share 16 M keys, for sums that one has no registers for. The one with K computes P and dV; the
// other, VALUES, dP and dK. P, with the derivative of changed scores, goes from one to the other through shared
// memory, a lane's registers as they lie.
template <bool VALUES> struct Half {
    using Of = Pass<true>;
    static constexpr int M = Of::M, CHUNK = Of::CHUNK;

    const Call& call;
    int first_row, pair;
    unsigned box;  // where the lane writes or reads P
    Rows<M, Of::HELD> X;
    Of::Sums sums = {};

    // The second number of a pair is there, or may be written over.
    __device__ inline int full() const { return 1 + 2 * pair; }
    __device__ inline int empty() const { return 2 + 2 * pair; }

    __device__ inline void attend(unsigned tile, long long head, int first, int total) {
        const int j = first_row, last = min(j + Of::ROWS, call.Nk) - 1;
        const unsigned z = tile + VALUES * W_TILE + lane_of_rows(), rows = tile + 2 * W_TILE;
        const unsigned z_transposed = tile + !VALUES * W_TILE + lane_of_columns();
#pragma unroll 1
        for (int c = 0; c < TILE; c += CHUNK) {
            if (first + c >= total) break;
            const Range keys = range_of(call, head, first + c, first + c + CHUNK - 1);
            if (j >= keys.end || last < keys.first) continue;
            typename Of::Scores S = {};
            scores(S, X, z + c * STRIDE);
            typename Of::Weights P, given;
            if constexpr (VALUES) {
                meet_pair(full());
                UNROLLED(i, M)
                    UNROLLED(n, CHUNK / SLICE) load_shared(given[i][n], box + (i * (CHUNK / SLICE) + n) * 512);
                arrive_at_pair(empty());
                Of::weigh<false, false, true>(call, first_row, given, P, S, S, head, first + c, rows + c * 8);
            } else {
                if (CHANGES || j < keys.all_first || last >= keys.all_end)
                    Of::weigh<true, true>(call, first_row, P, given, S, S, head, first + c, rows + c * 8);
                else
                    Of::weigh<false, true>(call, first_row, P, given, S, S, head, first + c, rows + c * 8);
                meet_pair(empty());
                UNROLLED(i, M)
                    UNROLLED(n, CHUNK / SLICE) store_shared(box + (i * (CHUNK / SLICE) + n) * 512, given[i][n]);
                arrive_at_pair(full());
            }
            add_product(sums, P, z_transposed + c * STRIDE);
        }
    }

    __device__ inline void run(const Gradients& to, const KeyBlock& block, unsigned ring,
                               const Matrix& matrix) {
        constexpr int BYTES = M * SLICES * 512, BOX = M * (CHUNK / SLICE) * 512;
        const unsigned lane = threadIdx.x % 32 * 16, held = ring + STAGES * STAGE;
        X.at = held + threadIdx.x / 32 * BYTES + lane;
        box = held + (Of::HELD ? 0 : WARPS * BYTES) + pair * BOX + lane;
        X.load(matrix, first_row);
        if (VALUES) arrive_at_pair(empty());
        over_queries(*this, call, to, block, ring);
        if (!VALUES) meet_pair(empty());
        Element* const out = (VALUES ? to.dk : to.dv) + block.of_keys * call.Nk * D;
        Of::store(out, sums, VALUES ? call.scale * LN2 : 1.0f, first_row, call.Nk);
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, K_BLOCKS)
    attention_backward_keys(const Call call, const Gradients to) {
    const KeyBlock block = key_block_of(call, BC, index_across_heads(call, BC));
    const Block of_keys = block_at(call, block.head, 0);
    const Matrix k{of_keys.k, call.k_strides.row, call.Nk}, v{of_keys.v, call.v_strides.row, call.Nk};
    const int warp = threadIdx.x / 32, j0 = block.first_key;
    const unsigned ring = begin();
#if K_PAIRED
    const int pair = warp % (WARPS / 2), row = j0 + pair * Pass<true>::ROWS;
    if (warp < WARPS / 2)
        Half<false>{call, row, pair}.run(to, block, ring, k);
    else
        Half<true>{call, row, pair}.run(to, block, ring, v);
#else
    Pass<true> pass{call, j0 + warp * Pass<true>::ROWS};
    pass.load(ring, k, v);
    over_queries(pass, call, to, block, ring);
    const long long rows = block.of_keys * call.Nk;
    pass.store(to.dk + rows * D, pass.dX, call.scale * LN2, pass.first_row, call.Nk);
    pass.store(to.dv + rows * D, pass.dY, 1.0f, pass.first_row, call.Nk);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, Q_BLOCKS)
    attention_backward_queries(const Call call, const Gradients to) {
    const Block block = block_across_heads(call, BR);
    const Matrix k{block.k, call.k_strides.row, call.Nk}, v{block.v, call.v_strides.row, call.Nk};
    const int i0 = block.first_query, warp = threadIdx.x / 32;
    const long long first_row = i0 + warp * Pass<false>::ROWS, head = block.head * padded_rows(call);
    Pass<false> pass{call, (int)first_row, to.rows + head + first_row + threadIdx.x % 32 / 4, to.dbias};
    const unsigned ring = begin();
    pass.load(ring, {block.q, call.q_strides.row, call.Nq},
              {dout_of(call, to, block.head), to.dout_strides.row, call.Nq});
    const Range keys = range_of(call, block.head, i0, min(i0 + BR, call.Nq) - 1);
    each_tile((keys.end - keys.first + TILE - 1) / TILE, ring,
              [&](int n, unsigned at) { pass.copy(at, k, v, nullptr, keys.first + n * TILE); },
              [&](int n, unsigned tile) { pass.attend(tile, block.head, keys.first + n * TILE, keys.end); });
    pass.store(to.dq + block.head * call.Nq * D, pass.dX, call.scale * LN2, pass.first_row, call.Nq);
}
