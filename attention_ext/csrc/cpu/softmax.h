// Softmax of one row of scores.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "rules.h"
#include "simd/simd.h"

constexpr float LOW = -std::numeric_limits<float>::infinity();

// What exp subtracts: the row's maximum, or 0 where every score was -inf (-inf - -inf would be NaN).
inline float finite_max(float m) { return m == LOW ? 0.0f : m; }

// What a sink, if `lowest` is one, adds to the sum of a row with maximum m.
inline float sink_weight(float lowest, float m) {
    return lowest > HIDDEN ? simd::exp_or_zero(lowest - finite_max(m)) : 0.0f;
}

// The end of a row's softmax with maximum m and sum l, and a sink in it: the factor of its weights, and its
// logsumexp. A row that sees no key has the maximum HIDDEN.
struct Normalized {
    float factor, lse;

    Normalized(float m, float l) : factor(m == HIDDEN ? 0 : 1 / l), lse(m == HIDDEN ? LOW : m + std::log(l)) {}
};

// row[0 .. n-1] <- softmax(row), with its maximum subtracted; returns the logsumexp. lowest: that of the call.
inline float softmax_row(float* row, int64_t n, float lowest = LOW) {
    const float m = simd::row_max(row, n, lowest);
    const float l = simd::exp_sum(row, n, finite_max(m)) + sink_weight(lowest, m);  // row <- exp(row - m)
    const Normalized end(m, l);
    simd::scale_row(row, n, end.factor);
    return end.lse;
}
