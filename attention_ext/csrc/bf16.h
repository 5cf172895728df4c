// Rounding to bfloat16, the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

// The upper half of x rounded to nearest, ties to even; NaN stays NaN.
inline uint32_t round_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

// The float whose upper half this is.
inline float widened(uint32_t half) {
    const uint32_t bits = half << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
