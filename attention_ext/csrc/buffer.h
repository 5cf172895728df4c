// Memory: for weights, caches and activations, and for a call.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "simd/portable.h"

// n rounded up to a multiple of `unit`.
constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

constexpr int64_t LINE_FLOATS = 16;              // floats of a cache line
constexpr int64_t MOST_FLOATS = INT64_MAX / 16;  // their bytes, and the sum of two such numbers, fit 64 bits

[[noreturn]] inline void refuse_size() {
#ifdef __wasm__
    __builtin_trap();  // it has no exceptions, and the page has checked the sizes
#else
    throw std::bad_alloc();
#endif
}

// The product of two sizes. Throws bad_alloc if it is above MOST_FLOATS: no memory has room for as many.
inline int64_t product(int64_t a, int64_t b) {
    if (b != 0 && a > MOST_FLOATS / b) refuse_size();
    return a * b;
}

// The stride of rows of n floats: an odd number of cache lines, so that rows do not share few sets of L1.
constexpr int64_t row_stride(int64_t n) { return round_up(n, LINE_FLOATS) | LINE_FLOATS; }

// Floats, initially 0 unless they are `unset`, aligned to a cache line; large buffers use Linux's huge pages.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t size, bool unset = false) {
        if (size < 0 || size > MOST_FLOATS) refuse_size();
        const int64_t floats = sizeof(float) * size;
        const int64_t unit = floats >= HUGE_PAGE_BYTES / 2 ? HUGE_PAGE_BYTES : CACHE_LINE_BYTES;
        const int64_t bytes = round_up(floats, unit);
        const auto align = static_cast<std::align_val_t>(unit);
        data = {static_cast<float*>(operator new(bytes, align)), Free{align}};
#ifdef MADV_HUGEPAGE
        if (unit == HUGE_PAGE_BYTES) madvise(data.get(), bytes, MADV_HUGEPAGE);
#endif
        if (!unset) std::fill_n(data.get(), size, 0.0f);
    }
    operator float*() const { return data.get(); }

  private:
    static constexpr int64_t CACHE_LINE_BYTES = 64, HUGE_PAGE_BYTES = 2 << 20;
    struct Free {
        std::align_val_t align{};
        void operator()(float* p) const { operator delete(p, align); }
    };
    std::unique_ptr<float, Free> data{nullptr, Free{}};
};

// A call's memory, in pieces aligned to cache lines. From null it only counts the floats.
class Scratch {
  public:
    explicit Scratch(float* start = nullptr) : start(start) {}

    float* take(int64_t floats) {
        if (std::max(floats, used) > MOST_FLOATS) refuse_size();
        float* const piece = start ? start + used : nullptr;
        used += round_up(floats, LINE_FLOATS);
        return piece;
    }
    simd::Matrix matrix(int64_t rows, int64_t cols) {
        const int64_t ld = row_stride(cols);
        return {take(product(rows, ld)), ld};
    }
    int64_t taken() const { return used; }

  private:
    float* start;
    int64_t used = 0;
};
