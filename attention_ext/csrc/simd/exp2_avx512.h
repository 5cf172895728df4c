// 2^x by two instructions of AVX-512 that portable C++ has no name for: vreduceps gives x - floor(x), vscalefps
// multiplies by 2^floor(x). 8 instructions instead of the portable 11, and no test of the input for NaN.
#pragma once

#include <immintrin.h>

#include "simd/constants.h"

namespace simd {

// 2^f for 0 <= f < 1: polynomials that are minimax in relative error, with constant term 1.
template <int degree>
constexpr float EXP2_FLOOR[] = {0};
template <>  // 8e-8
inline constexpr float EXP2_FLOOR<5>[] = {1.0f,           6.93151312e-1f, 2.40164450e-1f,
                                          5.57999133e-2f, 9.01703002e-3f, 1.86713021e-3f};
template <>  // 9e-5
inline constexpr float EXP2_FLOOR<3>[] = {1.0f, 6.95116789e-1f, 2.27644981e-1f, 7.70670512e-2f};

// 2^x, NaN for NaN; denormal, or 0 where the processor flushes those, below SIMD_EXP2_LEAST.
template <int degree>
inline __attribute__((always_inline)) __m512 exp2_denormal(__m512 x) {
    constexpr int FLOOR = 1;  // of whole numbers
    const __m512 f = _mm512_reduce_ps(x, FLOOR);
    __m512 p = _mm512_set1_ps(EXP2_FLOOR<degree>[degree]);
    for (int i = degree - 1; i >= 0; i--) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_FLOOR<degree>[i]));
    return _mm512_scalef_ps(p, x);
}

// 2^x as constants.h describes, and NaN for NaN.
inline __attribute__((always_inline)) __m512 exp2_or_zero(__m512 x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(SIMD_EXP2_LEAST), _CMP_NLT_UQ);
    return _mm512_maskz_mov_ps(normal, exp2_denormal<5>(x));
}

}  // namespace simd
