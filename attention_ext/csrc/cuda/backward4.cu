// The backward pass in bfloat16 and float16 on Hopper: wgmma, TMA copies, warps of two roles, as in kernel 6.
// Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608. Architecture: sm_90a alone.
//
// Shapes: bf16 and fp16; d is a multiple of 8 up to 128; rows, heads and batches start at multiples of 16
//     bytes.
// Loop nest: that of backward.h. Both passes are one loop. A warpgroup owns 64 rows, of K and V or of Q and dO,
//     as left factors X and Y; tiles of the others, Z and W, go through shared memory:
//         S <- X Z^T,  dP <- Y W^T            from shared memory; S^T and dP^T, if the warpgroup has keys
//         P <- 2^(scale S - lse),  dS <- P * (dP - D)     registers; left factors of products as they lie
//         dX <- dX + dS Z  and, if the warpgroup has keys,  dY <- dY + P W
// Launch: after the rows', min(tiles, multiprocessors) blocks for the tiles of keys, then for those of queries:
//     128 threads copy, a warpgroup multiplies 64 rows.
// Shared memory: 4 BR width (X, Y) + stages * TILE * (4 width (Z, W) + 8 (numbers of queries)) + 16 a stage and
//     20 (mbarriers, the tile's number) + 1,024 (to align).
// Registers: width / 2 (each sum) + TILE (S, dP) + TILE / 4 (each of P, dS) and about 30 more for a thread that
//     multiplies.
// Improves on backward3:
//   - One thread copies, by TMA; mbarriers tell when a tile is full or free. A block that is done takes
//     another tile, by a counter.
//   - wgmma runs while its warps go on: dP beside P, dY beside dS, and dX beside the next P if registers allow.
//   - Warpgroups that own queries take turns, so that one has its exponentials while another multiplies.
// Bound: the tensor cores.
// Command: python gpt.py bench --backward --device cuda --dtype bf16 --tokens 16384 --columns 2048 -N 4096
//          -d 64,128 --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H100, TFLOP/s with five products counted, without a mask / causal: 425 / 382 at d = 64,
//     500 / 443 at d = 128; 1.58 / 1.65 and 1.76 / 1.74 times FlashAttention-2, 0.91 to 1.00 of cuDNN.
#include "backward.h"
// Macros of its own, by cuda/tiles.py:
//   WIDTH               columns of a tile
//   BOX                 columns of a box: a tile is boxes side by side, each as wide as a swizzled row
//   K_TILE, Q_TILE      rows of Z and W in a tile, in the pass over keys and in that over queries
//   K_STAGES, Q_STAGES  such tiles in shared memory
constexpr int box_row = 2 * BOX;  // bytes
#include "hopper.h"

constexpr int d = HEAD_DIM, width = WIDTH, boxes = WIDTH / BOX;
constexpr int GROUPS = 2;                  // warpgroups that multiply
constexpr int BOX_ROWS = 64;               // of a copy
constexpr int own_bytes = 64 * width * 2;  // of a warpgroup's rows of X or Y
static_assert(BR == 64 * GROUPS && BC == BR && THREADS == 128 * (GROUPS + 1) && d % 8 == 0, "tile");
static_assert(K_TILE % BOX_ROWS == 0 && Q_TILE % BOX_ROWS == 0 && PADDING_OF_ROWS % K_TILE == 0, "tile");
static_assert(!CHANGES, "changed scores are backward3's");

template <bool OF_KEYS> struct Places {
    static constexpr int TILE = OF_KEYS ? K_TILE : Q_TILE, STAGES = OF_KEYS ? K_STAGES : Q_STAGES;
    // QUEUED: registers hold dS while the next P is computed. ROUNDED: they hold P for dS as 16 bits alone.
    static constexpr bool QUEUED = !OF_KEYS && width < 128, ROUNDED = OF_KEYS && width == 64;
    // Registers of a thread that copies and of one that multiplies: multiples of 8, at most 65,536 in a block
    static constexpr int copying = OF_KEYS && width == 128 ? 24 : 40, multiplying = 252 - copying / 2;
    // Where things are in shared memory, in bytes from a multiple of 1,024 on
    static constexpr int tile_bytes = TILE * width * 2, rows_bytes = OF_KEYS ? TILE * 8 : 0;
    static constexpr int y = GROUPS * own_bytes, z = 2 * y, w = z + STAGES * tile_bytes;
    static constexpr int rows = w + STAGES * tile_bytes;
    static constexpr int full = rows + STAGES * rows_bytes, empty = full + 8 * STAGES;
    static constexpr int own_full = empty + 8 * STAGES, own_empty = own_full + 8, number = own_empty + 8;
};

// The rows of X and Y that a block has at a time, and their tiles of Z and W: `tiles` of each of `heads` heads,
// from row `first` on.
struct Work {
    int own_head, own_row;  // the head among those of X, of all batches
    int head, heads, first, tiles;

    __device__ inline int count() const { return tiles * heads; }
};
template <bool OF_KEYS> __device__ inline unsigned works(const Call& call) {
    const unsigned heads = call.batches * call.heads;
    return OF_KEYS ? (call.Nk + BC - 1) / BC * (heads / heads_of_keys(call)) : (call.Nq + BR - 1) / BR * heads;
}
template <bool OF_KEYS> __device__ inline Work work_of(const Call& call, unsigned index) {
    constexpr int TILE = Places<OF_KEYS>::TILE;
    if (OF_KEYS) {
        const KeyBlock block = key_block_of(call, BC, index);
        const QueryRange seen = queries_of(call, block.first_key, min(block.first_key + BC, call.Nk) - 1);
        const int first = seen.first / TILE * TILE;
        return {(int)block.of_keys, block.first_key, (int)block.head,
                (int)block.group,   first,           max((seen.end - first + TILE - 1) / TILE, 0)};
    }
    const unsigned tiles = (call.Nq + BR - 1) / BR;
    const int head = index / tiles, i0 = (call.causal ? tiles - 1 - index % tiles : index % tiles) * BR;
    const Range keys = range_of(call, head, i0, min(i0 + BR, call.Nq) - 1);
    return {head, i0,         head / (int)heads_of_keys(call),
            1,    keys.first, (keys.end - keys.first + TILE - 1) / TILE};
}

// A matrix of (batches, heads, N, d), as TMA and as the launcher know it.
struct Matrix {
    const TensorMap& map;
    const Strides& strides;
    int heads;
};

// Starts the copies of `rows` rows, from `first` on. A dimension of stride 0 has one entry in the map.
template <int rows>
__device__ inline void copy_rows(unsigned to, const Matrix& from, int head, int first, unsigned full) {
    const int batch = from.strides.batch ? head / from.heads : 0;
    head = from.strides.head ? head % from.heads : 0;
    UNROLLED(b, boxes)
        UNROLLED(n, rows / BOX_ROWS)
            copy_box(to + (b * rows + n * BOX_ROWS) * box_row, &from.map, b * BOX, first + n * BOX_ROWS, head,
                     batch, full);
}

// The bulk copy of bytes that lie side by side; `barrier` counts them.
__device__ inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The thread that copies, for each work: its first tile as soon as a stage is free, then X and Y, then the
// other tiles. The number of the work goes with X; that of works() ends the block. The next is the counter's,
// so that a block that is done early takes more.
template <bool OF_KEYS>
__device__ inline void produce(const Call& call, const Gradients& to, unsigned shared, const Matrix& X,
                               const Matrix& Y, const Matrix& Z, const Matrix& W) {
    using At = Places<OF_KEYS>;
    unsigned stage = 0, phase = 1, own_phase = 1;
    int index = blockIdx.x;
    while (index < (int)works<OF_KEYS>(call)) {
        const Work work = work_of<OF_KEYS>(call, index);
        int head = work.head, row = work.first, left = work.count();
        bool first = true;
#pragma unroll 1
        do {
            if (left > 0) {
                const unsigned full = shared + At::full + 8 * stage, at = shared + stage * At::tile_bytes;
                barrier_wait(full - At::full + At::empty, phase);
                barrier_expect(full, 2 * At::tile_bytes + At::rows_bytes);
                copy_rows<At::TILE>(at + At::z, Z, head, row, full);
                if (OF_KEYS)
                    copy_bytes(shared + At::rows + stage * At::rows_bytes,
                               to.rows + head * padded_rows(call) + row, At::rows_bytes, full);
                copy_rows<At::TILE>(at + At::w, W, head, row, full);
                if (++stage == At::STAGES) stage = 0, phase ^= 1;
                row += At::TILE;
                if (heads_of_keys(call) > 1 && row >= work.first + work.tiles * At::TILE)
                    head++, row = work.first;
            }
            if (!first) continue;
            first = false;
            hold(index);  // what it tells is not kept: registers are few
            const Work own = work_of<OF_KEYS>(call, index);
            barrier_wait(shared + At::own_empty, own_phase);
            own_phase ^= 1;
            store_shared(shared + At::number, index);
            barrier_expect(shared + At::own_full, 2 * GROUPS * own_bytes);
#pragma unroll 1
            for (int group = 0; group < GROUPS; group++) {
                const unsigned at = shared + group * own_bytes;
                copy_rows<64>(at, X, own.own_head, own.own_row + 64 * group, shared + At::own_full);
                copy_rows<64>(at + At::y, Y, own.own_head, own.own_row + 64 * group, shared + At::own_full);
            }
        } while (--left > 0);
        index = gridDim.x + atomicAdd(counters_of(call, to) + !OF_KEYS, 1u);
    }
    barrier_wait(shared + At::own_empty, own_phase);
    store_shared(shared + At::number, works<OF_KEYS>(call));
    barrier_arrive(shared + At::own_full);
}

// S <- X Z^T, 64 rows of X
template <int TILE> __device__ inline void scores(float (&S)[TILE / 2], unsigned x, unsigned z) {
    UNROLLED(c, width / 16) {
        const int b = c / (BOX / 16), in_box = c % (BOX / 16) * 32;
        multiply(S, x + ((b * (64 * box_row) + in_box) >> 4), z + ((b * (TILE * box_row) + in_box) >> 4),
                 c > 0);
    }
}

// sums <- A Z + sums
template <int TILE>
__device__ inline void add_product(float (&sums)[width / 2], const unsigned (&A)[TILE / 4], unsigned z) {
    UNROLLED(c, TILE / 16) multiply_from(sums, A + 4 * c, z + (c * 16 * box_row >> 4));
}

// 64 rows of a gradient, of `count` in all.
__device__ inline void write(Element* out, const float (&sums)[width / 2], float scale, int first, int count) {
    const int row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    UNROLLED(h, 2) store_row<d>(out + (row + 8LL * h) * d, sums, h, scale, row + 8 * h < count);
}

// A warpgroup that multiplies, for a work. stage, phase: of the next tile.
template <bool OF_KEYS>
__device__ inline void consume(const Call& call, const Gradients& to, unsigned shared, int group, int index,
                               unsigned& stage, unsigned& phase, Turns<GROUPS>& turns) {
    using At = Places<OF_KEYS>;
    constexpr int TILE = At::TILE;
    const Work work = work_of<OF_KEYS>(call, index);
    const int own = work.own_row + 64 * group;  // the first of its rows
    const int row = own + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const unsigned x = tile_at(shared + group * own_bytes, 0), y = x + (At::y >> 4);
    const unsigned z = tile_at(shared + At::z, 0), z_down = tile_at(shared + At::z, TILE * box_row);
    constexpr unsigned w = (At::w - At::z) >> 4;  // from Z to W
    const int count = work.count();
    float dX[width / 2] = {}, dY[OF_KEYS ? width / 2 : 1] = {};
    float S[TILE / 2], dP[TILE / 2];
    unsigned P[OF_KEYS ? TILE / 4 : 1], dS[TILE / 4] = {};

    float2 of_row[2];  // logsumexp and D of its rows r and r + 8, if they are queries
    if (!OF_KEYS)
        UNROLLED(h, 2) of_row[h] = to.rows[work.own_head * padded_rows(call) + row + 8 * h];
    const Range seen = range_of(call, work.own_head, own, own + 63);  // if they are queries
    const auto release = [&](unsigned barrier) {
        if (threadIdx.x % 32 == 0) barrier_arrive(shared + barrier);
    };
    unsigned before = 0, tile = stage * At::tile_bytes >> 4;  // before: the stage of the tile before
    int head = work.head, first = work.first;
#pragma unroll 1
    for (int left = count; left > 0; left--) {
        barrier_wait(shared + At::full + 8 * stage, phase);
        const unsigned tile_before = tile;
        tile = stage * At::tile_bytes >> 4;
        if (!OF_KEYS) turns.begin();
        hold(S), hold(dP), hold(dS), hold(dX);
        products_begin();
        scores<TILE>(S, x, z + tile);
        products_commit();
        scores<TILE>(dP, y, z + w + tile);
        if (At::QUEUED) add_product<TILE>(dX, dS, z_down + tile_before);  // before the first tile dS is 0
        products_commit();
        if (!OF_KEYS) turns.end();
        products_wait<1>();
        hold(S);

        // Whether some row does not see some column
        const Range keys = OF_KEYS ? range_of(call, head, first, first + TILE - 1) : seen;
        const int j = OF_KEYS ? own : first, last = OF_KEYS ? min(own + 64, call.Nk) : first + TILE;
        const bool masked = j < keys.all_first || last > keys.all_end;
        if (masked) {
            UNROLLED(i, TILE / 2) {
                const int r = row + i / 2 % 2 * 8, c = i / 4 * 8 + column + i % 2;
                const bool sees = OF_KEYS ? pair_of(call, head, first + c, r, 0, 0).seen
                                          : pair_of(call, work.own_head, r, first, c, 0).seen;
                S[i] = sees ? S[i] * call.scale : -INF;
            }
        }
        const float scale = masked ? 1.0f : call.scale;
        const unsigned numbers = shared + At::rows + stage * At::rows_bytes + column * 8;
        UNROLLED(m, TILE / 8) {
            unsigned of[4];
            if (OF_KEYS) load_shared(of, numbers + m * 64);
            UNROLLED(e, 4) {
                const float less = OF_KEYS ? __uint_as_float(of[e % 2 * 2]) : of_row[e / 2].x;
                S[4 * m + e] = exp2_approx(fmaf(S[4 * m + e], scale, -less));
            }
        }
        if constexpr (OF_KEYS) {
            UNROLLED(i, TILE / 4) P[i] = pack(S[2 * i], S[2 * i + 1]);
            hold(P);
            products_begin();
            add_product<TILE>(dY, P, z_down + w + tile);
            products_commit();
        }
        products_wait<OF_KEYS>();
        hold(dP), hold(dS), hold(dX);
        if (At::QUEUED && left < count) release(At::empty + 8 * before);
        UNROLLED(m, TILE / 8) {
            unsigned of[4];
            if (OF_KEYS) load_shared(of, numbers + m * 64);
            UNROLLED(h, 2) {
                float x[2];
                UNROLLED(e, 2) {
                    const float less = OF_KEYS ? __uint_as_float(of[e * 2 + 1]) : of_row[h].y;
                    const int i = 4 * m + 2 * h + e;
                    const float p = At::ROUNDED ? to_float((Element)(P[2 * m + h] >> 16 * e)) : S[i];
                    x[e] = p * (dP[i] - less);
                }
                dS[2 * m + h] = pack(x[0], x[1]);
            }
        }
        before = stage;
        if constexpr (!At::QUEUED) {
            hold(dS);
            products_begin();
            add_product<TILE>(dX, dS, z_down + tile);
            products_commit();
            products_wait<0>();
            hold(dX), hold(dY), hold(P), hold(dS);
            release(At::empty + 8 * stage);
        }
        if (++stage == At::STAGES) stage = 0, phase ^= 1;
        first += TILE;
        if (heads_of_keys(call) > 1 && first >= work.first + work.tiles * TILE) head++, first = work.first;
    }
    release(At::own_empty);
    if (At::QUEUED && count > 0) {
        hold(dS), hold(dX);
        products_begin();
        add_product<TILE>(dX, dS, z_down + tile);
        products_commit();
        products_wait<0>();
        release(At::empty + 8 * before);
    }
    hold(dX), hold(dY);
    hold(index);  // what it tells is not kept during the loop: registers are few
    const Work of = work_of<OF_KEYS>(call, index);
    const int count_of_rows = OF_KEYS ? call.Nk : call.Nq, first_row = of.own_row + 64 * group;
    const long long at = (long long)of.own_head * count_of_rows * d;
    write((OF_KEYS ? to.dk : to.dq) + at, dX, call.scale * LN2, first_row, count_of_rows);
    if constexpr (OF_KEYS) write(to.dv + at, dY, 1.0f, first_row, count_of_rows);
}

template <bool OF_KEYS>
__device__ inline void run(const Call& call, const Gradients& to, const Matrix& X, const Matrix& Y,
                           const Matrix& Z, const Matrix& W) {
    using At = Places<OF_KEYS>;
    extern __shared__ unsigned char raw[];
    const unsigned shared = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < At::STAGES; i++) {
            barrier_init(shared + At::full + 8 * i, 1);
            barrier_init(shared + At::empty + 8 * i, 4 * GROUPS);  // an arrival of each warp
        }
        barrier_init(shared + At::own_full, 1);
        barrier_init(shared + At::own_empty, 4 * GROUPS);
        barrier_init_done();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_give<At::copying>();
        if (threadIdx.x == 0) produce<OF_KEYS>(call, to, shared, X, Y, Z, W);
    } else {
        registers_take<At::multiplying>();
        unsigned stage = 0, phase = 0;
        Turns<GROUPS> turns{warpgroup - 1};
#pragma unroll 1
        for (unsigned own_phase = 0;; own_phase ^= 1) {
            barrier_wait(shared + At::own_full, own_phase);
            // One lane reads it, which also gives the place back: the others may be behind.
            unsigned index = threadIdx.x % 32 ? 0 : get(shared + At::number);
            index = __shfl_sync(~0u, index, 0);
            if (index >= works<OF_KEYS>(call)) break;
            consume<OF_KEYS>(call, to, shared, warpgroup - 1, index, stage, phase, turns);
        }
        if (!OF_KEYS) turns.finish();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_keys(const __grid_constant__ Call call, const __grid_constant__ Gradients to,
                            const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout) {
    const int heads = call.heads, of_keys = heads / heads_of_keys(call);
    run<true>(call, to, {k, call.k_strides, of_keys}, {v, call.v_strides, of_keys}, {q, call.q_strides, heads},
              {dout, to.dout_strides, heads});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_backward_queries(const __grid_constant__ Call call, const __grid_constant__ Gradients to,
                               const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                               const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout) {
    const int heads = call.heads, of_keys = heads / heads_of_keys(call);
    run<false>(call, to, {q, call.q_strides, heads}, {dout, to.dout_strides, heads},
               {k, call.k_strides, of_keys}, {v, call.v_strides, of_keys});
}
