// The SIMD helpers under every part: an interface with interchangeable implementations.
//
// Matrices are row-major unless strides are given; ld* is the distance between rows, in floats. No
// alignment is required, no element outside the given sizes is read or written, NaN in gives NaN out.
#pragma once

#include <cstdint>

namespace simd {

// Floats in a vector; the number of columns, a multiple, and of rows that the products below take at a time.
int64_t lanes();
int64_t panel();
int64_t rows();

// Which implementation this is, for people to read.
const char* name();

// T[c][r] <- scale * X[r][c]                      T (cols, rows), X (rows, cols)
void transpose(float* T, int64_t ldT, const float* X, int64_t ldX, int64_t rows, int64_t cols, float scale);

// C[i][c] <- sum_k A(i, k) * B[k][c]              C (rows, cols), B (depth, cols), none of them empty
// A(i, k) is A[i * row_stride + k * depth_stride], broadcast; the lanes span the columns of B and C.
void multiply(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride, const float* B,
              int64_t ldB, int64_t rows, int64_t cols, int64_t depth);

// C[i][c] <- C[i][c] + sum_k A(i, k) * B[k][c]    for k < first + c
// Column c takes only the first + c first of the products, first >= 0: the staircase of a causal mask.
// With first >= depth it takes all.
void multiply_add(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                  const float* B, int64_t ldB, int64_t rows, int64_t cols, int64_t depth, int64_t first);

// The same as multiply, or with `add` C <- C + A B, for B in bfloat16, the upper halves of floats, in pairs:
// B[k][j] holds of row k, with W = lanes(), j = g W + i, column 2 g W + i in its lower half and column
// (2 g + 1) W + i in its upper half. cols is a multiple of 2 W, A's features are contiguous.
void multiply_bf16(float* C, int64_t ldC, const float* A, int64_t ldA, const uint32_t* B, int64_t ldB,
                   int64_t rows, int64_t cols, int64_t depth, bool add);

// s[j] <- scale * x . B[j]                        s (rows), x (depth), B (rows, depth)
void dot_rows(float* s, const float* x, const float* B, int64_t ldB, int64_t rows, int64_t depth, float scale);

// o <- o + sum_j p[j] * B[j]                      o (cols), p (rows), B (rows, cols)
void add_weighted_rows(float* o, const float* p, const float* B, int64_t ldB, int64_t rows, int64_t cols);

// The largest of m and x[0 .. n-1], NaN ignored.
float row_max(const float* x, int64_t n, float m);

// x[i] <- exp(x[i] - m), where x[i] <= m; returns their sum.
float exp_sum(float* x, int64_t n, float m);

// y[i] <- (x[i] - mean) / sqrt(variance + 1e-5) * weight[i] + bias[i]; n > 0, bias may be null
void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n);

// x[i] <- x[i] Phi(x[i]), the exact GELU; Phi is the normal distribution function.
void gelu(float* x, int64_t n);

// x[i] <- a * x[i]
void scale_row(float* x, int64_t n, float a);

// One step of the online softmax down each column c of S (rows, cols), whose live rows are its first
// `first + c`, at most all; the others are not read, and left or set to 0. Scores are in units of log(2),
// because a power of 2 costs less than exp.
//   m'            <- max(m[c], S[j][c]) over the live rows j, or m[c] where that is at most 8 less
//   S[j][c]       <- 2^(S[j][c] - m')
//   correction[c] <- 2^(m[c] - m')
//   l[c]          <- correction[c] * l[c] + sum_j S[j][c], NaN if a live score is
//   m[c]          <- m'
// A maximum that lags leaves a factor, at most 2^8, in S and l; it cancels in S / l, and m moves, with all that
// was scaled by it, a few times instead of almost always. cols is a multiple of lanes().
// Returns whether any correction is not 1.
bool online_softmax(float* S, int64_t ldS, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction);

// C[i][c] <- a[c] * C[i][c]                       C (rows, cols), a (cols)
void scale_columns(float* C, int64_t ldC, int64_t rows, int64_t cols, const float* a);

}  // namespace simd
