// Split for five to sixteen queries in 16 bits: the tensor cores multiply. split.cu includes it with TENSOR.
//
// A warp takes STRIP keys of the split at a time, with the tile of 16 queries of mma.sync (mma.h: which lanes
// hold what). K and V go from global memory to the registers that the products read, without shared memory:
//     K  the sum over d may take any order, so lane 4 g + t has 8 neighbouring columns of key g, from 8 t on
//     V  lane 4 g + t has 2 VW neighbouring columns of the keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, from 2 VW g
//     on.
//        prmt pairs those of two keys; the n-th of them is column g of the product's n-th tile.
#pragma once
#include "mma.h"

constexpr int UNITS = STRIP / 16;            // of 16 keys
constexpr int K_LOADS = WIDTH / 32;          // of a lane for 8 keys
constexpr int VW = WIDTH % 64 == 0 ? 4 : 2;  // words of a lane's load of V
constexpr int V_LOADS = WIDTH / (16 * VW);   // of a lane for each of its keys
static_assert(BR == 16 && WIDTH % 32 == 0 && STRIP % 16 == 0);

__device__ inline void load_words(unsigned (&x)[4], const Element* from, bool exists) {
    x[0] = x[1] = x[2] = x[3] = 0;
    if (exists)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "l"(from));
}
__device__ inline void load_words(unsigned (&x)[2], const Element* from, bool exists) {
    x[0] = x[1] = 0;
    if (exists)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(x[0]), "=r"(x[1])
                     : "l"(from));
}

// The keys from j0 on and their values, of a warp.
struct Strip {
    unsigned K[UNITS][2][K_LOADS][4], V[UNITS][4][V_LOADS][VW];

    __device__ inline void load_keys(const Element* k, long long row, int j0, int end) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(u, UNITS)
            UNROLLED(n, 2) {
                const int j = j0 + 16 * u + 8 * n + g;
                UNROLLED(b, K_LOADS)
                    load_words(K[u][n][b], k + j * row + 32 * b + 8 * t, j < end && 32 * b + 8 * t < d);
            }
    }
    __device__ inline void load_values(const Element* v, long long row, int j0, int end) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLLED(u, UNITS)
            UNROLLED(n, 4) {
                const int j = j0 + 16 * u + 2 * t + n % 2 + n / 2 * 8;
                UNROLLED(b, V_LOADS)
                    load_words(V[u][n][b], v + j * row + (8 * b + g) * 2 * VW,
                               j < end && (8 * b + g) * 2 * VW < d);
            }
    }
};

// All strips of the warp, from `start` on, every `apart` keys. Query i sees the keys below min(end, sees + i).
// o (16, WIDTH), m and l (16): the warp's results.
__device__ inline void attend_strips(const Element* q, long long q_row, int queries, const Element* k,
                                     long long k_row, const Element* v, long long v_row, int start, int apart,
                                     int end, int sees, float scale, float (*o)[WIDTH], float* m_out,
                                     float* l_out) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Strip strip;
    strip.load_keys(k, k_row, start, end);
    strip.load_values(v, v_row, start, end);
    unsigned Q[K_LOADS][2][4];  // two products of 16 columns
    UNROLLED(b, K_LOADS)
        UNROLLED(h, 2) {
            unsigned x[4];
            load_words(x, q + (g + 8 * h) * q_row + 32 * b + 8 * t, g + 8 * h < queries && 32 * b + 8 * t < d);
            UNROLLED(e, 4) Q[b][e / 2][h + e % 2 * 2] = x[e];
        }
    float O[V_LOADS][2 * VW][4] = {}, m[2] = {-INF, -INF}, l[2] = {};

    for (int j0 = start; j0 < end; j0 += apart) {
        // S <- Q K^T
        float S[UNITS][2][4] = {};
        UNROLLED(u, UNITS)
            UNROLLED(b, K_LOADS)
                UNROLLED(part, 2)
                    UNROLLED(n, 2)
                        multiply_16bit(S[u][n], Q[b][part], strip.K[u][n][b][2 * part],
                                       strip.K[u][n][b][2 * part + 1]);
        strip.load_keys(k, k_row, j0 + apart, end);

        // m <- max(m, rowmax(S)), P <- 2^(scale S - m), l <- l + rowsum(P)
        const bool masked = j0 + STRIP > min(end, sees);
        unsigned P[UNITS][4];
        float top[2];
        UNROLLED(h, 2) {
            top[h] = m[h];
            UNROLLED(u, UNITS)
                UNROLLED(n, 2)
                    UNROLLED(e, 2) {
                        float& s = S[u][n][2 * h + e];
                        s *= scale;
                        if (masked && j0 + 16 * u + 8 * n + 2 * t + e >= min(end, sees + g + 8 * h)) s = -INF;
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
                    UNROLLED(n, 2 * VW) O[b][n][2 * h] *= shrink, O[b][n][2 * h + 1] *= shrink;
            }
        }
        UNROLLED(u, UNITS)
            UNROLLED(n, 2)
                UNROLLED(h, 2) {
                    const float less = subtrahend(m[h]);
                    const float p0 = exp2_approx(S[u][n][2 * h] - less),
                                p1 = exp2_approx(S[u][n][2 * h + 1] - less);
                    l[h] += p0 + p1;
                    P[u][2 * n + h] = pack(p0, p1);
                }

        // O <- O + P V
        UNROLLED(u, UNITS)
            UNROLLED(b, V_LOADS)
                UNROLLED(n, 2 * VW) {
                    const unsigned halves = n % 2 ? 0x7632 : 0x5410;
                    auto& V = strip.V[u];
                    multiply_16bit(O[b][n], P[u], __byte_perm(V[0][b][n / 2], V[1][b][n / 2], halves),
                                   __byte_perm(V[2][b][n / 2], V[3][b][n / 2], halves));
                }
        strip.load_values(v, v_row, j0 + apart, end);
    }

    UNROLLED(h, 2) {
        l[h] = sum<1, 4>(l[h]);
        if (t == 0) m_out[g + 8 * h] = m[h], l_out[g + 8 * h] = l[h];
        UNROLLED(b, V_LOADS)
            UNROLLED(e, 2)
                UNROLLED(n, 2 * VW) o[g + 8 * h][(8 * b + 2 * t + e) * 2 * VW + n] = O[b][n][2 * h + e];
    }
}
