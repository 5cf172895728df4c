// The shape contract of every part, and what kernels share. No torch header: the kernels build alone.
//
//   out = softmax(scale * q k^T) v        per batch and head, float32
//
// q (B, H, Nq, d); k, v (B, H, Nk, d): strided, the last dimension contiguous. Exception: part 4, for up to FEW
// queries, also takes k transposed, either as one matrix (row_stride 1) or as consecutive panels of Bc keys,
// each (d, Bc) and padded (row_stride d, col_stride Bc). out (B, H, Nq, d), lse (B, H, Nq) or null: contiguous.
// causal: query i sees the keys j <= i + (Nk - Nq); Nq <= Nk.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd/simd.h"
#include "threads.h"

struct Matrices {  // one (N, d) matrix per batch and head; strides in floats
    const float* data;
    int64_t batch_stride, head_stride, row_stride, col_stride;

    const float* at(int64_t b, int64_t h) const { return data + b * batch_stride + h * head_stride; }
};

struct Attention {
    int64_t B, H, Nq, Nk, d;
    Matrices q, k, v;
    float* out;
    float* lse;
    bool causal;
    float scale;
    int64_t Br, Bc;  // part 4's tile, at most Nq and Nk
    int threads;

    // Number of keys that query i sees: they are 0 .. visible(i) - 1.
    int64_t visible(int64_t i) const { return causal ? i + 1 + (Nk - Nq) : Nk; }

    float* out_at(int64_t b, int64_t h) const { return out + (b * H + h) * Nq * d; }
    float* lse_at(int64_t b, int64_t h) const { return lse ? lse + (b * H + h) * Nq : nullptr; }
};

// Up to so many queries part 4 takes one at a time, with lanes that span keys.
constexpr int64_t FEW = 3;

// n rounded up to a multiple of `unit`.
constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What exp subtracts: the row's maximum, or 0 where every score was -inf (-inf - -inf would be NaN).
inline float finite_max(float m) { return m == -std::numeric_limits<float>::infinity() ? 0.0f : m; }

// row[0 .. n-1] <- softmax(row), with its maximum subtracted; returns the logarithm of the normaliser.
inline float softmax_row(float* row, int64_t n) {
    const float m = simd::row_max(row, n, -std::numeric_limits<float>::infinity());
    const float l = simd::exp_sum(row, n, finite_max(m));  // row <- exp(row - m)
    simd::scale_row(row, n, 1 / l);
    return m + std::log(l);
}
