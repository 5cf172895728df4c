// LayerNorm without its weight, which the next packed matrix includes, and its backward pass, row by row.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd/portable.h"

namespace training {

// The sum of term(i) over 0 .. n - 1, in independent sums that fill a vector.
template <class Term>
inline float sum_of(int64_t n, const Term& term) {
    constexpr int64_t LANES = 16;
    float sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += term(i + lane);
    for (int64_t lane = 0; i < n; i++, lane++) sums[lane] += term(i);
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

// y <- (x - mean) / sqrt(variance + epsilon); returns 1 / that root.
inline float normalize(float* y, const float* x, int64_t n) {
    const float count = static_cast<float>(n);
    const float mean = sum_of(n, [x](int64_t i) { return x[i]; }) / count;
    const float variance = sum_of(n, [x, mean](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / count;
    const float factor = 1 / std::sqrt(variance + portable::LAYER_NORM_EPSILON);
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * factor;
    return factor;
}

// dx <- before + factor * (dy - mean(dy) - y * mean(dy * y)), with y and the factor of normalize().
inline void normalize_backward(float* dx, const float* before, const float* dy, const float* y, float factor,
                               int64_t n) {
    const float count = static_cast<float>(n);
    const float mean = sum_of(n, [dy](int64_t i) { return dy[i]; }) / count;
    const float along = sum_of(n, [dy, y](int64_t i) { return dy[i] * y[i]; }) / count;
    for (int64_t i = 0; i < n; i++)
        dx[i] = (before ? before[i] : 0.0f) + factor * (dy[i] - mean - y[i] * along);
}

}  // namespace training
