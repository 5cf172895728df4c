// The backward pass in bfloat16 and float16 on Hopper: five products, wgmma, TMA copies, warps of three roles.
// Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608. Architecture: sm_90a alone.
//
// Shapes: bf16 and fp16; d is a multiple of 8; rows, heads and batches start at multiples of 16 bytes. All
//     rules, but no gradient of a bias. What follows is for d up to 128; wider heads have a loop of their own,
//     after it.
// Loop nest: a block goes over tiles of 128 keys, 64 for each of two warpgroups that multiply, and for each
//     over the tiles of Br queries that see some. S and dP are transposed: keys are their rows. A warpgroup
//     begins, for tile j of queries after tile j - 1:
//         1  S <- K Qj^T
//         2  dP <- V dOj^T - D          its sums begin at -D; if not EARLY, this is begun after P
//         3  dK <- dK + dS^T Q(j-1)     with dS of tile j - 1
//                P <- 2^(scale S - lse)        beside 2 and 3
//         4  dQ <- dS K                 of tile j - 1: half of its rows or columns, and all keys
//         5  dV <- dV + P^T dOj         P in registers; all other factors are in shared memory
//                dS <- P * dP                  beside 4 and 5; transposed to shared memory
//                dQ to shared memory           beside 5
//     A thread adds dQ to float32 sums in global memory, by one bulk reduction. Tiles of keys do so from the
//     last to the first, by a counter for each tile of queries: two runs give the same bits. The first stores.
// Launch: after the rows', min(tiles of keys, multiprocessors) blocks: 1 thread copies, 2 add, 256 multiply.
//     Then a warpgroup for each half of a tile of queries, which scales and rounds dQ.
// Order: a block takes the next tile of keys by a counter, a head's last one first, and adds after those that
//     were taken before, of which none waits for a later one: however few blocks run at a time, they end. Under
//     a causal mask a block begins at the queries that no tile before sees. TOGETHER bounds the heads that are
//     in work, for the L2 cache.
// Shared memory: 512 width (K, V) + STAGES Br (2 width (Q) + 8 (lse, -D)) + 4 Br width (two stages of dO)
//     + 512 Br (two of dS) + 4 Br width (dQ) + 16 a stage and 112 (mbarriers, a Work) + 1,024 (to align).
// Registers of a thread that multiplies: width (dK, dV) + Br / 2 (S, then P and W) + Br / 2 (dP, in S's place
//     if not EARLY) + Br width / 256 (dQ, after S) and about 30 more.
// Improves on backward3:
//   - Five products instead of seven: S and dP are computed once.
//   - One thread copies, by TMA; mbarriers tell when a tile is full or free. A block that is done takes
//     another tile, by a counter.
//   - wgmma runs while its warps go on.
// Bound: latency. Counters of an NVIDIA H200 for a version near this, at d = 64 and 128: the tensor cores are
//     busy 56 and 64 % of the time, shared memory 73 and 76 %, L2 65 and 70 %. A scheduler has two warps that
//     multiply, and they wait for exponentials, fences and the first numbers of a row. dK with dS from
//     registers, as far as they go, reads less of shared memory and was not faster.
// Command: python gpt.py bench backward4,backward3,sdpa-cudnn --backward --device cuda --dtype bf16 --tokens
//     16384 --columns 2048 -N 4096,16384 -d 64,128 --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H200, bf16: 486 to 544 TFLOP/s at d = 64, 551 to 632 at d = 128, 2.2 to 3.0 times backward3.
#include "backward.h"
// Macros of its own, by cuda/tiles.py:
//   WIDTH      columns of a tile
//   BOX        columns of a box: a tile is boxes side by side, each as wide as a swizzled row
//   STAGES     tiles of Q in shared memory, of WIDTH up to 128
//   TURN_ROWS  rows that are added in turns: queries, or keys if blocks own queries
constexpr int box_row = 2 * BOX;  // bytes
#include "hopper.h"

constexpr int d = HEAD_DIM, width = WIDTH, boxes = WIDTH / BOX;
constexpr int BOX_ROWS = 64;  // of a copy
constexpr int GROUPS = 2;     // warpgroups that multiply
constexpr int ADDERS = 2;     // warps that add, of every other tile each
static_assert(THREADS == 128 * (GROUPS + 1) && d % 8 == 0, "tile");
static_assert(!(RULES & BIAS_GRADIENT), "a bias has its gradient from backward3");

// P is held for dS as 16 bits alone, times the derivative of the scores: W, if that is not P.
constexpr bool WEIGHTED = (RULES & (SOFTCAP | MODIFIED)) != 0;
// Registers of a thread that copies or adds and of one that multiplies: multiples of 8, 65,536 at most in all
constexpr int copying = 24, multiplying = 240;
constexpr int NO_MORE = -1;               // instead of the head of a work: ends a block
constexpr unsigned OWN_PHASE = 1u << 31;  // in a number of tiles, the phase of works: registers are few

// A matrix of (batches, heads, N, d), as TMA and as the launcher know it.
struct Matrix {
    const TensorMap& map;
    const Strides& strides;
    int heads;
};

// Starts the copies of `rows` rows, from `first` on. A dimension of stride 0 has one entry in the map.
template <int rows>
__device__ inline void copy_rows(unsigned to, const Matrix& from, int head, int first, unsigned full) {
    int heads = from.heads;
    hold(heads);  // what follows is not computed ahead: registers are few
    const int batch = from.strides.batch ? head / heads : 0;
    head = from.strides.head ? head % heads : 0;
    UNROLLED(b, boxes)
        UNROLLED(n, rows / BOX_ROWS)
            copy_box(to + (b * rows + n * BOX_ROWS) * box_row, &from.map, b * BOX, first + n * BOX_ROWS, head,
                     batch, full);
}

// The call, of which nothing is computed ahead: the registers of threads that copy and add are few.
__device__ inline Call anew(Call call) {
    hold(call.Nq), hold(call.Nk), hold(call.batches), hold(call.heads);
    return call;
}

// 64 rows of a gradient, of `count` in all.
__device__ inline void write(Element* out, const float (&sums)[width / 2], float scale, int first, int count) {
    const int row = first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    UNROLLED(h, 2) store_row<d>(out + (row + 8LL * h) * d, sums, h, scale, row + 8 * h < count);
}

// Float32 sums as a thread has them, if some were added.
template <int n> __device__ inline void load_sums(float (&sums)[n], const float* tile, bool added) {
    UNROLLED(i, n / 4) {
        const float4 x = added ? ((const float4*)tile)[i * 128 + threadIdx.x % 128] : float4{};
        sums[4 * i] = x.x, sums[4 * i + 1] = x.y, sums[4 * i + 2] = x.z, sums[4 * i + 3] = x.w;
    }
}

#if WIDTH <= 128
#define ATTENTION_BACKWARD attention_backward_keys
constexpr int TILE = BR;                   // queries
constexpr int own_bytes = 64 * width * 2;  // of a warpgroup's rows of K or V
constexpr int half = TILE * width / 256;   // numbers of dQ that a thread has: 64 rows, `columns` columns
constexpr int columns = half * 2;
constexpr bool BY_ROWS = TILE == 64 * GROUPS;  // how a tile of dQ is halved
constexpr int AHEAD = TILE / 16;  // pairs of lse that a thread loads before S is there: half of a tile's

constexpr unsigned TOGETHER = (32 << 20) / (8 * width);  // queries whose Q, dO and dQ take 32 MiB
static_assert(BC == 64 * GROUPS, "tile");
static_assert(TILE % BOX_ROWS == 0 && PADDING_OF_ROWS % TILE == 0 && TURN_ROWS == TILE, "tile");
static_assert(BY_ROWS || columns == BOX, "halves of dQ are rows, or boxes of columns");

// Where things are in shared memory, in bytes from a multiple of 1,024 on
namespace at {
constexpr int tile_bytes = TILE * width * 2, rows_bytes = TILE * 8, ds_bytes = TILE * BC * 2;
constexpr int dq_bytes = TILE * width * 4;
constexpr int k = 0, v = k + GROUPS * own_bytes, q = v + GROUPS * own_bytes, dout = q + STAGES * tile_bytes;
constexpr int ds = dout + 2 * tile_bytes, dq = ds + 2 * ds_bytes, rows = dq + dq_bytes;
constexpr int q_full = rows + STAGES * rows_bytes, q_empty = q_full + 8 * STAGES;
constexpr int dout_full = q_empty + 8 * STAGES, dout_empty = dout_full + 16;
constexpr int ds_full = dout_empty + 16, dq_full = ds_full + 16, dq_empty = dq_full + 8 * ADDERS;
constexpr int own_full = dq_empty + 8, own_empty = own_full + 8, work = own_empty + 16;
}  // namespace at

// A tile of keys of a head of k and v, of all batches, and its tiles of queries of each head that reads it:
// `tiles` from row `first` on. The thread that copies computes it; the others get it with the keys.
struct Work {
    int of_keys, first_key, first, tiles;
};

__device__ inline unsigned works(const Call& call) {
    return (call.Nk + BC - 1) / BC * (call.batches * call.heads / heads_of_keys(call));
}
__device__ inline Work work_of(const Call& call, unsigned index) {
    const unsigned group = heads_of_keys(call), all = call.batches * call.heads / group;
    const unsigned tiles = (call.Nk + BC - 1) / BC;
    const unsigned most = max(TOGETHER / group / (unsigned)padded_rows(call), 1u);
    const unsigned head = index / (most * tiles) * most, heads = min(most, all - head);
    const unsigned within = index - head * tiles;
    const int j = (tiles - 1 - within / heads) * BC;
    const QueryRange seen = queries_of(call, (head + within % heads) * group, j, j + BC - 1);
    const int first = seen.first / TILE * TILE;
    return {(int)(head + within % heads), j, first, max((seen.end - first + TILE - 1) / TILE, 0)};
}
__device__ inline Work shared_work(unsigned from) {
    unsigned words[4];
    reload_shared(words, from);
    return {(int)words[0], (int)words[1], (int)words[2], (int)words[3]};
}

// The last tile of keys that some of the queries from i on see: the first to add to their dQ.
__device__ inline int first_adder(const Call& call, int head, int i) {
    const int last = i + TILE - 1;
    int end = keys_seen(call, last);
#if RULES & DOCUMENTS
    end = min(end, document_of(call, head, last + call.Nk - call.Nq).end);
#endif
    return (end - 1) / BC;
}

// A work's tiles of queries one after the other, head by head.
struct Queries {
    int head, row, left;
    __device__ inline Queries(const Call& call, const Work& work)
        : head(work.of_keys * heads_of_keys(call)), row(work.first), left(work.tiles * heads_of_keys(call)) {}
    __device__ inline void next(const Call& call, const Work& work) {
        left--;
        row += TILE;
        if (heads_of_keys(call) > 1 && row >= work.first + work.tiles * TILE) head++, row = work.first;
    }
};

// The thread that copies, for each work: its first Q as soon as a stage is free, then K and V, then dO and the
// other tiles. The work goes with K; NO_MORE ends the block.
__device__ inline void produce(const Call& call, const Gradients& to, unsigned shared, const Matrix& Q,
                               const Matrix& K, const Matrix& V, const Matrix& dO) {
    unsigned stage = 0, phase = 1;
#pragma unroll 1
    for (unsigned n = OWN_PHASE;; n ^= OWN_PHASE) {
        const Call now = anew(call);
        const unsigned index = atomicAdd(counters_of(now, to), 1u);
        const Work work = index < works(now) ? work_of(now, index) : Work{NO_MORE, 0, 0, 0};
        Queries of(call, work);
        bool first = true;
#pragma unroll 1
        do {
            const int head = of.head, row = of.row;
            if (of.left > 0) {
                const unsigned full = shared + at::q_full + 8 * stage;
                barrier_wait(full - at::q_full + at::q_empty, phase);
                barrier_expect(full, at::tile_bytes + at::rows_bytes);
                copy_rows<TILE>(shared + at::q + stage * at::tile_bytes, Q, head, row, full);
                const Call now = anew(call);
                const unsigned padded = padded_rows(now);
                const float* const numbers = (const float*)to.rows + (head * padded + row);
                const unsigned to_rows = shared + at::rows + stage * at::rows_bytes;
                copy_bytes(to_rows, numbers, TILE * 4, full);
                copy_bytes(to_rows + TILE * 4, numbers + now.batches * now.heads * padded, TILE * 4, full);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            if (first) {
                first = false;
                barrier_wait(shared + at::own_empty, n / OWN_PHASE);
                store_shared(shared + at::work, {(unsigned)work.of_keys, (unsigned)work.first_key,
                                                 (unsigned)work.first, (unsigned)work.tiles});
                if (work.of_keys == NO_MORE) {
                    barrier_arrive(shared + at::own_full);
                    return;
                }
                barrier_expect(shared + at::own_full, 2 * GROUPS * own_bytes);
#pragma unroll 1
                for (int group = 0; group < GROUPS; group++) {
                    const unsigned own_at = shared + group * own_bytes, first_key = work.first_key + 64 * group;
                    copy_rows<64>(own_at + at::k, K, work.of_keys, first_key, shared + at::own_full);
                    copy_rows<64>(own_at + at::v, V, work.of_keys, first_key, shared + at::own_full);
                }
            }
            if (of.left > 0) {
                const unsigned full = shared + at::dout_full + 8 * (n & 1);
                barrier_wait(full - at::dout_full + at::dout_empty, ~n >> 1 & 1);
                barrier_expect(full, at::tile_bytes);
                copy_rows<TILE>(shared + at::dout + (n & 1) * at::tile_bytes, dO, head, row, full);
                n++;
            }
            of.next(call, work);
        } while (of.left > 0);
    }
}

// A thread that adds dQ, of every other tile: once all tiles of keys before have added, and dQ is there.
__device__ inline void add(const Call& call, const Gradients& to, unsigned shared, unsigned adder) {
    unsigned n = 0, phase = 0;
#pragma unroll 1
    for (unsigned own_phase = 0;; own_phase ^= 1) {
        barrier_wait(shared + at::own_full, own_phase);
        const Work work = shared_work(shared + at::work);
        barrier_arrive(shared + at::own_empty);
        if (work.of_keys == NO_MORE) break;
#pragma unroll 1
        for (Queries of(call, work); of.left > 0; of.next(call, work)) {
            if ((n++ & 1) != adder) continue;
            const Call now = anew(call);
            const unsigned row = of.head * (unsigned)padded_rows(now) + of.row;
            unsigned* const turn = counters_of(now, to) + 1 + row / TURN_ROWS;
            const unsigned before = first_adder(now, of.head, of.row) - work.first_key / BC;
            while (load_acquired(turn) != before) {
            }
            barrier_wait(shared + at::dq_full + 8 * adder, phase);
            phase ^= 1;
            copy_out(sums_of(now, to) + (long long)row * width, shared + at::dq, at::dq_bytes, before > 0);
            copies_read();
            barrier_arrive(shared + at::dq_empty);
            copies_done();
            store_released(turn, before + 1);
        }
    }
}

// S <- X Z^T, 64 rows of X; or S <- X Z^T + S
__device__ inline void scores(float (&S)[TILE / 2], unsigned x, unsigned z, bool adds) {
    UNROLLED(c, width / 16) {
        const int b = c / (BOX / 16), in_box = c % (BOX / 16) * 32;
        multiply(S, x + ((b * (64 * box_row) + in_box) >> 4), z + ((b * (TILE * box_row) + in_box) >> 4),
                 adds || c > 0);
    }
}

// sums <- A Z + sums
__device__ inline void add_product(float (&sums)[width / 2], const unsigned (&A)[TILE / 4], unsigned z) {
    UNROLLED(c, TILE / 16) multiply_from(sums, A + 4 * c, z + (c * 16 * box_row >> 4));
}

// dQ <- dS K; dS: a tile of 64 keys' boxes of 64 queries at least
__device__ inline void queries_product(float (&dQ)[half], unsigned ds, unsigned k) {
    UNROLLED(c, BC / 16) {
        const int b = c / 4, in_box = c % 4 * 32;
        multiply_down<0>(dQ, ds + ((b * (TILE * 128) + in_box) >> 4),
                         k + ((b * own_bytes + c % 4 * 16 * box_row) >> 4), c > 0);
    }
}

__device__ inline void keys_product(float (&dK)[width / 2], unsigned ds, unsigned q) {
    UNROLLED(c, TILE / 16) multiply_down<1>(dK, ds + (c * 16 * 128 >> 4), q + (c * 16 * box_row >> 4), 1);
}

__device__ inline void load_pair(float (&x)[2], unsigned from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from));
}

// P <- 2^(S - lse); W <- P times the derivative of changed scores. first: the first query of the tile; row: the
// thread's first key; numbers: the address of the queries' lse, of which AHEAD pairs are there.
template <bool MASKED>
__device__ inline void weigh(const Call& call, int head, int first, int row, unsigned numbers,
                             float (&S)[TILE / 2], float (&lses)[TILE / 8][2], unsigned (&P)[TILE / 4],
                             unsigned (&W)[WEIGHTED ? TILE / 4 : 1]) {
    const int column = threadIdx.x % 4 * 2;
    QueryRange seen[2];  // by the rows r and r + 8
    if (MASKED)
        UNROLLED(h, 2) {
            const int j = row + 8 * h;
            const QueryRange of = queries_of(call, head, j, j);
            seen[h] = {j < call.Nk ? of.first - first - column : TILE, of.end - first - column};
        }
    unsigned long long hidden = 0;  // of S, by documents whose numbers are compared
#if RULES & DOCUMENTS
    if (const long long* const numbers = MASKED ? document_of(call, head, row).numbers : nullptr)
#pragma unroll 4
        for (int n = 0; n < TILE / 2; n++) {
            const int key = row + n / 2 % 2 * 8, query = first + column + n / 4 * 8 + n % 2 + call.Nk - call.Nq;
            const bool other = numbers[min(key, call.Nk - 1)] != numbers[min(query, call.Nk - 1)];
            hidden |= (unsigned long long)other << n;
        }
#endif
#if RULES & ALIBI
    const float slope = call.rules.slopes[head] * LOG2E;
    const float own[2] = {(float)(first + column + call.Nk - call.Nq - row),
                          (float)(first + column + call.Nk - call.Nq - row - 8)};
#endif
    UNROLLED(m, TILE / 8) {
        const float (&lse)[2] = lses[m];
        float p[4], w[4];
        if (m + AHEAD < TILE / 8) load_pair(lses[m + AHEAD], numbers + (m + AHEAD) * 32);
        UNROLLED(e, 4) {
            const int c = 8 * m + e % 2;
            float s = S[4 * m + e];
            [[maybe_unused]] float t = 0.0f, slope_of_mod = 1.0f;
            if (MASKED || CHANGES) s *= call.scale;
#if RULES & (BIAS_ADDS | BIAS_HIDES | MODIFIED)
            const Row of_query(call, head, first + column + c, row + 8 * (e / 2), true);
            if (RULES & SOFTCAP) t = tanh_approx(s * of_query.cap_below);
            s = of_query.given(s, 0);
            slope_of_mod = of_query.modified_slope(s, 0);
            s = of_query.modified(s, 0);
#else
#if RULES & SOFTCAP
            t = tanh_approx(s * call.rules.softcap_below);
            s = call.rules.softcap * t;
#endif
#if RULES & ALIBI
            s -= slope * fabsf(own[e / 2] + (float)c);
#endif
#endif
            if (MASKED && !(c >= seen[e / 2].first && (!RULES || c < seen[e / 2].end))) s = -INF;
            if (RULES & DOCUMENTS && hidden >> (4 * m + e) & 1) s = -INF;
            s = MASKED || CHANGES ? s - lse[e % 2] : fmaf(s, call.scale, -lse[e % 2]);
            p[e] = exp2_approx(s);
            w[e] = p[e] * fmaf(-t, t, 1.0f) * slope_of_mod;
        }
        UNROLLED(h, 2) {
            P[2 * m + h] = pack(p[2 * h], p[2 * h + 1]);
            if (WEIGHTED) W[2 * m + h] = pack(w[2 * h], w[2 * h + 1]);
        }
    }
}

// Whether dP is begun before P, whose exponentials take longer than the products of dK do: the narrower the
// heads, the more. At width 64 P and W together would leave it no registers.
constexpr bool EARLY = width == 32 || width == 64 && !WEIGHTED;

// Whether a tile is a work's first.
struct First {
    static constexpr bool first = true;
};
struct Later {
    static constexpr bool first = false;
};

// A warpgroup that multiplies, for a work. n: tiles before; stage, phase: of the next Q.
__device__ inline void consume(const Call& call, const Gradients& to, unsigned shared, int group,
                               const Work& work, unsigned& n, unsigned& stage, unsigned& phase) {
    const int own = work.first_key + 64 * group, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int row = own + warp * 16 + lane / 4;
    const unsigned k = tile_at(shared + at::k + group * own_bytes, 0), v = k + ((at::v - at::k) >> 4);
    const unsigned q = tile_at(shared + at::q, 0), q_down = tile_at(shared + at::q, TILE * box_row);
    constexpr unsigned to_dout = (at::dout - at::q) >> 4;
    const unsigned k_down = tile_at(shared + at::k + (BY_ROWS ? 0 : group * 64 * box_row), 64 * box_row);
    const unsigned ds = tile_at(shared + at::ds + (BY_ROWS ? group * 64 * 128 : 0), 0);
    const unsigned own_ds = tile_at(shared + at::ds + group * TILE * 128, 0);
    float dK[width / 2] = {}, dV[width / 2] = {};
    unsigned P[TILE / 4], W[WEIGHTED ? TILE / 4 : 1];

    const auto arrive = [&](unsigned barrier) {
        if (lane == 0) barrier_arrive(shared + barrier);
    };
    const auto stored = [&](unsigned barrier) {
        stores_done();
        __syncwarp();
        arrive(barrier);
    };
    const auto numbers = [&](int which) {  // 0: lse, 1: -D
        return shared + at::rows + stage * at::rows_bytes + which * TILE * 4 + lane % 4 * 8;
    };
    const auto set_to_minus_D = [&](float (&dP)[TILE / 2]) {
        UNROLLED(m, TILE / 8) {
            float D[2];
            load_pair(D, numbers(1) + m * 32);
            UNROLLED(e, 4) dP[4 * m + e] = D[e % 2];
        }
        hold(dP);
    };
    const auto begin_dP = [&](float (&dP)[TILE / 2]) {
        barrier_wait(shared + at::dout_full + 8 * (n & 1), n >> 1 & 1);
        products_begin();
        scores(dP, v, q + to_dout + ((n & 1) * at::tile_bytes >> 4), true);
        products_commit();
    };
    const auto begin_scores = [&](float (&S)[TILE / 2], float (&dP)[TILE / 2]) {
        barrier_wait(shared + at::q_full + 8 * stage, phase);
        if (EARLY) set_to_minus_D(dP);
        renew(S);
        products_begin();
        scores(S, k, q + (stage * at::tile_bytes >> 4), false);
        products_commit();
        if (EARLY) begin_dP(dP);
    };
    const auto wait_for_ds = [&](unsigned tile) {
        barrier_wait(shared + at::ds_full + 8 * (tile & 1), tile >> 1 & 1);
    };
    // dK and dQ of the tile before. before: the stage of its Q
    const auto begin_keys = [&](unsigned before) {
        keys_product(dK, own_ds + ((~n & 1) * at::ds_bytes >> 4), q_down + (before * at::tile_bytes >> 4));
        products_commit();
    };
    const auto begin_queries = [&](float (&dQ)[half]) {
        queries_product(dQ, ds + ((~n & 1) * at::ds_bytes >> 4), k_down);
        products_commit();
    };
    const auto give = [&](float (&dQ)[half]) {
        const unsigned tile = n - 1;
        barrier_wait(shared + at::dq_empty, ~tile & 1);
        const unsigned to_dq = shared + at::dq + group * (at::dq_bytes / 2) + threadIdx.x % 128 * 16;
        UNROLLED(i, half / 4) {
            const unsigned words[4] = {__float_as_uint(dQ[4 * i]), __float_as_uint(dQ[4 * i + 1]),
                                       __float_as_uint(dQ[4 * i + 2]), __float_as_uint(dQ[4 * i + 3])};
            store_shared(to_dq + i * 2048, words);
        }
        stored(at::dq_full + 8 * (tile & 1));
    };
    const auto to_weights = [&](float (&S)[TILE / 2], int head, int first, auto tile) {
        const QueryRange clear = queries_of_all(call, head, own, own + 63);
        const bool masked = own + 64 > call.Nk || first < clear.first || (RULES && first + TILE > clear.end);
        float lses[TILE / 8][2];
        UNROLLED(m, AHEAD) load_pair(lses[m], numbers(0) + m * 32);
        products_wait<EARLY + !tile.first>();
        hold(S);
        if (masked)
            weigh<true>(call, head, first, row, numbers(0), S, lses, P, W);
        else
            weigh<false>(call, head, first, row, numbers(0), S, lses, P, W);
        hold(P);
    };
    // dV and dS of the tile, and dQ of the one before. before: the stage of its Q
    const auto finish = [&](float (&dP)[TILE / 2], unsigned before, auto tile) {
        float dQ[half];
        if (!EARLY) {
            set_to_minus_D(dP);
            begin_dP(dP);
        }
        if constexpr (!tile.first) renew(dQ);
        hold(dV), hold(P);
        products_begin();
        if constexpr (!tile.first) begin_queries(dQ);
        add_product(dV, P, q_down + to_dout + ((n & 1) * at::tile_bytes >> 4));
        products_commit();
        products_wait<tile.first ? 1 : 2 + EARLY>();
        hold(dP);
        const unsigned to_ds = shared + at::ds + (n & 1) * at::ds_bytes + group * TILE * 128 +
                               (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        UNROLLED(c, TILE / 16) {
            unsigned dS[4];
            UNROLLED(i, 4) {
                const unsigned rounded = WEIGHTED ? W[WEIGHTED ? 4 * c + i : 0] : P[4 * c + i];
                float x[2];
                UNROLLED(e, 2) x[e] = to_float((Element)(rounded >> 16 * e)) * dP[8 * c + 2 * i + e];
                dS[i] = pack(x[0], x[1]);
            }
            store_transposed(to_ds + c * 16 * 128, dS);
        }
        if constexpr (!tile.first) {
            products_wait<2>();
            hold(dK);
            arrive(at::q_empty + 8 * before);
            products_wait<1>();  // before the other warpgroup may write over what dQ is computed from
            hold(dQ);
        }
        stored(at::ds_full + 8 * (n & 1));
        if constexpr (!tile.first) give(dQ);
        products_wait<0>();
        hold(dV), hold(P);
        arrive(at::dout_empty + 8 * (n & 1));
        n++;
    };
    const auto next = [&](unsigned& stage, unsigned& phase) {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };

    Queries of(call, work);
    if (of.left > 0) {
        {
            float S[TILE / 2], dP[TILE / 2];
            begin_scores(S, dP);
            to_weights(S, of.head, of.row, First{});
            finish(dP, 0, First{});
        }
#pragma unroll 1
        for (of.next(call, work); of.left > 0; of.next(call, work)) {
            const unsigned before = stage;
            next(stage, phase);
            float S[TILE / 2], dP[TILE / 2];
            begin_scores(S, dP);
            wait_for_ds(n - 1);
            hold(dK);
            products_begin();
            begin_keys(before);
            to_weights(S, of.head, of.row, Later{});
            finish(dP, before, Later{});
        }
        float dQ[half];
        wait_for_ds(n - 1);
        hold(dK), hold(dQ);
        products_begin();
        begin_queries(dQ);
        begin_keys(stage);
        products_wait<1>();
        hold(dQ);
        arrive(at::own_empty);
        give(dQ);
        products_wait<0>();
        hold(dK);
        arrive(at::q_empty + 8 * stage);
        next(stage, phase);
    } else {
        arrive(at::own_empty);
    }
    const long long out = (long long)work.of_keys * call.Nk * d;
    write(to.dk + out, dK, call.scale * LN2, own, call.Nk);
    write(to.dv + out, dV, 1.0f, own, call.Nk);
}

__device__ inline void init_barriers(unsigned shared) {
    UNROLLED(i, STAGES) {
        barrier_init(shared + at::q_full + 8 * i, 1);
        barrier_init(shared + at::q_empty + 8 * i, 4 * GROUPS);  // an arrival of each warp
    }
    UNROLLED(i, 2) {
        barrier_init(shared + at::dout_full + 8 * i, 1);
        barrier_init(shared + at::dout_empty + 8 * i, 4 * GROUPS);
        barrier_init(shared + at::ds_full + 8 * i, 4 * GROUPS);
        barrier_init(shared + at::dq_full + 8 * i, 4 * GROUPS);
    }
    barrier_init(shared + at::dq_empty, 1);
    barrier_init(shared + at::own_full, 1);
    barrier_init(shared + at::own_empty, 4 * GROUPS + ADDERS);
}

__device__ inline void consume_works(const Call& call, const Gradients& to, unsigned shared, int group) {
    unsigned n = 0, stage = 0, phase = 0;
#pragma unroll 1
    for (unsigned own_phase = 0;; own_phase ^= 1) {
        barrier_wait(shared + at::own_full, own_phase);
        const Work work = shared_work(shared + at::work);
        __syncwarp();  // all lanes have it before one gives the place back
        if (work.of_keys == NO_MORE) break;
        consume(call, to, shared, group, work, n, stage, phase);
    }
}

// A warpgroup for each half of a tile of dQ, whose sums are as its threads have them.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_queries(const __grid_constant__ Call call, const __grid_constant__ Gradients to) {
    const long long part = blockIdx.x * (THREADS / 128LL) + threadIdx.x / 128;
    const long long row = part / 2 * TILE, head = row / padded_rows(call);
    const int i0 = row % padded_rows(call), group = part % 2;
    if (head >= call.batches * call.heads || i0 >= call.Nq) return;
    const bool added = counters_of(call, to)[1 + row / TURN_ROWS] > 0;
    float dQ[half];
    load_sums(dQ, sums_of(call, to) + part * 64 * columns, added);
    const int i = i0 + (BY_ROWS ? 64 * group : 0) + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    UNROLLED(h, 2) {
        Element* const out = to.dq + (head * call.Nq + i + 8 * h) * d;
        const float scale = call.scale * LN2;
        const bool inside = i + 8 * h < call.Nq;
        if (BY_ROWS || group == 0)
            store_row<BY_ROWS ? d : 64>(out, dQ, h, scale, inside);
        else
            store_row<BY_ROWS ? d : d - 64>(out + 64, dQ, h, scale, inside);
    }
}

#else
// Wide heads, d of 136 to 256: a block owns 128 queries, 64 for each warpgroup, and goes over the tiles of 64
// keys that some of them see. dQ stays in registers. dV and dK leave in parts of 64 columns, by additions of 16
// bytes from registers. A block that owned 64 keys, whose dK and dV fill the registers, too, would read shared
// memory 1.3 times as often for the same products, and twice as much from the L2 cache.
// Loop nest: a warpgroup begins, for a tile of keys:
//         1  S <- Q K^T
//         2  dP <- dO V^T
//                P <- 2^(scale S - lse)        beside 2; to shared memory
//         3  dV <- P^T dO                      a part, of all 128 queries
//                dS <- P * (dP - D)            beside 3; to shared memory, and in registers for 4
//         4  dQ <- dQ + dS K
//         5  dV <- P^T dO, dK <- dS^T Q        the warpgroup's other parts
//                sums <- sums + part           each beside the next product
// Launch: after the rows', min(tiles of queries, multiprocessors) blocks: 1 thread copies, 2 keep the order and
//     256 multiply and add. Then a warpgroup for each part, which scales and rounds it.
// Order: a block takes a head's last queries first, and adds to a tile of keys after those that were taken
//     before, as above.
// Shared memory: 768 width (Q and dO of 128 queries, K, V) + 32,768 (P, dS) + 136 (mbarriers, a Work) + 1,024.
// Registers: width / 2 (dQ) + 64 (two of S, dP and parts) + 16 (P, then dS) and about 30 more.
// Bound: by estimate the L2 cache, for 128 KiB of additions and 64 KiB of copies a tile at d = 256. No counter
//     was read; with four times as many heads in work, more than the cache holds, it took 1.7 times as long.
// Measured: NVIDIA H200, bf16, the sizes above at d = 256: 375 to 462 TFLOP/s, 0.95 to 1.28 times cuDNN. At
//     d = 192, 1.03 to 1.23 times cuDNN.
#define ATTENTION_BACKWARD attention_backward_queries
constexpr int tile_bytes = 64 * width * 2, box_bytes = 64 * box_row;
constexpr int pairs_bytes = BR * 128;   // P or dS: rows of 64 keys
constexpr unsigned TOGETHER = 1 << 15;  // queries of the heads that are in work, for the L2 cache
static_assert(BR == 64 * GROUPS && BC == 64 && TURN_ROWS == BC && BOX == 64, "tile");
static_assert(boxes == 3 || boxes == 4, "how the parts are halved");

namespace at {
constexpr int q = 0, dout = q + GROUPS * tile_bytes, k = dout + GROUPS * tile_bytes, v = k + tile_bytes;
constexpr int p = v + tile_bytes, ds = p + pairs_bytes, work = ds + pairs_bytes, before = work + 16;
// mbarriers: of one arrival, own_empty, of an arrival of each warp
constexpr int own_full = before + 8 * ADDERS, k_full = own_full + 8, v_full = k_full + 8, turn = v_full + 8;
constexpr int own_empty = turn + 8 * ADDERS;
constexpr int k_empty = own_empty + 8, v_empty = k_empty + 8, p_full = v_empty + 8, ds_full = p_full + 8;
constexpr int pairs_empty = ds_full + 8, added = pairs_empty + 8, end = added + 8 * ADDERS;
}  // namespace at

__device__ inline void init_barriers(unsigned shared) {
    for (int barrier = at::own_full; barrier < at::end; barrier += 8) {
        const int arrivals = 4 * GROUPS + (barrier == at::own_empty) * ADDERS;
        barrier_init(shared + barrier, barrier < at::own_empty ? 1 : arrivals);
    }
}

// A tile of queries of a head, and the keys that it sees, `first` to `end` - 1; `first` is a multiple of BC.
struct Work {
    int head, first_query, first, end;
};

__device__ inline unsigned works(const Call& call) {
    return (call.Nq + BR - 1) / BR * (call.batches * call.heads);
}
__device__ inline Work work_of(const Call& call, unsigned index) {
    const unsigned group = heads_of_keys(call), tiles = works(call) / (call.batches * call.heads);
    const unsigned most = max(TOGETHER / group / (unsigned)padded_rows(call), 1u) * group;
    const unsigned first = index / (most * tiles) * most, within = index - first * tiles;
    const unsigned heads = min(most, call.batches * call.heads - first), head = first + within % heads;
    const int i = (tiles - 1 - within / heads) * BR;
    const Range seen = range_of(call, head, i, i + BR - 1);
    return {(int)head, i, seen.first / BC * BC, seen.end};
}
__device__ inline Work shared_work(unsigned from) {
    unsigned words[4];
    reload_shared(words, from);
    return {(int)words[0], (int)words[1], (int)words[2], (int)words[3]};
}

// How many works add to the keys from j on before the work does: later queries, and heads before of a group.
__device__ inline unsigned adders_before(const Call& call, const Work& work, int j) {
    const int last = (queries_of(call, work.head, j, min(j + BC, call.Nk) - 1).end - 1) / BR;
    return (last - work.first_query / BR) * heads_of_keys(call) + work.head % heads_of_keys(call);
}

// The index of the sums of the work's keys from j on.
__device__ inline unsigned sums_index(const Call& call, const Work& work, int j) {
    return work.head / heads_of_keys(call) * ((call.Nk + BC - 1) / BC) + j / BC;
}

// The thread that copies, for each work: its first K as soon as there is room, then Q and dO, then V and the
// other tiles. The work goes with Q; NO_MORE ends the block.
__device__ inline void produce(const Call& call, const Gradients& to, unsigned shared, const Matrix& Q,
                               const Matrix& K, const Matrix& V, const Matrix& dO) {
#pragma unroll 1
    for (unsigned n = OWN_PHASE;; n ^= OWN_PHASE) {
        const Call now = anew(call);
        const unsigned index = atomicAdd(counters_of(now, to), 1u);
        const Work work = index < works(now) ? work_of(now, index) : Work{NO_MORE, 0, 0, 0};
        const int of_keys = work.head / (int)heads_of_keys(now);
        const auto fetch = [&](int to, const Matrix& from, int j, int full, int empty) {
            if (j >= work.end) return;
            barrier_wait(shared + empty, ~n & 1);
            barrier_expect(shared + full, tile_bytes);
            copy_rows<64>(shared + to, from, of_keys, j, shared + full);
        };
#pragma unroll 1
        for (int j = work.first; j == work.first || j < work.end; j += BC) {
            fetch(at::k, K, j, at::k_full, at::k_empty);
            if (j == work.first) {
                barrier_wait(shared + at::own_empty, n / OWN_PHASE);
                store_shared(shared + at::work, {(unsigned)work.head, (unsigned)work.first_query,
                                                 (unsigned)work.first, (unsigned)work.end});
                if (work.head == NO_MORE) {
                    barrier_arrive(shared + at::own_full);
                    return;
                }
                barrier_expect(shared + at::own_full, 2 * GROUPS * tile_bytes);
#pragma unroll 1
                for (int group = 0; group < GROUPS; group++) {
                    const unsigned own = shared + group * tile_bytes, i = work.first_query + 64 * group;
                    copy_rows<64>(own + at::q, Q, work.head, i, shared + at::own_full);
                    copy_rows<64>(own + at::dout, dO, work.head, i, shared + at::own_full);
                }
            }
            fetch(at::v, V, j, at::v_full, at::v_empty);
            n += j < work.end;
        }
    }
}

// A thread that keeps the order of sums, for every other tile: says when the work may add, and that it has.
__device__ inline void add(const Call& call, const Gradients& to, unsigned shared, unsigned adder) {
#pragma unroll 1
    for (unsigned n = 0;; n ^= OWN_PHASE) {
        barrier_wait(shared + at::own_full, n / OWN_PHASE);
        const Work work = shared_work(shared + at::work);
        barrier_arrive(shared + at::own_empty);
        if (work.head == NO_MORE) break;
#pragma unroll 1
        for (int j = work.first; j < work.end; j += BC, n++) {
            if ((n & 1) != adder) continue;
            const Call now = anew(call);
            unsigned* const turn = counters_of(now, to) + 1 + sums_index(now, work, j);
            const unsigned before = adders_before(now, work, j);
            while (load_acquired(turn) != before) {
            }
            store_shared(shared + at::before + 8 * adder, before);
            barrier_arrive(shared + at::turn + 8 * adder);
            barrier_wait(shared + at::added + 8 * adder, n >> 1 & 1);
            store_released(turn, before + 1);
        }
    }
}

// S <- X Z^T, 64 rows of both
__device__ inline void scores(float (&S)[32], unsigned x, unsigned z) {
    UNROLLED(c, (d + 15) / 16) {
        const int at = (c / 4 * box_bytes + c % 4 * 32) >> 4;
        multiply(S, x + at, z + at, c > 0);
    }
}

// sums <- A^T Z for 64 columns of Z; A: P or dS of all queries, z: a box of dO or Q
__device__ inline void keys_product(float (&sums)[32], unsigned a, unsigned z) {
    UNROLLED(c, BR / 16)
        multiply_down<1>(sums, a + (c * 16 * 128 >> 4), z + ((c / 4 * tile_bytes + c % 4 * 16 * box_row) >> 4),
                         c > 0);
}

// dQ <- dQ + dS K
__device__ inline void queries_product(float (&dQ)[width / 2], const unsigned (&dS)[16], unsigned k) {
    UNROLLED(c, BC / 16) multiply_from(dQ, dS + 4 * c, k + (c * 16 * box_row >> 4));
}

// P <- 2^(S - lse); W <- P times the derivative of changed scores. i, j: the thread's first query and key.
template <bool MASKED>
__device__ inline void weigh(const Call& call, int head, int i, int j, const float (&lse)[2],
                             const float (&S)[32], unsigned (&P)[16], unsigned (&W)[WEIGHTED ? 16 : 1]) {
    UNROLLED(h, 2) {
#if RULES
        const Row row(call, head, i + 8 * h, j);
        unsigned hidden = 0;  // by documents whose numbers are compared: one load at a time, all would spill
        if (MASKED && RULES & DOCUMENTS && row.documents)
#pragma unroll 1
            for (int n = 0; n < 16; n++) hidden |= !row.sees(n / 2 * 8 + n % 2) << n;
#else
        const int end = keys_seen(call, i + 8 * h) - j;
#endif
        UNROLLED(m, 8) {
            float p[2], w[2];
            UNROLLED(e, 2) {
                const int c = 8 * m + e;
                float s = S[4 * m + 2 * h + e] * call.scale;
#if RULES
                const float given = row.given(s, c), slope = row.derivative(s) * row.modified_slope(given, c);
                s = row.modified(given, c);
                if (MASKED && (c < row.first || c >= row.end || hidden >> (2 * m + e) & 1)) s = -INF;
#else
                const float slope = 1.0f;
                if (MASKED && c >= end) s = -INF;
#endif
                p[e] = exp2_approx(s - lse[h]);
                w[e] = p[e] * slope;
            }
            P[2 * m + h] = pack(p[0], p[1]);
            if (WEIGHTED) W[2 * m + h] = pack(w[0], w[1]);
        }
    }
}

// 64 queries of 64 keys to shared memory
__device__ inline void store_pairs(unsigned to, const unsigned (&x)[16]) {
    int thread = threadIdx.x % 128;
    hold(thread);  // what follows is not computed ahead: registers are few
    const unsigned lane = thread % 32u, row = thread / 32u * 16 + lane % 16;
    const unsigned first = to + row * 128 + (lane / 16 ^ lane % 8) * 16;
    UNROLLED(c, 4) store_matrices(first ^ c * 32, x + 4 * c);
}

// The n-th part of a warpgroup is 64 columns of dV or dK; all parts are equal, and the first one is of dV.
__device__ inline bool is_of_k(int group, int n) { return boxes == 3 && n == 1 ? group : n >= 2; }
__device__ inline int box_of(int group, int n) {
    return boxes == 3 && n == 1 ? 1 : 2 * group + (boxes == 4 ? n % 2 : 0);
}

__device__ inline void consume(const Call& call, const Gradients& to, unsigned shared, int group, unsigned& n) {
    const Work work = shared_work(shared + at::work);
    const int lane = threadIdx.x % 32, row = 64 * group + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const unsigned q = tile_at(shared + at::q, 0), own_q = q + group * (tile_bytes >> 4);
    constexpr unsigned to_dout = (at::dout - at::q) >> 4;
    const unsigned k = tile_at(shared + at::k, 0), k_down = tile_at(shared + at::k, box_bytes);
    const unsigned p = tile_at(shared + at::p, 0), ds = p + (pairs_bytes >> 4);
    const unsigned own_pairs = shared + at::p + group * 64 * 128;
    float lse[2], minus_D[2];
    {
        const long long padded = padded_rows(call);
        const float* const rows = (const float*)to.rows + work.head * padded + work.first_query + row;
        UNROLLED(h, 2) {
            lse[h] = rows[8 * h];
            minus_D[h] = rows[call.batches * call.heads * padded + 8 * h];
        }
    }
    float dQ[width / 2] = {}, X[32], Y[32];
    // where the thread adds, in 16 bytes from the rows on: a pointer would take a register more
    unsigned sums = (call.batches * call.heads * (unsigned)padded_rows(call)) / 2 + threadIdx.x % 128 +
                    sums_index(call, work, work.first) * (tile_sums / 4) + group * boxes * 1024;

    const auto arrive = [&](unsigned barrier) {
        if (lane == 0) barrier_arrive(shared + barrier);
    };
    const auto stored = [&](unsigned barrier) {
        stores_done();
        __syncwarp();
        arrive(barrier);
    };
    // S or dP, once K or V is there
    const auto begin_scores = [&](float (&S)[32], unsigned full, unsigned n, unsigned x, unsigned z) {
        barrier_wait(shared + full, n & 1);
        renew(S);
        products_begin();
        scores(S, x, z);
        products_commit();
    };
    const auto begin_S = [&](unsigned n) { begin_scores(X, at::k_full, n, own_q, k); };
    const auto begin_dP = [&](unsigned n) {
        begin_scores(Y, at::v_full, n, own_q + to_dout, k + (tile_bytes >> 4));
    };
    const auto begin_part = [&](float (&part)[32], int n) {
        const bool to_k = is_of_k(group, n);
        renew(part);
        products_begin();
        keys_product(part, to_k ? ds : p, q + (to_k ? 0 : to_dout) + box_of(group, n) * (box_bytes >> 4));
        products_commit();
    };
    // Adds it to global memory, or stores it if it is the first.
    const auto give = [&](const float (&part)[32], int n, bool add) {
        float* const place = (float*)((float4*)to.rows + sums) + n * 64 * 64;
        if (add)
            UNROLLED(m, 8) add_global(place + m * 512, part + 4 * m);
        else
            UNROLLED(m, 8) *(float4*)(place + m * 512) = (const float4&)part[4 * m];
    };

    if (work.first < work.end) {
        begin_S(n);
        begin_dP(n);
#pragma unroll 1
        for (int j = work.first;; j += BC) {
            unsigned P[16], W[WEIGHTED ? 16 : 1];
            const Work now = shared_work(shared + at::work);  // read again: registers are few
            const int first = now.first_query + 64 * group, i = now.first_query + row;
            const int column = j + lane % 4 * 2;
            const Range seen = range_of(call, now.head, first, first + 63);
            products_wait<1>();
            hold(X);
            if (j < seen.all_first || j + BC > seen.all_end)
                weigh<true>(call, now.head, i, column, lse, X, P, W);
            else
                weigh<false>(call, now.head, i, column, lse, X, P, W);
            barrier_wait(shared + at::pairs_empty, ~n & 1);
            store_pairs(own_pairs, P);
            stored(at::p_full);
            barrier_wait(shared + at::p_full, n & 1);
            begin_part(X, 0);

            products_wait<1>();
            hold(Y);
            arrive(at::v_empty);
            UNROLLED(m, 16) {
                const unsigned rounded = WEIGHTED ? W[WEIGHTED ? m : 0] : P[m];
                float x[2];
                UNROLLED(e, 2) x[e] = to_float((Element)(rounded >> 16 * e)) * (Y[2 * m + e] + minus_D[m % 2]);
                P[m] = pack(x[0], x[1]);
            }
            store_pairs(own_pairs + pairs_bytes, P);
            stored(at::ds_full);
            hold(dQ), hold(P);
            products_begin();
            queries_product(dQ, P, k_down);
            products_commit();
            barrier_wait(shared + at::ds_full, n & 1);
            begin_part(Y, 1);

            products_wait<2>();
            hold(X);
            barrier_wait(shared + at::turn + 8 * (n & 1), n >> 1 & 1);
            const bool add = get(shared + at::before + 8 * (n & 1)) > 0;
            give(X, 0, add);
            begin_part(X, 2);
            products_wait<2>();
            hold(dQ), hold(P);
            arrive(at::k_empty);
            products_wait<1>();
            hold(Y);
            give(Y, 1, add);
            if (boxes == 4) begin_part(Y, 3);
            // for all: with products under way from tile to tile at all times, ptxas would serialize them
            products_wait<0>();
            hold(X), hold(Y);
            arrive(at::pairs_empty);
            give(X, 2, add);
            const auto give_last = [&] {
                if (boxes == 4) give(Y, 3, add);
                __syncwarp();
                arrive(at::added + 8 * (n++ & 1));
            };
            if (j + BC >= (int)get(shared + at::work + 12)) {
                give_last();
                break;
            }
            begin_S(n + 1);
            give_last();
            begin_dP(n);
            sums += tile_sums / 4;
        }
    }
    const Work done = shared_work(shared + at::work);
    __syncwarp();
    arrive(at::own_empty);
    write(to.dq + (long long)done.head * call.Nq * d, dQ, call.scale * LN2, done.first_query + 64 * group,
          call.Nq);
}

__device__ inline void consume_works(const Call& call, const Gradients& to, unsigned shared, int group) {
#pragma unroll 1
    for (unsigned n = 0;; n ^= OWN_PHASE) {
        barrier_wait(shared + at::own_full, n / OWN_PHASE);
        if ((int)get(shared + at::work) == NO_MORE) break;
        consume(call, to, shared, group, n);
    }
}

// A warpgroup for each 64 columns of a tile of dV or dK, whose sums are as its threads have them.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_keys(const __grid_constant__ Call call, const __grid_constant__ Gradients to) {
    const long long part = blockIdx.x * (THREADS / 128LL) + threadIdx.x / 128, index = part / (2 * boxes);
    const int group = part / boxes % 2, n = part % boxes, box = box_of(group, n);
    if (index >= turns_of(call) || box * 64 >= d) return;
    const unsigned tiles = (call.Nk + BC - 1) / BC;
    const bool of_k = is_of_k(group, n), added = counters_of(call, to)[1 + index] > 0;
    float sums[32];
    load_sums(sums, sums_of(call, to) + part * 64 * 64, added);
    const int j = index % tiles * BC + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    Element* const out = (of_k ? to.dk : to.dv) + (index / tiles * call.Nk + j) * d + box * 64;
    const float scale = of_k ? call.scale * LN2 : 1.0f;
    UNROLLED(h, 2) {
        const bool inside = j + 8 * h < call.Nk;
        if (box < d / 64)
            store_row<64>(out + 8LL * h * d, sums, h, scale, inside);
        else
            store_row<d % 64>(out + 8LL * h * d, sums, h, scale, inside);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ATTENTION_BACKWARD(const __grid_constant__ Call call, const __grid_constant__ Gradients to,
                       const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                       const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout) {
    extern __shared__ unsigned char raw[];
    const unsigned shared = (shared_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        init_barriers(shared);
        barrier_init_done();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_give<copying>();
        const int heads = call.heads, of_keys = heads / heads_of_keys(call);
        if (threadIdx.x == 0)
            produce(call, to, shared, {q, call.q_strides, heads}, {k, call.k_strides, of_keys},
                    {v, call.v_strides, of_keys}, {dout, to.dout_strides, heads});
        else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= ADDERS)
            add(call, to, shared, threadIdx.x / 32 - 1);
    } else {
        registers_take<multiplying>();
        consume_works(call, to, shared, warpgroup - 1);
    }
}
