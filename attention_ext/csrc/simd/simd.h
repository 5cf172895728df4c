// The SIMD helpers under every part: one interface, several implementations.
//
// Matrices are row-major. No alignment is required. No element outside of the given sizes is read or written.
// NaN in gives NaN out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/constants.h"

namespace simd {

// The first element of a matrix, and the distance between its rows in elements.
struct Matrix {
    float* data;
    int64_t ld;
};

struct ConstMatrix {
    const float* data;
    int64_t ld;
};

// The left operand of a product: A(i, k) is data[i * row_stride + k * depth_stride].
// Passed by reference: GCC copies it to the stack so that the callee waits for it, 2 % of a decoder's step.
struct Strided {
    const float* data;
    int64_t row_stride, depth_stride;
};

// A matrix in bfloat16, the upper halves of floats, in pairs: with W = lanes() and j = g W + i, data[k * ld +
// j] holds of row k column 2 g W + i in its lower half and column (2 g + 1) W + i in its upper half.
struct Bf16Pairs {
    const uint32_t* data;
    int64_t ld;
};

// Rows of activations as whole numbers of SIMD_INT8_BITS bits, with a scale, a power of 2, for each row. To a
// number 2^(SIMD_INT8_BITS - 1) is added, which makes it three digits of 7 bits. A row has int8_blocks(n) words
// of the highest digits, as many of the middle ones and of the lowest, and the scale. Byte j of word k belongs
// to number 4 k + j.
struct FixedRows {
    const uint32_t* data;
    int64_t ld;
};

// A matrix (depth, cols) in int8, with a scale for each column and group of SIMD_INT8_GROUP rows. Of each group
// there is a row of words for what the highest digits' sums start from, which is -64 times the sum of the
// weights; one for the scales; and one for each four rows of the matrix, byte j of the j-th of them, 0 behind
// the last.
struct Int8Panel {
    const uint32_t* data;
    int64_t ld;
};

constexpr int64_t int8_blocks(int64_t depth) { return (depth + 3) / 4; }
constexpr int64_t int8_groups(int64_t depth) { return (depth + SIMD_INT8_GROUP - 1) / SIMD_INT8_GROUP; }
constexpr int64_t fixed_words(int64_t n) { return /* digits */ 3 * int8_blocks(n) + /* scale */ 1; }

// Floats in a vector. The products below are fastest for a multiple of panel() columns and of rows() rows.
int64_t lanes();
int64_t panel();
int64_t rows();

// The name of the implementation, for people.
const char* name();

// Instructions that online_softmax takes for a vector of scores, without loads and stores; 0 if it has no
// vectors.
int64_t softmax_instructions();

// Whether the kernels may also use instructions that multiply tiles of matrices.
bool may_use_tiles();

// T[c][r] <- scale * X[r][c]                      T (cols, rows), X (rows, cols)
void transpose(Matrix T, ConstMatrix X, int64_t rows, int64_t cols, float scale);

// C[i][c] <- sum_k A(i, k) * B[k][c]              C (rows, cols), B (depth, cols), none of them empty
// A(i, k) is broadcast; the lanes span the columns of B and C.
void multiply(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth);

// C[i][c] <- C[i][c] + sum_k A(i, k) * B[k][c]    for k < first + c
// Column c takes only the first `first + c` products, first >= 0: the staircase of a causal mask.
// With first >= depth it takes all.
void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first);

// C[i][c] <- sum_k A[i][k] * B[k][c], or with `add` C[i][c] <- C[i][c] + that sum; cols is a multiple of 2 W.
void multiply_bf16(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add);

// row (fixed_words(n)) <- x (n), n > 0, as FixedRows describes: the nearest whole numbers, ties to even. The
// largest has SIMD_INT8_BITS - 1 bits and a sign; with NaN or infinity in x the scale is NaN.
void to_fixed(uint32_t* row, const float* x, int64_t n);

// C[i][c] <- sum_k A[i][k] * B[k][c], or with `add` C[i][c] <- C[i][c] + that sum; cols is a multiple of W. The
// sums within a group are exact.
void multiply_int8(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t depth, bool add);

// s[j] <- scale * x . B[j]                        s (rows), x (depth), B (rows, depth)
void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale);

// o <- o + sum_j p[j] * B[j]                      o (cols), p (rows), B (rows, cols)
void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols);

// The same; cols is a multiple of 2 W.
void add_weighted_rows_bf16(float* o, const float* p, Bf16Pairs B, int64_t rows, int64_t cols);

// The largest of m and x[0 .. n-1]; NaN is ignored.
float row_max(const float* x, int64_t n, float m);

// x[i] <- exp(x[i] - m), or 0 where that would be denormal, where x[i] <= m; returns their sum.
float exp_sum(float* x, int64_t n, float m);

// y[i] <- (x[i] - mean) / sqrt(variance + SIMD_LAYER_NORM_EPSILON) * weight[i] + bias[i]; n > 0, bias may be
// null
void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n);

// x[i] <- x[i] Phi(x[i]), the exact GELU; Phi is the normal distribution function.
void gelu(float* x, int64_t n);

// y[i] <- gelu(x[i]); dx[i] <- dx[i] * gelu'(x[i]), where gelu'(x) = Phi(x) + x Phi'(x)
void gelu_gradient(float* dx, float* y, const float* x, int64_t n);

// x[i] <- a * x[i]
void scale_row(float* x, int64_t n, float a);

// One step of the online softmax down each column c of S (rows, cols). The live rows of column c are its first
// `first + c`, at most all; the others are not read, and left as they are or set to 0. Scores are in units of
// log(2), because a power of 2 costs less than exp.
//   m'            <- max(m[c], S[j][c]) over the live rows j, or m[c] where that is at most SIMD_MAX_LAG less
//   S[j][c]       <- 2^(S[j][c] - m')
//   correction[c] <- 2^(m[c] - m')
//   l[c]          <- correction[c] * l[c] + sum_j S[j][c], NaN if a live score is
//   m[c]          <- m'
// A maximum that lags leaves a factor of at most 2^SIMD_MAX_LAG in S and l, which cancels in S / l. In return m
// seldom moves, and what was scaled by it is seldom corrected. cols is a multiple of lanes().
// Returns whether any correction is not 1.
bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l, float* correction);

// The gradient of a softmax down each column c of S (rows, cols) whose logsumexp is lse[c] + rest[c], all in
// units of log(2); the rest is what rounding took. Live rows and the others as above, where only the first W
// rows after a column's live ones may be set.
//   S[j][c]  <- 2^(S[j][c] - lse[c] - rest[c]), at most 1
//   dP[j][c] <- S[j][c] * (dP[j][c] - D[c])
// cols is a multiple of lanes().
void softmax_gradient(Matrix S, Matrix dP, int64_t rows, int64_t cols, int64_t first, const float* lse,
                      const float* rest, const float* D);

// C[i][c] <- a[c] * C[i][c]                       C (rows, cols), a (cols)
void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a);

// e^x, or 0 where that would be denormal.
inline float exp_or_zero(float x) { return x < SIMD_EXP_LEAST ? 0.0f : std::exp(x); }

// A row whose largest magnitude is `largest` times `factor`, a power of 2, is whole numbers of SIMD_INT8_BITS
// bits; `scale` is 1 / factor, or NaN if `largest` is infinite or NaN.
struct Int8Scale {
    float factor, scale;

    explicit Int8Scale(float largest) {
        constexpr uint32_t FRACTION = 23, INF = 0xffu << FRACTION;  // of a float: its fraction's bits
        constexpr uint32_t KEPT = SIMD_INT8_BITS - 2;               // fraction bits of the largest number
        uint32_t bits;
        std::memcpy(&bits, &largest, sizeof bits);
        // Of the largest as it is rounded, which may be up to a power of 2. A tiny row's is larger than that,
        // so that its scale is not denormal.
        const uint32_t exponent = std::max((bits + (1u << (FRACTION - 1 - KEPT))) >> FRACTION, KEPT + 1);
        const uint32_t to_factor = (254 + KEPT - exponent) << FRACTION;
        const uint32_t to_scale = bits < INF ? (exponent - KEPT) << FRACTION : INF + 1;
        std::memcpy(&factor, &to_factor, sizeof factor);
        std::memcpy(&scale, &to_scale, sizeof scale);
    }
};

}  // namespace simd
