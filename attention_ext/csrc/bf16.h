// bfloat16: the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

struct Bf16 {
    uint16_t bits;
};

inline float widened(Bf16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline float widened(float x) { return x; }

// x rounded to nearest, ties to even. NaN stays NaN.
inline Bf16 rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return {static_cast<uint16_t>(x == x ? nearest : quiet)};
}

// to[0 .. n-1] <- from[0 .. n-1]
inline void convert(float* to, const Bf16* from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = widened(from[i]);
}

inline void convert(Bf16* to, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = rounded(from[i]);
}

inline void convert(float* to, const float* from, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
