// The keys and values of one text.
#pragma once

#include <algorithm>

#include "round_up.h"
#include "simd/simd.h"

struct CacheShape {
    int64_t layers, heads, d, capacity;  // capacity: in tokens
    bool transposed;                     // K is
    int64_t panel;                       // keys of a transposed panel of K

    int64_t head_floats() const { return round_up(capacity, panel) * d; }
    int64_t floats() const { return /* K, V */ 2 * layers * heads * head_floats(); }
};

// K and V for each layer and head: V is (capacity, d). K is too, or is held in transposed panels, each (d,
// panel), where the part takes it so.
class Cache {
  public:
    Cache() = default;
    // memory: CacheShape::floats() floats, 0 at first.
    Cache(const CacheShape&, float* memory);

    float* K(int64_t layer, int64_t head) const { return keys + at(layer, head); }
    float* V(int64_t layer, int64_t head) const { return values + at(layer, head); }

    // Writes rows of k, each with its v behind it, ldK apart, to the positions from `position` on. Inlined into
    // a step, which calls it for each head and token.
    void append(int64_t layer, int64_t head, int64_t position, const float* k, int64_t ldK,
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

    // Copies the first `length` positions of another cache of this shape.
    void copy(const Cache& other, int64_t length) const;

    // Fetches the values of the first `length` positions into the L2 cache.
    void prefetch_values(int64_t layer, int64_t head, int64_t length) const;

  private:
    int64_t at(int64_t layer, int64_t head) const { return (layer * shape.heads + head) * shape.head_floats(); }

    CacheShape shape{};
    float *keys = nullptr, *values = nullptr;
};
