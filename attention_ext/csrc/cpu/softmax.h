// Softmax of one row of scores.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "simd/simd.h"

// What exp subtracts: the row's maximum, or 0 where every score was -inf (-inf - -inf would be NaN).
inline float finite_max(float m) { return m == -std::numeric_limits<float>::infinity() ? 0.0f : m; }

// row[0 .. n-1] <- softmax(row), with its maximum subtracted; returns the logsumexp.
inline float softmax_row(float* row, int64_t n) {
    const float m = simd::row_max(row, n, -std::numeric_limits<float>::infinity());
    const float l = simd::exp_sum(row, n, finite_max(m));  // row <- exp(row - m)
    simd::scale_row(row, n, 1 / l);
    return m + std::log(l);
}
