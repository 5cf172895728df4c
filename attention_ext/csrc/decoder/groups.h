// How many texts go through a step together, by what the caches hold.
//
// A step of a group reads all weights once, and each text's K and V once. So a larger group reads fewer bytes
// for a text. But the next step reads the same bytes again, and a larger group leaves fewer of them in the
// cache.
#pragma once

#include <algorithm>
#include <cstdint>

// The bytes that the groups of all threads read in a step.
struct Traffic {
    double weights;      // of the matrices, which all threads share
    double text;         // of a text's K and V
    double cache_bytes;  // of the processor's last cache
    int64_t threads;     // each has a group

    // Time for a text in a group of `texts`, in bytes from the cache. What is read again and again takes the
    // cache's place by chance, so the share that is found there is that which fits.
    double cost(int64_t texts) const {
        const double again = weights + static_cast<double>(threads * texts) * text;
        const double missed = 1 - std::min(1.0, USABLE * cache_bytes / again);
        return (weights / static_cast<double>(texts) + text) * (1 + (MEMORY_COST - 1) * missed);
    }

  private:
    // With these the model's size is within 5 % of the best of 1, 2, 4, 8, 12, 16 and 32 texts, at contexts of
    // 25 to 1,900 tokens in fp32 and bf16 (AMD Zen 5, whose 32 MB are shared with other virtual machines).
    static constexpr double USABLE = 1.0 / 3;
    static constexpr double MEMORY_COST = 2.3;  // of a byte from memory, in bytes from the cache
};

// The best size for a thread that has so many texts. rows: of the products' register blocks, which are filled
// by a multiple of as many texts.
inline int64_t group_size(const Traffic& traffic, int64_t texts, int64_t rows) {
    int64_t best = texts;
    for (int64_t size = 1; size < texts; size += std::min(size, rows)) {
        if (traffic.cost(size) < traffic.cost(best)) best = size;
    }
    return best;
}
