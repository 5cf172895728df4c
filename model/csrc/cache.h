// The keys and values of one text.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "bf16.h"
#include "buffer.h"
#include "simd/portable.h"

struct CacheShape {
    int64_t layers, heads, d, capacity;  // capacity: in tokens
    bool transposed;                     // whether K is
    int64_t panel;                       // keys of a transposed panel of K; with bf16 a multiple of 2 lanes()
    CachePrecision precision;

    bool rounds() const { return precision == CachePrecision::bf16; }
    // Whether numbers take 16 bits. A part that takes no panels reads rounded floats.
    bool pairs() const { return rounds() && transposed; }

    // 32-bit words of a row of V or of untransposed K, and of a transposed panel of K, which has d rows.
    int64_t row_words() const { return pairs() ? round_up(d, 2 * portable::lanes()) / 2 : d; }
    int64_t panel_words() const { return panel / (pairs() ? 2 : 1) * d; }

    int64_t K_words(int64_t keys) const {
        return transposed ? product((keys + panel - 1) / panel, panel_words()) : product(keys, row_words());
    }
    int64_t V_words(int64_t keys) const { return product(keys, row_words()); }
    // Words of a head; K and V each begin on a cache line.
    int64_t head_words(int64_t keys) const {
        return round_up(K_words(keys), LINE_FLOATS) + round_up(V_words(keys), LINE_FLOATS);
    }
    int64_t words() const { return product(product(layers, heads), head_words(capacity)); }
};

// K and V of each layer and head. V is (capacity, d). K is too, or is in transposed panels, each (d, panel), if
// the part takes them; these and V's rows are portable::Bf16Pairs in bf16.
class Cache {
  public:
    Cache() = default;
    // memory: CacheShape::words() floats, initially 0.
    Cache(const CacheShape&, float* memory);

    float* K(int64_t layer, int64_t head) const { return memory + at(layer, head); }
    float* V(int64_t layer, int64_t head) const { return K(layer, head) + K_size; }

    // K and V as attention.h's parts take them.
    Matrices keys(int64_t layer, int64_t head) const {
        const int64_t row_of_panel = shape.transposed ? shape.panel / (shape.pairs() ? 2 : 1) : 1;
        return {K(layer, head), 0, 0, shape.d, row_of_panel};
    }
    Matrices values(int64_t layer, int64_t head) const { return {V(layer, head), 0, 0, shape.row_words(), 1}; }

    // Writes rows of k, each followed by its v, ldK apart, to the positions from `position` on; may round them.
    // Inlined into a step, which calls it for each head and token.
    void append(int64_t layer, int64_t head, int64_t position, float* k, int64_t ldK, int64_t rows) const {
        if (shape.pairs()) return append_pairs(layer, head, position, k, ldK, rows);
        round(k, ldK, rows);
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
                portable::transpose({panel_start + in_panel, panel}, {k, ldK}, n, d, 1.0f);
            else
                for (int64_t i = 0; i < n; i++) std::copy_n(k + i * ldK, d, to_K + (position + i) * d);
        }
    }

    // Rounds rows of k, each followed by its v, as append() does.
    void round(float* k, int64_t ldK, int64_t rows) const {
        for (int64_t r = 0; shape.rounds() && r < rows; r++, k += ldK)
            for (int64_t i = 0; i < 2 * shape.d; i++) k[i] = widened(rounded(k[i]));
    }

    // Copies the first `length` positions of another cache of this shape.
    void copy(const Cache& other, int64_t length) const;

    // Drops the keys that no query of a `window` will see if a text of `length` tokens fills the cache; returns
    // how many. It depends on the text's tokens only, so that drafts change no bit. window: 0 if all are seen.
    int64_t make_room(int64_t length, int64_t window) const;

    // Fetches the first line of each page into L2: the hardware prefetcher stops at the end of a page.
    void prefetch(int64_t layer, int64_t head, int64_t length) const;

  private:
    int64_t at(int64_t layer, int64_t head) const { return (layer * shape.heads + head) * head_size; }
    void append_pairs(int64_t layer, int64_t head, int64_t position, const float* k, int64_t ldK,
                      int64_t rows) const;

    CacheShape shape{};
    int64_t head_size = 0, K_size = 0;  // in words
    float* memory = nullptr;
};
