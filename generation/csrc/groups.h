// The number of texts that go through a step together, by a model of the last-level cache.
//
// A step of a group reads all weights once, and each text's K and V once. So a larger group reads fewer bytes
// per text. But the next step reads the same bytes again, and a larger group leaves fewer of them in the cache.
#pragma once

#include <algorithm>
#include <cstdint>

// The bytes that the groups of all threads read in a step.
struct Traffic {
    double weights;      // of the matrices, which all threads share
    double text;         // of a text's K and V
    double cache_bytes;  // the size of the last-level cache
    int64_t threads;     // each has a group

    // Time per text in a group of `texts`, in units of a byte read from the cache. Repeated reads replace each
    // other at random, so the hit rate is the share that fits.
    double cost(int64_t texts) const {
        const double again = weights + static_cast<double>(threads * texts) * text;
        const double missed = 1 - std::min(1.0, USABLE * cache_bytes / again);
        return (weights / static_cast<double>(texts) + text) * (1 + (MEMORY_COST - 1) * missed);
    }

  private:
    // With these the model's size is within 5 % of the best of 1, 2, 4, 8, 12, 16 and 32 texts, at contexts of
    // 25 to 1,900 tokens in fp32 and bf16 (AMD Zen 5, whose 32 MB are shared with other virtual machines).
    static constexpr double USABLE = 1.0 / 3;
    static constexpr double MEMORY_COST = 2.3;  // a byte from memory, in bytes from the cache
};

// The best size for a thread with this many texts. rows: the rows of the products' register blocks, which a
// multiple of them fills.
inline int64_t group_size(const Traffic& traffic, int64_t texts, int64_t rows) {
    int64_t best = texts;
    for (int64_t size = 1; size < texts; size += std::min(size, rows)) {
        if (traffic.cost(size) < traffic.cost(best)) best = size;
    }
    return best;
}
