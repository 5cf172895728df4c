// What AMX's tiles are loaded from: V transposed, Q in pairs of features, and the rows of K that cannot be read
// in place. All are padded with zeros to whole tiles. For part4_amx.cpp alone.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "cpu/sizes.h"
#include "round_up.h"

#define INLINE inline __attribute__((always_inline))

namespace amx {

constexpr int64_t PAIRS = 16;      // pairs of features or keys in a row of a tile; the lanes of a vector
constexpr int64_t HALF = 16 * 16;  // 32-bit numbers of a tile

// The sizes of a call.
struct Sizes {
    int64_t d, keys, step;  // features and keys, rounded up to blocks; keys of a step
    bool in_place;          // all of K is read in place, except for its last block

    explicit Sizes(const AttentionSizes& a)
        : d(round_up(a.d, BLOCK)), keys(round_up(a.Nk, BLOCK)), in_place(a.d == d) {
        // A long step reads O less often; in a short one S, P, O, Q, K and V stay in L1. At 64 and 128 features
        // O is 8 and 16 KB.
        step = (d <= 2 * BLOCK ? 4 : 8) * BLOCK;
    }

    int64_t blocks() const { return keys / BLOCK; }
    // Words of 32 bits of a head: V^T, and copied rows of K.
    int64_t values() const { return keys * d / 2; }
    int64_t copied_keys() const { return (in_place ? BLOCK : keys) * d / 2; }
    // Where a block of keys is in each.
    int64_t values_at(int64_t block) const { return block * BLOCK * d / 2; }
    int64_t copy_at(int64_t block) const { return in_place ? 0 : block * BLOCK * d / 2; }
    bool copied(int64_t block, int64_t Nk) const { return !in_place || (block + 1) * BLOCK > Nk; }
};

// Transposes 16 x 16 numbers: interleaving row i with row i + 8, four times over, moves each to its place.
INLINE void transpose(__m512i (&v)[16]) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    for (int round = 0; round < 4; round++) {
        __m512i next[16];
        for (int i = 0; i < 8; i++) {
            next[2 * i] = _mm512_permutex2var_epi32(v[i], low, v[i + 8]);
            next[2 * i + 1] = _mm512_permutex2var_epi32(v[i], high, v[i + 8]);
        }
        for (int i = 0; i < 16; i++) v[i] = next[i];
    }
}

// The first n of up to 16 or 32 numbers, and 0.
INLINE __m256i some16(const Bf16* from, int64_t n) {
    return _mm256_maskz_loadu_epi16(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1, from);
}
INLINE __m512i some32(const Bf16* from, int64_t n) {
    return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << n) - 1, from);
}

// A block of a head's V: its transpose in tiles of 16 features, each in pairs of keys. Returns the largest
// finite magnitude.
inline float pack_values(const AttentionOf<Bf16>& a, const Sizes& n, const Bf16* V, int64_t block,
                         uint32_t* to) {
    const __m512i magnitudes = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(0x7f80);
    __m512i most = _mm512_setzero_si512();
    for (int64_t c = 0; c < n.d; c += 16, to += HALF) {
        const auto row = [&](int64_t j) {
            const __m256i x = j < a.Nk ? some16(V + j * a.v.row_stride + c, a.d - c) : _mm256_setzero_si256();
            return _mm512_cvtepu16_epi32(x);
        };
        __m512i v[16];
        for (int64_t p = 0; p < 16; p++) {
            const int64_t j = block * BLOCK + 2 * p;
            v[p] = _mm512_or_si512(row(j), _mm512_slli_epi32(row(j + 1), 16));
            const __m512i x = _mm512_and_si512(v[p], magnitudes);
            most = _mm512_mask_max_epu16(most, _mm512_cmplt_epu16_mask(x, infinity), most, x);
        }
        transpose(v);
        for (int64_t r = 0; r < 16; r++) _mm512_storeu_si512(to + 16 * r, v[r]);
    }
    uint16_t lanes[BLOCK];
    _mm512_storeu_si512(lanes, most);
    return widened(Bf16{*std::max_element(lanes, lanes + BLOCK)});
}

// A block of a head's K: rows of n.d numbers.
inline void copy_keys(const AttentionOf<Bf16>& a, const Sizes& n, const Bf16* K, int64_t block, uint32_t* to) {
    for (int64_t r = 0; r < BLOCK; r++) {
        const int64_t j = block * BLOCK + r;
        for (int64_t c = 0; c < n.d; c += 32, to += 16) {
            const bool inside = j < a.Nk;
            _mm512_storeu_si512(to, some32(inside ? K + j * a.k.row_stride + c : K, inside ? a.d - c : 0));
        }
    }
}

// 16 queries and 32 features as the right operand of a product: rows of pairs of features.
INLINE void pack_queries(const Bf16* Q, int64_t ld, int64_t queries, int64_t features, uint32_t* to) {
    __m512i v[16];
    for (int64_t r = 0; r < 16; r++) v[r] = some32(r < queries ? Q + r * ld : Q, r < queries ? features : 0);
    transpose(v);
    for (int64_t r = 0; r < 16; r++) _mm512_storeu_si512(to + 16 * r, v[r]);
}

}  // namespace amx
