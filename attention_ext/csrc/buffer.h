// Memory for weights, caches and activations.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

// Floats, initially 0, aligned to a cache line. Large buffers are on huge pages where Linux has them. That
// saves page walks: 5 % of a step at a context of 2048. It also spreads a buffer evenly over the sets of a
// cache, so that one of nearly L2's size stays in L2.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t size) {
        size_t bytes = size * sizeof(float);
        const bool huge = bytes >= HUGE_PAGE_BYTES / 2;
        if (huge) bytes = (bytes + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        const auto align = static_cast<std::align_val_t>(huge ? HUGE_PAGE_BYTES : CACHE_LINE_BYTES);
        data = {static_cast<float*>(operator new(bytes, align)), Free{align}};
#ifdef MADV_HUGEPAGE
        if (huge) madvise(data.get(), bytes, MADV_HUGEPAGE);
#endif
        std::fill_n(data.get(), size, 0.0f);
    }
    operator float*() const { return data.get(); }

  private:
    static constexpr size_t CACHE_LINE_BYTES = 64, HUGE_PAGE_BYTES = 2 << 20;
    struct Free {
        std::align_val_t align{};
        void operator()(float* p) const { operator delete(p, align); }
    };
    std::unique_ptr<float, Free> data{nullptr, Free{}};
};
