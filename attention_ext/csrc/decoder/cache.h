// The keys and values of one text.
#pragma once

#include "matmul/buffer.h"

struct CacheShape {
    int64_t layers, heads, d, capacity;  // capacity: in tokens
    bool transposed;                     // K is
    int64_t panel;                       // keys of a transposed panel of K

    int64_t head_floats() const { return (capacity + panel - 1) / panel * panel * d; }
};

// K and V for each layer and head: V is (capacity, d). K is too, or is held in transposed panels, each (d,
// panel), where the part takes it so.
class Cache {
  public:
    Cache() = default;
    explicit Cache(const CacheShape&);

    float* K(int64_t layer, int64_t head) const { return keys + at(layer, head); }
    float* V(int64_t layer, int64_t head) const { return values + at(layer, head); }

    // Writes rows of k, each with its v behind it, ldK apart, to the positions from `position` on.
    void append(int64_t layer, int64_t head, int64_t position, const float* k, int64_t ldK, int64_t rows) const;

    // Copies the first `length` positions of another cache of this shape.
    void copy(const Cache& other, int64_t length) const;

    // Fetches the values of the first `length` positions into the L2 cache.
    void prefetch_values(int64_t layer, int64_t head, int64_t length) const;

  private:
    int64_t at(int64_t layer, int64_t head) const { return (layer * shape.heads + head) * shape.head_floats(); }

    CacheShape shape{};
    Buffer keys, values;
};
