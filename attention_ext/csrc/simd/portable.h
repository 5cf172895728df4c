// The SIMD helpers in portable C++: helpers.h's, and others for weights, caches, layers and training.
#pragma once

#include <cstdint>

namespace simd {  // matrices are row-major, float32, with any alignment

// The first element of a matrix, and the distance between its rows. from(): its part from a row and column on.
struct ConstMatrix {
    const float* data;
    int64_t ld;

    const float* row(int64_t r) const { return data + r * ld; }
    ConstMatrix from(int64_t r, int64_t c = 0) const { return {row(r) + c, ld}; }
};

struct Matrix {
    float* data;
    int64_t ld;

    float* row(int64_t r) const { return data + r * ld; }
    Matrix from(int64_t r, int64_t c = 0) const { return {row(r) + c, ld}; }
    operator ConstMatrix() const { return {data, ld}; }
};

// A(i, k) is data[i * row_stride + k * depth_stride]. Passed by reference: GCC copies a value to the stack.
struct Strided {
    const float* data;
    int64_t row_stride, depth_stride;
};

}  // namespace simd

namespace portable {

using simd::ConstMatrix, simd::Matrix, simd::Strided;

// Whether blocks for few rows or columns are left out: the page is small, and writes one text at a time.
#if defined(__wasm__)
constexpr bool SMALL = true;
#else
constexpr bool SMALL = false;
#endif

#include "simd/helpers.h"

// A matrix in bfloat16, the upper halves of floats, in pairs: with W = lanes() and j = g W + i, the word
// data[k * ld + j] holds two columns of row k: 2 g W + i in its lower half, (2 g + 1) W + i in its upper half.
struct Bf16Pairs {
    const uint32_t* data;
    int64_t ld;
};

// C[i][c] <- sum_k A[i][k] * B[k][c], or with `add` C[i][c] <- C[i][c] + that sum; cols is a multiple of 2 W.
void multiply_bf16(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add);

// The same for at most FEW_ROWS rows, the fastest where B comes from memory; in float32 cols is a multiple of
// W. after: what is read next, by default what follows B in memory; it may be fetched meanwhile.
constexpr int64_t FEW_ROWS = SMALL ? 0 : 8;
void multiply_few(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add,
                  const void* after = nullptr);
void multiply_few(Matrix C, ConstMatrix A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth, bool add,
                  const void* after = nullptr);

// o <- o + sum_j p[j] * B[j]; cols is a multiple of 2 W.
void add_weighted_rows(float* o, const float* p, Bf16Pairs B, int64_t rows, int64_t cols);

// O[i] <- O[i] + sum_j P[i][j] * B[j] for j < min(n, first + i), first > 0, with add_weighted_rows()'s bits.
void add_weighted_few(Matrix O, ConstMatrix P, ConstMatrix B, int64_t rows, int64_t n, int64_t first,
                      int64_t cols);
void add_weighted_few(Matrix O, ConstMatrix P, Bf16Pairs B, int64_t rows, int64_t n, int64_t first,
                      int64_t cols);

// INT8_GROUP weights of an output share a scale. An activation is an integer of INT8_BITS bits: plus half of
// 2^INT8_BITS it is three digits of 7 bits, which any dot product of bytes takes.
constexpr int64_t INT8_GROUP = 128;
constexpr int INT8_BITS = 21;

// Whether the two upper digits are one number of 14 bits instead.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool INT8_PAIRS = true;
#else
constexpr bool INT8_PAIRS = false;
#endif

// Rows of INT8_BITS-bit integers: int8_blocks(n) words of the highest, the middle, the lowest digits; a
// scale, a power of 2. Byte j of word k is of number 4 k + j. With INT8_PAIRS the first words hold the upper
// 14 bits of numbers 4 k and 4 k + 2, the second those of 4 k + 1 and 4 k + 3.
struct FixedRows {
    const uint32_t* data;
    int64_t ld;
};

// A matrix (depth, cols) in int8. A group of INT8_GROUP rows has a row of initial sums, -64 times the
// weights' sum; a row of scales; and a row for each four of the matrix, byte j the j-th, 0 after the last.
struct Int8Panel {
    const uint32_t* data;
    int64_t ld;
};

constexpr int64_t int8_blocks(int64_t depth) { return (depth + 3) / 4; }
constexpr int64_t int8_groups(int64_t depth) { return (depth + INT8_GROUP - 1) / INT8_GROUP; }
constexpr int64_t fixed_words(int64_t n) { return /* digits */ 3 * int8_blocks(n) + /* scale */ 1; }

// row (fixed_words(n)) <- x (n), n > 0, rounded, ties to even; with NaN or infinity the scale is NaN.
void to_fixed(uint32_t* row, const float* x, int64_t n);

// C <- A B, or with `add` C + A B; cols is a multiple of W. The sums within a group are exact.
void multiply_int8(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t depth, bool add);

// PyTorch's epsilon, added to the variance.
constexpr float LAYER_NORM_EPSILON = 1e-5f;

// y[i] <- (x[i] - mean) / sqrt(variance + LAYER_NORM_EPSILON) * weight[i] + bias[i]; n > 0, bias may be null
void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n);

// x[i] <- x[i] Phi(x[i]), the exact GELU; Phi is the normal distribution function.
void gelu(float* x, int64_t n);

// x[i] <- x[i] (1 + tanh(sqrt(2 / pi) (x[i] + 0.044715 x[i]^3))) / 2, as in arXiv:1606.08415
void gelu_tanh(float* x, int64_t n);

// y[i] <- gelu(x[i]); dx[i] <- dx[i] * gelu'(x[i]), where gelu'(x) = Phi(x) + x Phi'(x)
void gelu_gradient(float* dx, float* y, const float* x, int64_t n);

// The gradient of a softmax down each column c of S (rows, cols) with logsumexp lse[c] + rest[c], in units of
// log(2). The live rows are those of online_softmax(); below them at most the first W rows are set.
//   S[j][c]  <- 2^(S[j][c] - lse[c] - rest[c]), at most 1
//   dP[j][c] <- S[j][c] * (dP[j][c] - D[c])
// cols is a multiple of lanes().
void softmax_gradient(Matrix S, Matrix dP, int64_t rows, int64_t cols, int64_t first, const float* lse,
                      const float* rest, const float* D);

}  // namespace portable
