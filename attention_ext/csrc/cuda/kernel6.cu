// Kernel 6: Hopper. TMA copies; one tile's softmax overlaps another's products (FlashAttention-3).
// Source: Shah et al. 2024, arXiv:2407.08608. Architecture: sm_90a alone.
//
// Shapes: bf16 and fp16; d is a multiple of 8 up to 256; rows, heads and batches start at multiples of 16
//     bytes. Tiles of Br queries and Bc keys, 32, 64, 128, 192 or 256 columns wide, padded with zeros.
// Loop nest: a block goes over tiles of queries, and for each over tiles of keys:
//         S <- Qi Kj^T, P <- 2^(c S - c m), O <- O + P Vj
// Launch: min(query tiles, multiprocessors) blocks: 128 threads copy, a warpgroup multiplies 64 rows.
// Shared memory: 2 Br width (Q) + stages * 4 Bc width (K, V) + 24 a warpgroup that multiplies and 32 a stage
//     (mbarriers, numbers of tiles) + 1,024 (to align).
// Registers: Bc / 2 (S) + Bc / 4 (P) + width / 2 (O) and about 30 more for a thread that multiplies.
// Improves on kernel 5:
//   - One thread copies, by TMA; mbarriers tell when a tile is full or free.
//   - wgmma reads Q, K and V from shared memory and runs while its warps go on. S = Qi Kj^T and O += P V(j-1)
//     begin together, and the softmax needs only S.
//   - A block that is done takes the next tile of queries, by a counter, and its keys arrive before the last
//     tile ends. Each tile is computed alone, so two runs give the same bits.
//   - The warpgroups take turns to begin products, so that one has its softmax while another multiplies.
//   - m follows the largest score only when that is 2^8 times above it. Few tiles shuffle or rescale O.
// Bound: the exponentials at d = 32 and 64, so at d = 32 the gain is small; the tensor cores from d = 128 on.
// Command: python gpt.py bench kernel5,kernel6,sdpa-flash,sdpa-cudnn --device cuda --dtype bf16 -d 32,64,128
//          --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H100, bf16, (100, 1, 4096, d), no mask, TFLOP/s at d = 32, 64 and 128: 310, 559, 759;
//     1.05, 1.57 and 2.35 times kernel 5, and 1.28, 1.17 and 1.14 times cuDNN.
#include "rules.h"
// Macros of its own, by cuda/tiles.py:
//   WIDTH   columns of a tile
//   BOX     columns of a box: a tile is boxes side by side, each as wide as a swizzled row
//   STAGES  tiles of K, and of V, in shared memory
//   SHARED  bytes of shared memory
constexpr int box_row = 2 * BOX;  // bytes
#include "hopper.h"

constexpr int d = HEAD_DIM, width = WIDTH, boxes = WIDTH / BOX;
constexpr int Br = BR, Bc = BC, stages = STAGES;
constexpr int CONSUMERS = THREADS / 128 - 1;  // warpgroups that multiply
static_assert(d % 8 == 0 && d <= 256, "d");
static_assert(Bc % 16 == 0 && CONSUMERS > 1, "tiles");

// Shared memory in bytes, from a multiple of 1,024: the 128-byte swizzle repeats every 8 rows of 128 bytes.
// Each warpgroup has its 64 rows of Q to itself, and their query tile's number.
constexpr int q_bytes = 64 * width * 2, tile_bytes = Bc * width * 2;
constexpr int k_at = CONSUMERS * q_bytes, v_at = k_at + stages * tile_bytes;
constexpr int q_full = v_at + stages * tile_bytes, q_empty = q_full + 8 * CONSUMERS;
constexpr int k_full = q_empty + 8 * CONSUMERS, k_empty = k_full + 8 * stages;
constexpr int v_full = k_empty + 8 * stages, v_empty = v_full + 8 * stages;
constexpr int numbers_at = v_empty + 8 * stages;
static_assert(numbers_at + 8 * CONSUMERS + 1024 == SHARED, "shared memory");

// Registers of a thread that copies and of one that multiplies: multiples of 8, at most 65,536 in a block.
constexpr bool most = width == 64 || RULES & DOCUMENTS;  // for three warpgroups
constexpr int producer_registers = CONSUMERS < 3 ? 40 : most ? 32 : 56;
constexpr int consumer_registers = CONSUMERS < 3 ? 232 : most ? 160 : 152;

// The stages of K or V: their mbarriers, the next stage, and the parity of its mbarriers' phase.
struct Ring {
    unsigned full, empty, stage = 0, phase = 0;
    __device__ inline void wait() const { barrier_wait(full + 8 * stage, phase); }
    __device__ inline void next() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
    // The warp has read the stage.
    __device__ inline void release() {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
        next();
    }
};

struct Tile {
    int i0, batch, head;

    // The keys of `count` of its queries from i on.
    __device__ inline Range keys(const Call& call, int i, int count) const {
        return range_of(call, (long long)batch * call.heads + head, i, min(i + count, call.Nq) - 1);
    }
};

// The index-th query tile. Head by head, blocks share K and V in the L2 cache, and read memory at all times
// alike. Under a causal mask the longest come first, and the last heads are taken together, so that blocks end
// together: two tiles for each block at least, and heads for an eighth of the blocks, which go at one pace.
__device__ inline Tile query_tile(const Call& call, unsigned index) {
    const unsigned Tr = (call.Nq + Br - 1) / Br, all = call.batches * call.heads;
    const unsigned last = min(all, max(2 * gridDim.x / (Tr + 1) + 1, gridDim.x / 8));
    const unsigned before = (all - last) * Tr;
    unsigned head = index / Tr, row = index - head * Tr;
    if (call.causal && index >= before) {
        row = (index - before) / last;
        head = all - last + (index - before - row * last);
    }
    Tile tile;
    tile.i0 = (call.causal ? Tr - 1 - row : row) * Br;
    tile.batch = head / call.heads;
    tile.head = head - tile.batch * call.heads;
    return tile;
}

__device__ inline int key_tiles(int keys) { return max(1, (keys + Bc - 1) / Bc); }

// Announces and starts the copies of `rows` rows. A dimension of stride 0 has one entry in the map.
template <int rows>
__device__ inline void copy_rows(unsigned to, const TensorMap& map, const Strides& strides, int batch, int head,
                                 int first, unsigned full) {
    hold(head), hold(batch);  // what follows is not kept from one copy to the next: registers are few
    head = strides.head ? head : 0;
    batch = strides.batch ? batch : 0;
    barrier_expect(full, rows * width * 2);
    for (int b = 0; b < boxes; b++)
        copy_box(to + b * (rows * box_row), &map, b * BOX, first, head, batch, full);
}

// The thread that copies, for each query tile: K as soon as a stage is free, then Q, then V and the next keys.
// It gives the tile's number with Q; the number `tiles` ends the block. The next tile is that of the counter,
// so that a block that is done early takes more, or without a counter the gridDim.x-th from here.
__device__ void produce(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                        const Call& call, unsigned* counter, unsigned shared, unsigned tiles) {
    Ring ring{shared + k_full, shared + k_empty};  // V's turns with it
    unsigned q_phase = 0, next;
    // For each warpgroup, once its rows of Q are free: the number, and what `copy` does.
    const auto give = [&](unsigned index, auto copy) {
#pragma unroll 1
        for (int group = 0; group < CONSUMERS; group++) {
            barrier_wait(shared + q_empty + 8 * group, q_phase ^ 1);
            store_shared(shared + numbers_at + 4 * group, index);
            copy(group, shared + q_full + 8 * group);
        }
        q_phase ^= 1;
    };
    for (unsigned index = blockIdx.x; index < tiles; index = next) {
        next = gridDim.x + (counter ? atomicAdd(counter, 1u) : index);
        const Tile tile = query_tile(call, index);
        const Range keys = tile.keys(call, tile.i0, Br);
        const int head = tile.head / heads_of_keys(call);
        int j0 = keys.first, end = keys.end;
        hold(j0), hold(end);
        bool first = true;
#pragma unroll 1
        do {
            const unsigned to = shared + ring.stage * tile_bytes, at = shared + 8 * ring.stage;
            barrier_wait(at + k_empty, ring.phase ^ 1);
            copy_rows<Bc>(to + k_at, k_map, call.k_strides, tile.batch, head, j0, at + k_full);
            if (first)
                give(index, [&](int group, unsigned full) {
                    copy_rows<64>(shared + group * q_bytes, q_map, call.q_strides, tile.batch, tile.head,
                                  tile.i0 + 64 * group, full);
                });
            barrier_wait(at + v_empty, ring.phase ^ 1);
            copy_rows<Bc>(to + v_at, v_map, call.v_strides, tile.batch, head, j0, at + v_full);
            ring.next();
            first = false;
            j0 += Bc;
        } while (j0 < end);
    }
    give(tiles, [](int, unsigned full) { barrier_arrive(full); });
}

// S <- Qi Kj^T, 64 rows of Q
__device__ inline void scores(float (&S)[Bc / 2], unsigned q, unsigned k) {
    products_begin();
    UNROLLED(c, width / 16) {
        const int b = c / (BOX / 16), in_box = c % (BOX / 16) * 32;
        multiply(S, q + ((b * (64 * box_row) + in_box) >> 4), k + ((b * (Bc * box_row) + in_box) >> 4), c > 0);
    }
}

// O <- P Vj + O
__device__ inline void weighted_sum(float (&O)[width / 2], const unsigned (&P)[Bc / 4], unsigned v) {
    products_begin();
    UNROLLED(c, Bc / 16) multiply_from(O, P + 4 * c, v + (c * 16 * box_row >> 4));
}

struct Softmax {
    const float c;                         // scores times c are powers of two
    float m[2] = {-INF, -INF}, l[2] = {};  // of the rows r and r + 8; l of this thread's columns alone
    float factor[2];
    bool moved;

    // m; l <- factor l + rowsum(P); S <- P = 2^(c S - c m). moved: O, too, must be multiplied by factor.
    __device__ inline void operator()(float (&S)[Bc / 2]) {
        float top[4] = {S[0], S[1], S[2], S[3]};
#pragma unroll
        for (int i = 4; i < Bc / 2; i++) top[i % 4] = fmaxf(top[i % 4], S[i]);
        top[0] = fmaxf(top[0], top[1]);
        top[1] = fmaxf(top[2], top[3]);
        // m stays until a power exceeds 2^8, which float16 (up to 2^16) holds; O is seldom rescaled.
        moved = __any_sync(~0u, !((top[0] - m[0]) * c <= 8.0f) | !((top[1] - m[1]) * c <= 8.0f));
        if (moved) {
            UNROLLED(h, 2) {
                const float m_new = largest<1, 4>(fmaxf(m[h], top[h]));
                factor[h] = exp2_approx((m[h] - subtrahend(m_new)) * c);
                m[h] = m_new;
                l[h] *= factor[h];
            }
        }
        const float less[2] = {subtrahend(m[0]) * c, subtrahend(m[1]) * c};
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLLED(i, Bc / 2) {
            S[i] = exp2_approx(fmaf(S[i], c, -less[i / 2 % 2]));
            sum[i % 4] += S[i];
        }
        l[0] += sum[0] + sum[1];
        l[1] += sum[2] + sum[3];
    }
};

__device__ inline void to_weights(unsigned (&P)[Bc / 4], const float (&S)[Bc / 2]) {
    UNROLLED(i, Bc / 4) P[i] = pack(S[2 * i], S[2 * i + 1]);
}

// O / l and the logsumexp of 64 rows.
__device__ inline void write(const Call& call, const Tile& tile, int i0, float (&O)[width / 2],
                             Softmax& softmax) {
    const int lane = threadIdx.x % 32, row = i0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const long long row0 = ((long long)tile.batch * call.heads + tile.head) * call.Nq;
    Element* const out = call.out + tile.batch * call.out_strides.batch + tile.head * call.out_strides.head;
    UNROLLED(h, 2) {
        const int i = row + 8 * h;
#if RULES
        float l = sum<1, 4>(softmax.l[h]);
        const float inverse = inverse_with_sink(call, row0 / call.Nq, softmax.m[h], l, softmax.c);
#else
        const float l = sum<1, 4>(softmax.l[h]), inverse = reciprocal_approx(l);
#endif
        store_row<d>(out + i * call.out_strides.row, O, h, inverse, i < call.Nq);
        if (call.lse && i < call.Nq && lane % 4 == 0)
            call.lse[row0 + i] = (softmax.m[h] * softmax.c + log2_approx(l)) * LN2;
    }
}

// Changes and masks S of the keys from j0 on for rows from i0 on, which see `keys`; handles scales <= 0.
__device__ inline void mask(float (&S)[Bc / 2], const Call& call, const Tile& tile, int i0, const Range& keys,
                            int j0) {
    const int lane = threadIdx.x % 32, row = i0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    if (CHANGES || !(call.scale > 0.0f)) {
        UNROLLED(i, Bc / 2) S[i] *= call.scale;
    }
    const bool all_seen = (!RULES || j0 >= keys.all_first) && j0 + Bc <= keys.all_end;
    if (!CHANGES && all_seen) return;
#if RULES
    int head = tile.batch * call.heads + tile.head;
    if (RULES & DOCUMENTS) hold(head);  // what follows is not computed beside the products: registers are few
    UNROLLED(h, 2) {
        const Row of_row(call, head, row + 8 * h, j0 + lane % 4 * 2);
        apply<Bc / 4>(of_row, [&](int i) -> float& { return S[i / 2 * 4 + 2 * h + i % 2]; }, all_seen);
    }
#else
    const int seen[2] = {keys_seen(call, row), keys_seen(call, row + 8)};
    UNROLLED(i, Bc / 2) {
        const int column = j0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (column >= seen[i / 2 % 2]) S[i] = -INF;
    }
#endif
}

// A warpgroup that multiplies: rows 64 group to 64 group + 63 of each query tile.
__device__ void consume(const Call& call, unsigned shared, unsigned tiles, int group) {
    const unsigned k = tile_at(shared + k_at, 0);
    const unsigned v = tile_at(shared + v_at, Bc * box_row);
    const unsigned q = tile_at(shared + group * q_bytes, 0);
    Ring k_ring{shared + k_full, shared + k_empty}, v_ring{shared + v_full, shared + v_empty};
    Turns<CONSUMERS> turns{group};
    const auto q_release = [&] {
        if (threadIdx.x % 32 == 0) barrier_arrive(shared + q_empty + 8 * group);
    };
    for (unsigned q_phase = 0;; q_phase ^= 1) {
        barrier_wait(shared + q_full + 8 * group, q_phase);
        // One lane reads it, which also gives the place back: the others may be behind.
        unsigned index = threadIdx.x % 32 ? 0 : get(shared + numbers_at + 4 * group);
        index = __shfl_sync(~0u, index, 0);
        if (index >= tiles) break;
        const Tile tile = query_tile(call, index);
        const int i0 = tile.i0 + 64 * group;
        const Range all = tile.keys(call, tile.i0, Br), keys = tile.keys(call, i0, 64);
        const int Tc = key_tiles(all.end - all.first);
        int from = 0, own = i0 < call.Nq ? key_tiles(keys.end - all.first) : 0;  // its tiles: from .. own - 1
        if (RULES && own > 0) own = min(own, Tc), from = min((keys.first - all.first) / Bc, own - 1);
        // A tile that only other warpgroups see: this one just frees it and passes its turn.
        const auto pass = [&](int j) {
            k_ring.wait();
            k_ring.release();
            if (j > 0) {
                turns.begin();
                turns.end();
            }
            v_ring.wait();
            v_ring.release();
        };

        float S[Bc / 2], O[width / 2] = {};
        unsigned P[Bc / 4];
        Softmax softmax{!CHANGES && call.scale > 0.0f ? call.scale : 1.0f};
        if (own > 0) {
            if (RULES) {
#pragma unroll 1
                for (int j = 0; j < from; j++) pass(j);
            }
            k_ring.wait();
            if (RULES && from > 0) turns.begin();
            hold(S);
            scores(S, q, k + (k_ring.stage * tile_bytes >> 4));
            products_commit();
            if (RULES && from > 0) turns.end();
            products_wait<0>();
            hold(S);
            k_ring.release();
            if (from + 1 == own) q_release();
            mask(S, call, tile, i0, keys, all.first + from * Bc);
            softmax(S);
            to_weights(P, S);
#pragma unroll 1
            for (int j = from + 1; j < own; j++) {  // P is that of tile j - 1
                k_ring.wait();
                turns.begin();
                hold(S);
                hold(O);
                hold(P);
                scores(S, q, k + (k_ring.stage * tile_bytes >> 4));
                products_commit();
                v_ring.wait();
                weighted_sum(O, P, v + (v_ring.stage * tile_bytes >> 4));
                products_commit();
                turns.end();
                products_wait<1>();
                hold(S);
                k_ring.release();
                if (j + 1 == own) q_release();  // the next tile's Q arrives during the rest of this one
                mask(S, call, tile, i0, keys, all.first + j * Bc);
                softmax(S);
                products_wait<0>();
                hold(O);
                hold(P);
                v_ring.release();
                to_weights(P, S);
                if (softmax.moved) {
                    UNROLLED(i, width / 2) O[i] *= softmax.factor[i / 2 % 2];
                }
            }
            v_ring.wait();
            hold(O);
            hold(P);
            weighted_sum(O, P, v + (v_ring.stage * tile_bytes >> 4));
            products_commit();
            products_wait<0>();
            hold(O);
            v_ring.release();
            write(call, tile, i0, O, softmax);
        } else {
            q_release();
        }
#pragma unroll 1
        for (int j = own; j < Tc; j++) pass(j);
    }
    turns.finish();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_kernel6(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map, const __grid_constant__ Call call,
                      unsigned* counter) {
    extern __shared__ unsigned char raw[];
    const unsigned shared = (shared_address(raw) + 1023) & ~1023u;
    const unsigned tiles = (unsigned)((call.Nq + Br - 1) / Br) * (unsigned)(call.batches * call.heads);
    if (threadIdx.x == 0) {
        prefetch_map(&q_map);
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        const auto init = [&](int full, int empty, int count, int readers) {
            for (int i = 0; i < count; i++) {
                barrier_init(shared + full + 8 * i, 1);
                barrier_init(shared + empty + 8 * i, 4 * readers);  // an arrival of each warp of a reader
            }
        };
        init(q_full, q_empty, CONSUMERS, 1);
        init(k_full, k_empty, stages, CONSUMERS);
        init(v_full, v_empty, stages, CONSUMERS);
        barrier_init_done();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_give<producer_registers>();
        if (threadIdx.x == 0) produce(q_map, k_map, v_map, call, counter, shared, tiles);
    } else {
        registers_take<consumer_registers>();
        consume(call, shared, tiles, warpgroup - 1);
    }
}
