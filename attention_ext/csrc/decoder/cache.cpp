#include "decoder/cache.h"

#include <algorithm>

Cache::Cache(const CacheShape& shape, float* memory)
    : shape(shape), keys(memory), values(memory + shape.floats() / 2) {}

void Cache::copy(const Cache& other, int64_t length) const {
    const int64_t used = round_up(length, shape.panel) * shape.d;
    for (int64_t l = 0; l < shape.layers; l++) {
        for (int64_t h = 0; h < shape.heads; h++) {
            std::copy_n(other.K(l, h), used, K(l, h));
            std::copy_n(other.V(l, h), used, V(l, h));
        }
    }
}

void Cache::prefetch_values(int64_t layer, int64_t head, int64_t length) const {
    constexpr int64_t LINE_FLOATS = 16;  // of a cache line
    const float* data = V(layer, head);
    for (int64_t i = 0; i < length * shape.d; i += LINE_FLOATS) __builtin_prefetch(data + i, 0, 2);
}
