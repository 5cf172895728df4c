// The backward pass in float32 on the tensor cores with mma.sync, as three products of tf32 parts.
//
// Shapes: float32; d is a multiple of 8 up to 256; pointers and strides are multiples of 16 bytes.
// Improves on backward1: an instruction of the tensor cores does 1,024 multiply-adds. x = high + low, and x y
//     = high high + high low + low high, as in kernel5_tf32.cu, whose orders of columns and rows this takes.
//     The tensor cores round sums towards zero, so only sums of 32 columns or one chunk of rows are left to
//     them.
// Bound: the tensor cores and the splitting.
#include "backward_tiles.h"

// T <- T + A B, n tiles of 8 columns: products of the low parts first. b: of each tile, at 2 * slice.
template <int M, int N, class B>
__device__ inline void multiply_split(float (&T)[M][N][4], const unsigned (&a)[M][4], const B& b) {
    unsigned high[M][4], low[M][4];
    UNROLLED(i, M) split(a[i], high[i], low[i]);
    UNROLLED(part, 3)
        UNROLLED(n, N)
            UNROLLED(i, M)
                multiply_tf32(T[i][n], part ? high[i] : low[i], b(n, 0, part == 1), b(n, 1, part == 1));
}

template <class Rows, int M, int N>
__device__ inline void scores(float (&S)[M][N][4], const Rows& X, unsigned z) {
    constexpr int GROUP = N % 4 ? 2 : 4;  // tiles of 8 scores that share a left operand
    UNROLLED(block, WIDTH / 32)
        UNROLLED(group, N / GROUP) {
            float T[M][GROUP][4] = {};
            UNROLLED(half, 2) {
                unsigned high[GROUP][4], low[GROUP][4];
                UNROLLED(n, GROUP) {
                    load_shared(high[n], z + (group * GROUP + n) * 8 * STRIDE + block * 128 + half * 16);
                    split(high[n], high[n], low[n]);
                }
                UNROLLED(slice, 2) {
                    unsigned a[M][4];
                    UNROLLED(i, M) X.get(a[i], i, block * 4 + half * 2 + slice);
                    multiply_split(
                        T, a, [&](int n, int e, bool lower) { return (lower ? low : high)[n][2 * slice + e]; });
                }
            }
            UNROLLED(n, GROUP)
                UNROLLED(i, M)
                    UNROLLED(e, 4) {
                        float& s = S[i][group * GROUP + n][e];
                        s = block ? s + T[i][n][e] : T[i][n][e];
                    }
        }
}

template <int M, int N>
__device__ inline void add_product(float (&sums)[M][WIDTH / 8][4], const unsigned (&A)[M][N][4], unsigned z) {
    UNROLLED(block, WIDTH / 32) {
        float T[M][4][4] = {};
        UNROLLED(rows, N) {
            unsigned a[M][4], high[2][4], low[2][4];
            UNROLLED(i, M)
                UNROLLED(e, 4) a[i][e] = A[i][rows][e / 2 + e % 2 * 2];
            UNROLLED(j, 2) {
                load_shared(high[j], z + (rows * 8 + j) * STRIDE + block * 128);
                split(high[j], high[j], low[j]);
            }
            multiply_split(T, a, [&](int n, int e, bool lower) { return (lower ? low : high)[e][n]; });
        }
        UNROLLED(n, 4)
            UNROLLED(i, M)
                UNROLLED(e, 4) sums[i][block * 4 + n][e] += T[i][n][e];
    }
}
