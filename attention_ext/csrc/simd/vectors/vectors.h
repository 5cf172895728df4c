// C++ vector extensions: AVX-512, AVX2, SSE and NEON from one source, as wide as the widest register. memcpy
// compiles to one unaligned load or store.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "simd/constants.h"

namespace portable {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;  // of a vector each
#else
constexpr int REGISTERS = 16;
#endif

constexpr int IN_L2 = 2;  // where a prefetch ends

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

// Keeps a vector in a register: GCC would load it again for each of its uses.
template <class V> INLINE V kept(V v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

// The same number, unknown to the compiler: it loads again what it has loaded at this place.
INLINE int64_t unknown(int64_t k) {
    __asm__ volatile("" : "+r"(k));
    return k;
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

INLINE const float* columns(const float* b, int64_t c) { return b + c; }
INLINE const uint32_t* columns(const uint32_t* b, int64_t c) { return b + c / 2; }
template <class Operand> INLINE Operand from_column(const Operand& b, int64_t c) {
    return {columns(b.data, c), b.ld};
}

INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

#if defined(__AVX512F__)

INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

// The first n lanes from p, the others `rest`; n < W.
INLINE Vec load_part(const float* p, int64_t n, float rest) {
    return _mm512_mask_loadu_ps(splat(rest), first_lanes(n), p);
}

// Not the loop below: GCC may store by VEXTRACTF32X8, which faults on lanes that the mask leaves out.
INLINE void store_part(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

#else

// Not unrolled, the loops become one masked load or store.
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

#endif

// The larger one; a where either is NaN.
#if defined(__AVX__) && !defined(__AVX512F__)
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(b, a); }  // GCC compares and selects
#else
INLINE Vec max(Vec a, Vec b) { return b > a ? b : a; }
#endif

INLINE IntVec lane_numbers() {
    IntVec n;
    for (int i = 0; i < W; i++) n[i] = i;
    return n;
}

template <class To, class From> INLINE To bit_cast(From from) {
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

INLINE bool any(IntVec mask) {
    int64_t halves[sizeof mask / sizeof(int64_t)], found = 0;
    std::memcpy(halves, &mask, sizeof mask);
    for (const int64_t half : halves) found |= half;
    return found != 0;
}

// to (n) <- change(x), by vectors; the lanes after the last number are `rest`.
template <class Change>
INLINE void map(float* to, const float* x, int64_t n, float rest, const Change& change) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, change(load(x + i)));
    if (i < n) store_part(to + i, change(load_part(x + i, n - i, rest)), n - i);
}

// take(even or odd, vector) for the vectors of x (n) in turn: two independent chains. `rest` pads x.
template <class Take> INLINE void fold(const float* x, int64_t n, float rest, const Take& take) {
    constexpr int EVEN = 0, ODD = 1;
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) take(EVEN, load(x + i)), take(ODD, load(x + i + W));
    for (; i + W <= n; i += W) take(EVEN, load(x + i));
    if (i < n) take(ODD, load_part(x + i, n - i, rest));
}

INLINE float largest(Vec v) { return reduce(v, max, std::make_index_sequence<W>()); }

#if defined(__AVX512DQ__)

// vreduceps, x - floor(x), and vscalefps, times 2^floor(x): 8 instructions, not 11, and no test for NaN.

// 2^f for 0 <= f < 1: polynomials that are minimax in relative error, with constant term 1.
template <int degree> constexpr float EXP2_FLOOR[] = {0};
template <>  // 8e-8
inline constexpr float EXP2_FLOOR<5>[] = {1.0f,           6.93151312e-1f, 2.40164450e-1f,
                                          5.57999133e-2f, 9.01703002e-3f, 1.86713021e-3f};
template <>  // 9e-5
inline constexpr float EXP2_FLOOR<3>[] = {1.0f, 6.95116789e-1f, 2.27644981e-1f, 7.70670512e-2f};

// 2^x, NaN for NaN; denormal, or 0 where the processor flushes those, below SIMD_EXP2_LEAST.
template <int degree> INLINE __m512 exp2_denormal(__m512 x) {
    constexpr int FLOOR = 1;  // of whole numbers
    const __m512 f = _mm512_reduce_ps(x, FLOOR);
    __m512 p = _mm512_set1_ps(EXP2_FLOOR<degree>[degree]);
    for (int i = degree - 1; i >= 0; i--) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_FLOOR<degree>[i]));
    return _mm512_scalef_ps(p, x);
}

#endif

// 2^f for |f| <= 1/2.
INLINE Vec exp2_near_0(Vec f) {
    Vec p = f * SIMD_EXP2_C5 + SIMD_EXP2_C4;
    p = p * f + SIMD_EXP2_C3;
    p = p * f + SIMD_EXP2_C2;
    p = p * f + SIMD_EXP2_C1;
    return p * f + SIMD_EXP2_C0;
}

// 2^x for x <= 8, as constants.h describes. Unless KEEPS_NAN, NaN gives 0 and callers test their inputs.
#if defined(__AVX512DQ__) && !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
constexpr bool KEEPS_NAN = true;  // by Intel's instructions; on AMD they are not faster than the sums
INLINE Vec exp2_bounded(Vec x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(SIMD_EXP2_LEAST), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(normal, exp2_denormal<5>(x));
}
#else
constexpr bool KEEPS_NAN = false;
INLINE Vec exp2_bounded(Vec x) {
    const Vec round = splat(SIMD_ROUND);
    const Vec z = x + round;
    const Vec p = exp2_near_0(x - (z - round));
    const UintVec bits = bit_cast<UintVec>(p) + (bit_cast<UintVec>(z) << 23);  // far below the least they wrap
    return x >= SIMD_EXP2_LEAST ? bit_cast<Vec>(bits) : Vec{};
}
#endif

// x, but NaN where `witness` is NaN.
INLINE Vec nan_if(Vec witness, Vec x) { return witness == witness ? x : witness; }

}  // namespace portable
