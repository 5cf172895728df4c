// What the kernels use of attention_ext/csrc/cuda/call.h, without PTX.
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

#define UNROLLED(i, count) for (int i = 0; i < (count); ++i)
#define INF INFINITY

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float subtrahend(float m) { return m == -INF ? 0.0f : m; }

template <int low, int high>
float largest(float x) {
    for (int far = low; far < high; far *= 2) x = std::max(x, __shfl_xor_sync(~0u, x, far));
    return x;
}
template <int low, int high>
float sum(float x) {
    for (int far = low; far < high; far *= 2) x += __shfl_xor_sync(~0u, x, far);
    return x;
}
