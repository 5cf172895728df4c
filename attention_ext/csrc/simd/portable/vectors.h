// The vectors of the portable helpers, in C++ vector extensions: AVX-512, AVX2, SSE and NEON from one source.
//
// A vector is as wide as the widest register that the compiler may use. Loads and stores go through memcpy,
// which compiles to one unaligned instruction. The columns beyond the last whole vector go through a masked
// copy of less than a vector.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "simd/constants.h"
#if defined(__AVX512DQ__) && !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
#define INSTRUCTIONS_FOR_EXP2  // Intel's; on AMD they are not faster than the sums
#include "simd/exp2_avx512.h"
#endif

namespace portable {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(W * sizeof(float))));
typedef uint32_t UintVec __attribute__((vector_size(W * sizeof(float))));

#define INLINE inline __attribute__((always_inline))

INLINE Vec splat(float x) { return Vec{} + x; }

INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Vector v of the columns of a row of B: floats, or bfloat16 in the pairs of portable.h.
INLINE Vec column(const float* b, int v) { return load(b + v * W); }

INLINE Vec column(const uint32_t* b, int v) {
    UintVec pair;
    std::memcpy(&pair, b + v / 2 * W, sizeof pair);
    const UintVec bits = v % 2 ? pair & 0xffff0000u : pair << 16;
    Vec x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The address of column c.
INLINE const float* columns(const float* b, int64_t c) { return b + c; }
INLINE const uint32_t* columns(const uint32_t* b, int64_t c) { return b + c / 2; }

INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// The first n lanes from p, the others `rest`; n < W. Not unrolled, the loop becomes one masked load.
INLINE Vec load_part(const float* p, int64_t n, float rest) {
    const int count = static_cast<int>(n);
    float lane[W];
#pragma GCC unroll 1
    for (int i = 0; i < W; i++) lane[i] = i < count ? p[i] : rest;
    return load(lane);
}

INLINE void store_part(float* p, Vec v, int64_t n) {
    const int count = static_cast<int>(n);
    float lane[W];
    store(lane, v);
#pragma GCC unroll 1
    for (int i = 0; i < W; i++)
        if (i < count) p[i] = lane[i];
}

INLINE Vec max(Vec a, Vec b) { return b > a ? b : a; }  // a where either is NaN

INLINE IntVec lane_numbers() {
    IntVec n;
    for (int i = 0; i < W; i++) n[i] = i;
    return n;
}

template <class To, class From>
INLINE To bit_cast(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Reduces all lanes by op, as a tree: each step combines a lane with the lane `away` from it.
template <int away = 1, class V, class Op, size_t... I>
INLINE auto reduce(V v, Op op, std::index_sequence<I...> lanes) {
    v = op(v, __builtin_shufflevector(v, v, (I ^ away)...));
    if constexpr (2 * away < W)
        return reduce<2 * away>(v, op, lanes);
    else
        return v[0];
}

INLINE float sum(Vec v) {
    return reduce(v, [](Vec a, Vec b) { return a + b; }, std::make_index_sequence<W>());
}

INLINE float largest(Vec v) { return reduce(v, max, std::make_index_sequence<W>()); }

// 2^x for x <= 8, as constants.h describes. Unless KEEPS_NAN, the result for NaN is 0 and callers test their
// inputs.
#if defined(INSTRUCTIONS_FOR_EXP2)
constexpr bool KEEPS_NAN = true;
INLINE Vec exp2_bounded(Vec x) { return simd::exp2_or_zero(x); }
#else
constexpr bool KEEPS_NAN = false;
INLINE Vec exp2_bounded(Vec x) {
    const Vec round = splat(SIMD_ROUND);
    const Vec z = x + round;
    const Vec f = x - (z - round);
    Vec p = f * SIMD_EXP2_C5 + SIMD_EXP2_C4;
    p = p * f + SIMD_EXP2_C3;
    p = p * f + SIMD_EXP2_C2;
    p = p * f + SIMD_EXP2_C1;
    p = p * f + SIMD_EXP2_C0;
    const UintVec bits = bit_cast<UintVec>(p) + (bit_cast<UintVec>(z) << 23);  // far below the least they wrap
    return x >= SIMD_EXP2_LEAST ? bit_cast<Vec>(bits) : Vec{};
}
#endif

// x, but NaN where `witness` is NaN.
INLINE Vec nan_if(Vec witness, Vec x) { return witness == witness ? x : witness; }

}  // namespace portable
