// Memory that lives for a call.
#pragma once

#include <cstdint>

#include "round_up.h"
#include "simd/matrix.h"

constexpr int64_t LINE_FLOATS = 16;  // floats of a cache line

// The stride of rows of n floats: an odd number of cache lines. With a power of two the rows would share few
// sets of L1.
constexpr int64_t row_stride(int64_t n) { return round_up(n, LINE_FLOATS) | LINE_FLOATS; }

// Hands out consecutive pieces of a block of memory, each on cache lines of its own. From null it only counts,
// so that a struct states the sizes of its pieces once.
class Scratch {
  public:
    explicit Scratch(float* start = nullptr) : start(start) {}

    float* take(int64_t floats) {
        float* const piece = start ? start + used : nullptr;
        used += round_up(floats, LINE_FLOATS);
        return piece;
    }
    simd::Matrix matrix(int64_t rows, int64_t cols) {
        const int64_t ld = row_stride(cols);
        return {take(rows * ld), ld};
    }
    int64_t taken() const { return used; }

  private:
    float* start;
    int64_t used = 0;
};
