// The SIMD helpers of attention's forward pass: portable.h's; with -DSIMD_ELSEWHERE ispc.cpp's or off.cpp's.
#pragma once

#include <cmath>

#include "simd/constants.h"
#include "simd/portable.h"

namespace simd {

#if defined(SIMD_ELSEWHERE)
#include "simd/helpers.h"
#else
using namespace portable;
#endif

// e^x, or 0 where that would be denormal.
inline float exp_or_zero(float x) { return x < SIMD_EXP_LEAST ? 0.0f : std::exp(x); }

}  // namespace simd
