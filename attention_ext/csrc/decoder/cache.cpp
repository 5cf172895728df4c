#include "decoder/cache.h"

#include <algorithm>

#include "attention.h"

Cache::Cache(const CacheShape& shape)
    : shape(shape),
      keys(shape.layers * shape.heads * shape.head_floats()),
      values(shape.layers * shape.heads * shape.head_floats()) {}

void Cache::append(int64_t layer, int64_t head, int64_t position, const float* k, int64_t ldK,
                   int64_t rows) const {
    const int64_t d = shape.d, panel = shape.panel;
    float *to_K = K(layer, head), *to_V = V(layer, head);
    for (int64_t r = 0, n; r < rows; r += n, position += n, k += n * ldK) {
        const int64_t in_panel = position % panel;
        n = std::min(rows - r, panel - in_panel);
        for (int64_t i = 0; i < n; i++) std::copy_n(k + i * ldK + d, d, to_V + (position + i) * d);
        float* panel_start = to_K + (position - in_panel) * d;
        if (shape.transposed && n == 1)  // one token: twice as fast as the general transpose
            for (int64_t f = 0; f < d; f++) panel_start[f * panel + in_panel] = k[f];
        else if (shape.transposed)
            simd::transpose({panel_start + in_panel, panel}, {k, ldK}, n, d, 1.0f);
        else
            for (int64_t i = 0; i < n; i++) std::copy_n(k + i * ldK, d, to_K + (position + i) * d);
    }
}

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
    constexpr int64_t LINE = 16;  // floats of a cache line
    const float* data = V(layer, head);
    for (int64_t i = 0; i < length * shape.d; i += LINE) __builtin_prefetch(data + i, 0, 2);
}
