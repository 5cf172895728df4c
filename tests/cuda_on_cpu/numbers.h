// What the kernels use of attention_ext/csrc/cuda/numbers.h, without PTX.
#pragma once

#if FORMAT == 0
using Element = float;
inline float to_float(float x) { return x; }
inline float to_element(float x) { return x; }
#else
using Element = unsigned short;
inline float to_float(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
inline unsigned short to_element(float x) {
    const unsigned bits = bits_of<unsigned>(x);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
