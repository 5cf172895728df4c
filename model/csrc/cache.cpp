#include "cache.h"

#include <algorithm>
#include <cstring>

#include "bf16.h"

namespace {

constexpr int64_t PAGE_WORDS = 1024;

// The position of column c in a row of portable::Bf16Pairs, in half words, lower halves first.
int64_t half_of(int64_t c, int64_t lanes) {
    return c / (2 * lanes) * 2 * lanes + c % lanes * 2 + c / lanes % 2;
}

// halves (n) <- x, rounded. The compiler vectorises the loop.
void round_all(uint32_t* __restrict halves, const float* __restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) halves[i] = rounded(x[i]).bits;
}

// Half words, `stride` bytes apart, <- halves (n)
void scatter(char* to, int64_t stride, const uint32_t* halves, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint16_t half = static_cast<uint16_t>(halves[i]);
        std::memcpy(to + i * stride, &half, sizeof half);
    }
}

constexpr int64_t CHUNK = 64;  // numbers rounded at a time, at least 2 lanes()

// A row of pairs <- x (n), rounded; the padding is not written.
void to_pairs(float* row, const float* x, int64_t n) {
    const int64_t lanes = portable::lanes();
    uint32_t halves[CHUNK];
    for (int64_t c = 0; c < n; c += 2 * lanes, row += lanes) {
        const int64_t count = std::min(2 * lanes, n - c);
        round_all(halves, x + c, count);
        scatter(reinterpret_cast<char*>(row), 4, halves, std::min(lanes, count));
        scatter(reinterpret_cast<char*>(row) + 2, 4, halves + lanes, count - lanes);
    }
}

}  // namespace

Cache::Cache(const CacheShape& shape, float* memory)
    : shape(shape),
      head_size(shape.head_words(shape.capacity)),
      K_size(round_up(shape.K_words(shape.capacity), LINE_FLOATS)),
      memory(memory) {}

void Cache::append_pairs(int64_t layer, int64_t head, int64_t position, const float* k, int64_t ldK,
                         int64_t rows) const {
    const int64_t d = shape.d, panel = shape.panel, row = shape.row_words();
    float *to_K = K(layer, head), *to_V = V(layer, head);
    for (int64_t r = 0; r < rows; r++, position++, k += ldK) {
        to_pairs(to_V + position * row, k + d, d);
        char* column = reinterpret_cast<char*>(to_K + position / panel * shape.panel_words()) +
                       2 * half_of(position % panel, portable::lanes());
        uint32_t halves[CHUNK];
        for (int64_t f = 0; f < d; f += CHUNK) {
            const int64_t some = std::min(CHUNK, d - f);
            round_all(halves, k + f, some);
            scatter(column + f * panel * 2, panel * 2, halves, some);
        }
    }
}

void Cache::copy(const Cache& other, int64_t length) const {
    for (int64_t i = 0; i < shape.layers * shape.heads; i++) {
        std::copy_n(other.K(0, i), shape.K_words(length), K(0, i));
        std::copy_n(other.V(0, i), shape.V_words(length), V(0, i));
    }
}

int64_t Cache::make_room(int64_t length, int64_t window) const {
    if (window == 0 || length < shape.capacity) return 0;
    const int64_t keys = (length + 1 - window) / shape.panel * shape.panel;
    for (int64_t i = 0; i < shape.layers * shape.heads; i++) {
        std::copy(K(0, i) + shape.K_words(keys), K(0, i) + shape.K_words(length), K(0, i));
        std::copy(V(0, i) + shape.V_words(keys), V(0, i) + shape.V_words(length), V(0, i));
    }
    return keys;
}

void Cache::prefetch(int64_t layer, int64_t head, int64_t length) const {
    const float *keys = K(layer, head), *values = V(layer, head);
    const int64_t K_end = shape.K_words(length), V_end = shape.V_words(length);
    for (int64_t i = 0; i < K_end; i += PAGE_WORDS) __builtin_prefetch(keys + i, 0, 2);
    for (int64_t i = 0; i < V_end; i += PAGE_WORDS) __builtin_prefetch(values + i, 0, 2);
}
