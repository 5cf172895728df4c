// Split on the tensor cores, for five to sixteen queries, and in 16 bits for three and four. split.cu includes
// it with TENSOR. float32 and bfloat16 need sm_80, float16 sm_75.
//
// A warp takes STRIP keys at a time, with a tile of 16 queries (mma.h: which lanes hold what). K and V go from
// global memory to the registers that the products read, without shared memory. SHARERS warps share a strip,
// each with an equal part of the columns where the registers of one would spill; they exchange their parts of S
// in the memory that O takes at the end.
//
// A sum may take any order, so lane 4 g + t loads neighbouring numbers: of K those of key g, of V those of some
// keys, which stand for column g of as many tiles.
//     16 bits  8 columns of K from 8 t on, for two products; V of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, which
//              prmt pairs
//     float32  4 columns of K from 4 t on, for two products; V of keys 2 t and 2 t + 1. Three products of tf32
//              parts; only short sums are left to the tensor cores (kernel5_tf32.cu)
//
// Macros of its own, by cuda/tiles.py: STRIP; Q_ROW, bytes of a query row, an odd multiple of 64 (banks).
#pragma once
#include "mma.h"

constexpr bool TF32 = FORMAT == FP32;
constexpr int COLUMNS = WIDTH / SHARERS;                     // of a warp
constexpr int SIZE = sizeof(Element), UNIT = TF32 ? 8 : 16;  // keys of a product of P and V
constexpr int UNITS = STRIP / UNIT, TILES = UNIT / 8;        // of S, for a unit
constexpr int K_WIDE = 16 / SIZE, K_LOADS = COLUMNS / (4 * K_WIDE);
constexpr int VW = TF32 || COLUMNS % 64 == 0 ? 4 : 2;  // words of a lane's load of V
constexpr int V_WIDE = VW * 4 / SIZE, V_LOADS = COLUMNS / (8 * V_WIDE), V_KEYS = UNIT / 4;
static_assert(BR == 16 && COLUMNS % 32 == 0 && STRIP % UNIT == 0);

__device__ inline void load_words(unsigned (&x)[2], const Element* from, bool exists) {
    x[0] = x[1] = 0;
    if (exists)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(x[0]), "=r"(x[1])
                     : "l"(from));
}

// A warp's columns, from `first` on, of the keys from j0 on and of their values.
struct Strip {
    unsigned K[UNITS][TILES][K_LOADS][4], V[UNITS][V_KEYS][V_LOADS][VW];

    __device__ inline void load_keys(const Span& span, int j0, int first) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(u, UNITS)
            UNROLLED(n, TILES) {
                const int j = j0 + UNIT * u + 8 * n + g;
                UNROLLED(b, K_LOADS) {
                    const int c = first + (4 * b + t) * K_WIDE;
                    load_words(K[u][n][b], span.k + j * span.k_row + c, j < span.end && c < d);
                }
            }
    }
    __device__ inline void load_values(const Span& span, int j0, int first) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(u, UNITS)
            UNROLLED(n, V_KEYS) {
                const int j = j0 + UNIT * u + 2 * t + n % 2 + n / 2 * 8;
                UNROLLED(b, V_LOADS) {
                    const int c = first + (8 * b + g) * V_WIDE;
                    load_words(V[u][n][b], span.v + j * span.v_row + c, j < span.end && c < d);
                }
            }
    }
};

using Scores = float[UNITS][TILES][4];
using Output = float[V_LOADS][V_WIDE][4];

#if FORMAT == FP32
// c += a b in three products
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    unsigned a_high[4], a_low[4], b_high[2], b_low[2];
    split(a, a_high, a_low);
    split(__uint_as_float(b0), b_high[0], b_low[0]);
    split(__uint_as_float(b1), b_high[1], b_low[1]);
    multiply_tf32(c, a_low, b_high[0], b_high[1]);
    multiply_tf32(c, a_high, b_low[0], b_low[1]);
    multiply_tf32(c, a_high, b_high[0], b_high[1]);
}
#else
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_16bit(c, a, b0, b1);
}
#endif

// S <- Q K^T. q: where the lane reads the queries.
__device__ inline void scores(Scores& S, unsigned q, const Strip& strip) {
    UNROLLED(b, K_LOADS) {
        unsigned x[4], y[4];
        reload_shared(x, q + b * 64), reload_shared(y, q + b * 64 + 8 * Q_ROW);
        const unsigned Q[2][4] = {{x[0], y[0], x[1], y[1]}, {x[2], y[2], x[3], y[3]}};
        UNROLLED(u, UNITS)
            UNROLLED(n, TILES) {
                const unsigned (&k)[4] = strip.K[u][n][b];
                float T[4] = {};  // of 16 columns in float32
                UNROLLED(part, 2) multiply(TF32 ? T : S[u][n], Q[part], k[2 * part], k[2 * part + 1]);
                if (TF32)
                    UNROLLED(e, 4) S[u][n][e] += T[e];
            }
    }
}

// Waits for the warp that shares the strip.
__device__ inline void meet_sharer() { meet_pair(1 + threadIdx.x / 64); }

// S <- S + S of the warp with the other columns. turn alternates: no buffer is overwritten before it is read.
using Exchange = float4[2][2][UNITS * TILES][32];
static_assert(SHARERS == 1 || (SHARERS == 2 && sizeof(Exchange) <= sizeof(float[BR][WIDTH])));
__device__ inline void add_sharer(Scores& S, Exchange& shared, int turn) {
    const int warp = threadIdx.x / 32 % 2, lane = threadIdx.x % 32;
    UNROLLED(n, UNITS * TILES) {
        const float (&s)[4] = S[n / TILES][n % TILES];
        shared[turn][warp][n][lane] = {s[0], s[1], s[2], s[3]};
    }
    meet_sharer();
    UNROLLED(n, UNITS * TILES) {
        const float4 other = shared[turn][1 - warp][n][lane];
        float (&s)[4] = S[n / TILES][n % TILES];
        s[0] += other.x;
        s[1] += other.y;
        s[2] += other.z;
        s[3] += other.w;
    }
}

// O <- O + P V. S has the weights.
__device__ inline void add_values(Output& O, const Scores& S, const Strip& strip) {
    unsigned P[UNITS][4];
    UNROLLED(u, UNITS)
        UNROLLED(e, 4) {
            if (TF32)  // a0 and a2 are keys 2 t and 2 t + 1
                P[u][e] = __float_as_uint(S[u][0][e % 2 * 2 + e / 2]);
            else
                P[u][e] = pack(S[u][(e / 2) % TILES][e % 2 * 2], S[u][(e / 2) % TILES][e % 2 * 2 + 1]);
        }
    UNROLLED(b, V_LOADS)
        UNROLLED(n, V_WIDE) {
            float T[4] = {};  // of the strip's keys in float32
            UNROLLED(u, UNITS) {
                auto& V = strip.V[u];
                if (TF32) {
                    multiply(T, P[u], V[0][b][n % VW], V[1][b][n % VW]);
                } else {
                    const unsigned halves = n % 2 ? 0x7632 : 0x5410;
                    multiply(O[b][n], P[u], __byte_perm(V[0][b][n / 2 % VW], V[1][b][n / 2 % VW], halves),
                             __byte_perm(V[2 % V_KEYS][b][n / 2 % VW], V[3 % V_KEYS][b][n / 2 % VW], halves));
                }
            }
            if (TF32)
                UNROLLED(e, 4) O[b][n][e] += T[e];
        }
}

// The strips of a team. queries: memory for rows of Q_ROW bytes.
__device__ inline void attend_strips(const Span& span, int team, const Result& result, float* queries) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int start = span.start + team * STRIP, end = span.end, sees = span.sees;
    constexpr int APART = TEAMS * STRIP;  // the next strip
    const unsigned q_shared = shared_address(queries);
    Strip strip;
    // The queries first: they would arrive after all of K and V that is under way.
    constexpr int PIECES = BR * WIDTH / K_WIDE, OF_THREAD = (PIECES + THREADS - 1) / THREADS;
    unsigned x[OF_THREAD][4];
    UNROLLED(e, OF_THREAD) {
        const int n = e * THREADS + threadIdx.x, row = n / (WIDTH / K_WIDE), c = n % (WIDTH / K_WIDE);
        load_words(x[e], span.query(row) + c * K_WIDE, row < min(span.rows, BR) && c * K_WIDE < d);
    }
    const int first = threadIdx.x / 32 % SHARERS * COLUMNS;
    strip.load_keys(span, start, first);
    strip.load_values(span, start, first);
    UNROLLED(e, OF_THREAD) {
        const int n = e * THREADS + threadIdx.x, row = n / (WIDTH / K_WIDE), c = n % (WIDTH / K_WIDE);
        if (n < PIECES) store_shared(q_shared + row * Q_ROW + c * 16, x[e]);
    }
    __syncthreads();
    const unsigned q_at = q_shared + g * Q_ROW + first * SIZE + t * 16;
    Output O = {};
    float m[2] = {-INF, -INF}, l[2] = {};
    int turn = 0;

    for (int j0 = start; j0 < end; j0 += APART) {
        Scores S = {};
        scores(S, q_at, strip);
        strip.load_keys(span, j0 + APART, first);
        if (SHARERS > 1) add_sharer(S, *(Exchange*)result.o, turn ^= 1);

        // m <- max(m, rowmax(S)); l and O follow
        const bool masked = RULES ? span.hides(j0, STRIP) : j0 + STRIP > min(end, sees);
        float top[2];
        UNROLLED(h, 2) {
            top[h] = m[h];
#if RULES
            const auto score = [&](int i) -> float& { return S[i / 2 / TILES][i / 2 % TILES][2 * h + i % 2]; };
            UNROLLED(i, STRIP / 4) score(i) *= span.scale;
            if (CHANGES || masked) apply<STRIP / 4>(span.row(g + 8 * h, j0 + 2 * t), score, !masked);
#endif
            UNROLLED(u, UNITS)
                UNROLLED(n, TILES)
                    UNROLLED(e, 2) {
                        float& s = S[u][n][2 * h + e];
#if !RULES
                        const int j = j0 + UNIT * u + 8 * n + 2 * t + e;
                        s = masked && j >= min(end, sees + g + 8 * h) ? -INF : s * span.scale;
#endif
                        top[h] = fmaxf(top[h], s);
                    }
            top[h] = largest<1, 4>(top[h]);
        }
        if (__any_sync(~0u, top[0] != m[0] || top[1] != m[1])) {
            UNROLLED(h, 2) {
                const float shrink = exp2_approx(m[h] - subtrahend(top[h]));
                m[h] = top[h];
                l[h] *= shrink;
                UNROLLED(b, V_LOADS)
                    UNROLLED(n, V_WIDE) O[b][n][2 * h] *= shrink, O[b][n][2 * h + 1] *= shrink;
            }
        }

        // P <- 2^(S - m), l <- l + rowsum(P)
        UNROLLED(u, UNITS)
            UNROLLED(n, TILES)
                UNROLLED(e, 4) {
                    S[u][n][e] = exp2_approx(S[u][n][e] - subtrahend(m[e / 2]));
                    l[e / 2] += S[u][n][e];
                }
        add_values(O, S, strip);
        strip.load_values(span, j0 + APART, first);
    }

    if (SHARERS > 1) meet_sharer();  // it may still read scores from o
    UNROLLED(h, 2) {
        l[h] = sum<1, 4>(l[h]);
        if (t == 0 && first == 0) result.m[g + 8 * h] = m[h], result.l[g + 8 * h] = l[h];
        UNROLLED(b, V_LOADS)
            UNROLLED(e, 2) {
                const int c = first + (8 * b + 2 * t + e) * V_WIDE;
                UNROLLED(n, V_WIDE) result.o[g + 8 * h][c + n] = O[b][n][2 * h + e];
            }
    }
}
