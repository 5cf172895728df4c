// The SIMD helpers under every part: an interface with interchangeable implementations.
//
// Matrices are row-major; ld* is the distance between rows, in floats. No alignment is required, no
// element outside the given sizes is read or written, and NaN in gives NaN out.
#pragma once

#include <cstdint>

namespace simd {

// S[i][j] <- scale * sum_c A[i][c] * B[j][c]           S (rows, cols), A (rows, depth), B (cols, depth)
void multiply_transposed(float* S, int64_t ldS, const float* A, int64_t ldA, const float* B, int64_t ldB,
                         int64_t rows, int64_t cols, int64_t depth, float scale);

// C[i][c] <- C[i][c] + sum_j A[i][j] * B[j][c]         C (rows, cols), A (rows, depth), B (depth, cols)
void multiply_add(float* C, int64_t ldC, const float* A, int64_t ldA, const float* B, int64_t ldB, int64_t rows,
                  int64_t cols, int64_t depth);

// The largest of m and x[0 .. n-1], NaN ignored.
float row_max(const float* x, int64_t n, float m);

// x[i] <- exp(x[i] - m), where x[i] <= m; returns their sum.
float exp_sum(float* x, int64_t n, float m);

// x[i] <- a * x[i]
void scale_row(float* x, int64_t n, float a);

// Which implementation this is, for people to read.
const char* name();

}  // namespace simd
