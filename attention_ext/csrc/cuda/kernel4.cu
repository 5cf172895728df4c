// Kernel 4: float32 near the limit of the FMA units: register tiles, vector loads, asynchronous copies.
//
// Shapes: float32; d is a multiple of 4 up to 256; pointers and strides are multiples of 16 bytes. Tiles of BR
//     queries and BC keys.
// Loop nest: the grid goes over (batch, head) and tiles of queries, a block over tiles of keys:
//         S <- Q K^T, a slab of DIMS dimensions at a time, by 4 dimensions
//         m <- max(m, rowmax(S)), only if S exceeds m by SLACK: otherwise l and O keep their scale
//         for each slab of KEYS keys
//             P <- 2^(scale (S - m)), l <- l + rowsum(P), O <- O + P V
//     then O <- O / l. A warp owns TM * 32 / TX whole rows, a thread TM of them: it has TM x (BC / TX) scores
//     and TM x (d / TX) outputs. P passes through shared memory within the warp, so it needs no barrier.
// Launch: B H ceil(Nq / BR) blocks of THREADS threads.
// Shared memory: Q (BR, Q_ROW), two slabs of K or V, P transposed (warps, KEYS, P_ROW), float32. A row is an
//     odd number of 16 bytes long, so that 16 bytes of eight neighbouring rows lie in different banks.
// Improves on kernel 3: up to 8 x 8 scores a thread. cp.async fills one slab while the other is multiplied: V
//     arrives during Q K^T, the next K during P V. A 16-byte load takes 2 wavefronts instead of 4 if every lane
//     reads what lane ^ 1 or lane ^ 2 reads, hence the order of the lanes. Before sm_80 there is no cp.async.
// Bound: the FMA units. At d = 128 SDPA's efficient backend is faster: it uses tensor cores, as kernel 5 does.
// Command: python gpt.py bench kernel3,kernel4,kernel5,sdpa-efficient,sdpa-math --device cuda -d 32,64,128
//          --mask none,causal --l2 warm -r 5
// Measured: NVIDIA H200, fp32, (100, 1, 4096, d), no mask, TFLOP/s at d = 32, 64 and 128: 38.2, 43.0, 43.5;
//     1.49, 1.85 and 2.11 times kernel 3, and 1.85, 1.21 and 0.93 times SDPA's efficient backend.
#include "call.h"
#include "mma.h"
#include "rules.h"

// Macros of its own, by cuda/tiles.py:
//   TX, TM                      threads of a warp that share a row; rows of a thread, a multiple of 4
//   WARP_ROWS                   rows of a warp
//   BLOCKS                      blocks that a multiprocessor should hold: bounds the registers
//   DIMS                        dimensions of K that a slab holds, a multiple of 4
//   KEYS                        keys of V that a slab holds, a multiple of TX
//   Q_ROW, K_ROW, V_ROW, P_ROW  numbers of a row in shared memory
//   SLAB                        numbers of a slab
constexpr float SLACK = 16;  // weights stay below 2^16, far inside float32, and m seldom moves
constexpr int d = HEAD_DIM;
constexpr int ROW_GROUPS = 32 / TX;           // of a warp
constexpr int TN = BC / TX, TD = V_ROW / TX;  // keys, and columns of O, of a thread
constexpr int K_SLABS = (d + DIMS - 1) / DIMS, V_SLABS = BC / KEYS;
constexpr int P_AT = BR * Q_ROW + 2 * SLAB;  // where P is in shared memory

static_assert(TM % 4 == 0 && BC % TX == 0 && BC % KEYS == 0 && KEYS % TX == 0 && DIMS % 4 == 0 && d % 4 == 0);

// Copies 16 bytes from global to shared memory, or zeros; since sm_80 while the thread goes on. n is unused.
// Source: PTX ISA, cp.async.
__device__ inline void copy16(int n, float* to, const float* from, bool exists) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(exists ? 16 : 0));
#else
    *(float4*)to = exists ? *(const float4*)from : float4{0, 0, 0, 0};
#endif
}

// `rows` rows of `columns` numbers by copy(n, to, from, exists), n counting the thread's 16-byte pieces.
template <int rows, int columns, int pitch, bool whole, class Copy>
__device__ inline void copy_rows(Copy copy, float* to, const float* from, long long stride, int height,
                                 int width) {
    constexpr int chunks = columns / 4, below = THREADS / chunks;
    if constexpr (THREADS % chunks == 0) {  // a thread copies one column: its address needs no product
        const int i = threadIdx.x / chunks, c = threadIdx.x % chunks * 4;
        const float* at = from + i * stride + c;
        to += i * pitch + c;
#pragma unroll
        for (int n = 0; n < rows; n += below) {
            if (rows % below == 0 || n + i < rows)
                copy(n / below, to + n * pitch, at, whole || (n + i < height && c < width));
            at += below * stride;
        }
    } else {
        each_piece<rows, chunks>([&](int n, int i, int chunk) {
            const int c = 4 * chunk;
            copy(n, to + i * pitch + c, from + i * stride + c, whole || (i < height && c < width));
        });
    }
}
template <int rows, int columns, int pitch, class Copy>
__device__ inline void copy_tile(Copy copy, float* to, const float* from, long long stride, int height,
                                 int width) {
    if (height >= rows && width >= columns)
        copy_rows<rows, columns, pitch, true>(copy, to, from, stride, height, width);
    else
        copy_rows<rows, columns, pitch, false>(copy, to, from, stride, height, width);
}

extern __shared__ __align__(16) float memory[];

// Two slabs in shared memory, one multiplied while the other arrives; without cp.async, through registers.
struct Slabs {
    int now, next;  // their places in `memory`

    // The slab that began to arrive is `now`, and nobody reads `next`.
    __device__ inline void swap() {
        const int free = now;
        now = next;
        next = free;
        __syncthreads();
    }
#if __CUDA_ARCH__ >= 800
    template <int rows, int columns, int pitch>
    __device__ inline void begin(const float* from, long long stride, int height, int width) {
        copy_tile<rows, columns, pitch>(copy16, memory + next, from, stride, height, width);
        close_group();
    }
    template <int rows, int columns, int pitch> __device__ inline void end() {
        wait_groups<0>();
        swap();
    }
#else
    static constexpr int OF_K = (BC * DIMS / 4 + THREADS - 1) / THREADS;
    static constexpr int OF_V = (KEYS * d / 4 + THREADS - 1) / THREADS;
    float4 held[OF_K > OF_V ? OF_K : OF_V];

    template <int rows, int columns, int pitch>
    __device__ inline void begin(const float* from, long long stride, int height, int width) {
        const auto load = [&](int n, float*, const float* at, bool exists) {
            held[n] = exists ? *(const float4*)at : float4{0, 0, 0, 0};
        };
        copy_tile<rows, columns, pitch>(load, memory + next, from, stride, height, width);
    }
    template <int rows, int columns, int pitch> __device__ inline void end() {
        const auto store = [&](int n, float* at, const float*, bool) { *(float4*)at = held[n]; };
        copy_rows<rows, columns, pitch, true>(store, memory + next, memory + next, 0, 0, 0);
        swap();
    }
#endif
    __device__ inline void begin_keys(const float* k, long long stride, int keys, int slab) {
        begin<BC, DIMS, K_ROW>(k + slab * DIMS, stride, keys, d - slab * DIMS);
    }
    __device__ inline void begin_values(const float* v, long long stride, int keys) {
        begin<KEYS, d, V_ROW>(v, stride, keys, d);
    }
};

__device__ inline void load4(float to[4], const float* from) {
    float4 x = *(const float4*)from;
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
}

// Row i of the thread is row 4 * rg + ROW(i) of its warp.
#define ROW(i) ((i) / 4 * 4 * ROW_GROUPS + (i) % 4)

// S += Q K^T over a slab's dimensions
__device__ inline void scores(float s[TM][TN], const float* q_at, const float* k_at) {
#pragma unroll 4
    for (int c = 0; c < DIMS; c += 4) {
        float a[TM][4];
        UNROLLED(i, TM) load4(a[i], q_at + ROW(i) * Q_ROW + c);
        UNROLLED(n, TN) {
            float x[4];
            load4(x, k_at + n * TX * K_ROW + c);
            UNROLLED(e, 4)
                UNROLLED(i, TM) s[i][n] += a[i][e] * x[e];
        }
    }
}

// O += P V over a slab's keys
__device__ inline void accumulate(float o[TM][TD], const float* P, const float* V, int tx, int rg) {
    const float *p_at = P + rg * 4, *v_at = V + tx * 4;
#pragma unroll 8
    for (int k = 0; k < KEYS; k++) {
        float p[TM], v[TD];
        UNROLLED(n, TM / 4) load4(p + 4 * n, p_at + k * P_ROW + 4 * n * ROW_GROUPS);
        UNROLLED(n, TD / 4) load4(v + 4 * n, v_at + k * V_ROW + 4 * n * TX);
        UNROLLED(i, TM)
            UNROLLED(c, TD) o[i][c] += p[i] * v[c];
    }
}

// The rows and columns of a thread: keys tx, tx + TX ..., and the rows ROW(i) from 4 * rg on of a warp's.
struct Place {
    int tx, rg, warp_row;  // warp_row: the warp's first
    __device__ inline int row(int i) const { return warp_row + 4 * rg + ROW(i); }
};
constexpr int NEIGHBOUR = TX == 32 ? 1 : 2;  // the distance of the lanes of tx and tx + 1

struct State {                                // of a thread's rows
    float o[TM][TD] = {}, m[TM], l[TM] = {};  // m: of scores, not yet times scale; l: the thread's share
    float scale, slack;

    __device__ inline explicit State(float scale) : scale(scale), slack(SLACK / scale) {
        UNROLLED(i, TM) m[i] = -INF;
    }

    // m <- max(m, rowmax(S)) if some row grew by SLACK; l and O follow
    __device__ inline void raise(const float s[TM][TN]) {
        float top[TM];
        bool grows = false;
        UNROLLED(i, TM) {
            top[i] = -INF;
            UNROLLED(n, TN) top[i] = fmaxf(top[i], s[i][n]);
            grows |= top[i] > m[i] + slack;
        }
        if (!__any_sync(~0u, grows)) return;
        UNROLLED(i, TM) {
            top[i] = fmaxf(largest<NEIGHBOUR, NEIGHBOUR * TX>(top[i]), m[i]);
            float shrink = exp2_approx((m[i] - subtrahend(top[i])) * scale);
            m[i] = top[i];
            l[i] *= shrink;
            UNROLLED(c, TD) o[i][c] *= shrink;
        }
    }

    // P <- 2^(S - m), l <- l + rowsum(P), for the keys of a slab. p_at: the thread's first weights
    __device__ inline void weigh(float* p_at, float s[TM][TN], int slab) {
        UNROLLED(n, TN) {
            constexpr int OF_SLAB = KEYS / TX;
            if (n / OF_SLAB != slab) continue;
            float* to = p_at + n % OF_SLAB * TX * P_ROW;
            UNROLLED(i, TM) {
                s[i][n] = exp2_approx(s[i][n] * scale - subtrahend(m[i]) * scale);
                l[i] += s[i][n];
            }
#pragma unroll
            for (int i = 0; i < TM; i += 4)
                *(float4*)(to + i * ROW_GROUPS) = {s[i][n], s[i + 1][n], s[i + 2][n], s[i + 3][n]};
        }
    }

    // O <- O / l
    __device__ inline void write(const Call& call, long long head, const Place& at) {
        UNROLLED(i, TM) {
            l[i] = sum<NEIGHBOUR, NEIGHBOUR * TX>(l[i]);
            if (at.row(i) >= call.Nq) continue;
            const long long row = head * call.Nq + at.row(i);
#if RULES
            const float inverse = inverse_with_sink(call, head, m[i], l[i], scale);
#else
            const float inverse = 1.0f / l[i];
#endif
#pragma unroll
            for (int c = 0; c < TD; c += 4)
                if (c * TX + at.tx * 4 < d)
                    *(float4*)(call.out + row * d + c * TX + at.tx * 4) = {
                        o[i][c] * inverse, o[i][c + 1] * inverse, o[i][c + 2] * inverse, o[i][c + 3] * inverse};
            if (call.lse && at.tx == 0) call.lse[row] = m[i] * scale * LN2 + logf(l[i]);
        }
    }
};

// Q, and -Q for a negative scale: the weights take |scale|. The first slab of keys, from j0, begins to arrive.
__device__ inline void load_queries(float* Q, const Call& call, const Block& block, Slabs& slabs, int j0) {
    constexpr int COLUMNS = K_SLABS * DIMS;
    const int i0 = block.first_query;
    copy_tile<BR, COLUMNS, Q_ROW>(copy16, Q, block.q + i0 * call.q_strides.row, call.q_strides.row,
                                  call.Nq - i0, d);
    slabs.begin_keys(block.k + j0 * call.k_strides.row, call.k_strides.row, call.Nk - j0, 0);
    wait_groups<0>();
    if (CHANGES || call.scale >= 0) return;
#pragma unroll 1
    for (int at = threadIdx.x; at < BR * COLUMNS / 4; at += THREADS) {  // by the thread that copied it
        float4* x = (float4*)(Q + at / (COLUMNS / 4) * Q_ROW + at % (COLUMNS / 4) * 4);
        *x = {-x->x, -x->y, -x->z, -x->w};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attention_kernel4(const Call call) {
    // sizes
    const int Nq = call.Nq, Nk = call.Nk;
    const Block block = block_across_heads(call, BR);
    const int i0 = block.first_query;
    const Range keys = range_of(call, block.head, i0, min(i0 + BR, Nq) - 1);
    const int end = keys.end;
    const long long k_row = call.k_strides.row, v_row = call.v_strides.row;

    // data
    const float *k = block.k, *v = block.v;
    float* Q = memory;
    Slabs slabs{BR * Q_ROW + SLAB, BR * Q_ROW};

    // rows and columns of this thread
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rg = TX == 32 ? 0 : lane / (2 * TX) * 2 + lane % 2, tx = TX == 32 ? lane : lane / 2 % TX;
    const Place place{tx, rg, i0 + warp * WARP_ROWS};
    float* P = memory + P_AT + warp * (KEYS * P_ROW);
    const float* q_at = Q + (warp * WARP_ROWS + rg * 4) * Q_ROW;

    State state(CHANGES ? 1.0f : fmaxf(fabsf(call.scale), 1e-30f));  // not 0: 0 * -inf is NaN
    const Range of_warp = range_of(call, block.head, place.warp_row, place.warp_row + WARP_ROWS - 1);
    if (end > keys.first) load_queries(Q, call, block, slabs, keys.first);

    for (int j0 = keys.first; j0 < end; j0 += BC) {
        const bool active = j0 < of_warp.end && (!RULES || j0 + BC > of_warp.first);

        // S <- Q K^T
        float s[TM][TN] = {};
#pragma unroll 1
        for (int slab = 0; slab < K_SLABS; slab++) {
            slabs.end<BC, DIMS, K_ROW>();
            if (slab + 1 < K_SLABS)
                slabs.begin_keys(k + j0 * k_row, k_row, Nk - j0, slab + 1);
            else
                slabs.begin_values(v + j0 * v_row, v_row, Nk - j0);
            if (active) scores(s, q_at + slab * DIMS, memory + slabs.now + tx * K_ROW);
        }
        if (active) {
            if (CHANGES || j0 + BC > of_warp.all_end || (RULES && j0 < of_warp.all_first)) {
                UNROLLED(i, TM) {
#if RULES
                    const Row row(call, block.head, place.row(i), j0 + tx);
                    UNROLLED(n, TN) s[i][n] = row(CHANGES ? s[i][n] * call.scale : s[i][n], TX * n);
#else
                    const int seen = keys_seen(call, place.row(i)) - j0;
                    UNROLLED(n, TN)
                        if (tx + TX * n >= seen) s[i][n] = -INF;
#endif
                }
            }
            state.raise(s);
        }

#pragma unroll 1
        for (int slab = 0; slab < V_SLABS; slab++) {
            if (active) {
                if (slab > 0) __syncwarp();
                state.weigh(P + tx * P_ROW + rg * 4, s, slab);
            }
            const int first = j0 + slab * KEYS;
            slabs.end<KEYS, d, V_ROW>();
            if (slab + 1 < V_SLABS)
                slabs.begin_values(v + (first + KEYS) * v_row, v_row, Nk - first - KEYS);
            else if (j0 + BC < end)
                slabs.begin_keys(k + (j0 + BC) * k_row, k_row, Nk - j0 - BC, 0);
            if (active) accumulate(state.o, P, memory + slabs.now, tx, rg);
        }
    }
    state.write(call, block.head, place);
}
