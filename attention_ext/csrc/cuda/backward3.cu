// The backward pass in bfloat16 and float16: the tensor cores with mma.sync, tiles by asynchronous copies.
//
// Shapes: bf16 and fp16; d is a multiple of 8 up to 256; pointers and strides are multiples of 16 bytes.
// Improves on backward1: an instruction of the tensor cores does 2,048 multiply-adds, and P and dS stay in the
//     registers that a product takes its left operand from.
// Bound: the tensor cores, and shared memory at d = 128.
#include "backward_tiles.h"

template <class Rows, int M, int N>
__device__ inline void scores(float (&S)[M][N][4], const Rows& X, unsigned z) {
    UNROLLED(slice, SLICES) {
        unsigned x[M][4];
        UNROLLED(i, M) X.get(x[i], i, slice);
        UNROLLED(pair, N / 2) {
            unsigned b[4];
            load_matrices(b, z + pair * 16 * STRIDE + slice * 32);
            UNROLLED(half, 2)
                UNROLLED(i, M) multiply_16bit(S[i][2 * pair + half], x[i], b[2 * half], b[2 * half + 1]);
        }
    }
}

template <int M, int N>
__device__ inline void add_product(float (&sums)[M][WIDTH / 8][4], const unsigned (&A)[M][N][4], unsigned z) {
    UNROLLED(rows, N)
        UNROLLED(pair, SLICES) {
            unsigned b[4];
            load_transposed(b, z + rows * 16 * STRIDE + pair * 32);
            UNROLLED(half, 2)
                UNROLLED(i, M)
                    multiply_16bit(sums[i][2 * pair + half], A[i][rows], b[2 * half], b[2 * half + 1]);
        }
}
