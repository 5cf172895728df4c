// Numbers that the SIMD helpers share, as macros, so that simd.ispc can include this file.
#pragma once

#define SIMD_LOG2E 1.44269504f  // log2(e)
#define SIMD_LN2 0.693147181f   // log(2)

// How far the online softmax lets its maximum lag behind the scores, in units of log(2).
#define SIMD_MAX_LAG 8.0f

// 2^x for x <= 8 with a relative error of 2e-7; 0 below SIMD_EXP2_LEAST: denormal numbers are slow. x = n + f
// with n whole and |f| <= 1/2; adding SIMD_ROUND = 1.5 * 2^23 leaves n in the low bits, for the exponent.
#define SIMD_EXP2_LEAST (-126.0f)
#define SIMD_ROUND 12582912.0f

// e^x is below the smallest normal float for x below this.
#define SIMD_EXP_LEAST (-87.3365402f)

// 2^f for |f| <= 1/2: a polynomial of degree 5, minimax in relative error, with constant term 1.
#define SIMD_EXP2_C5 1.32647273e-3f
#define SIMD_EXP2_C4 9.67151299e-3f
#define SIMD_EXP2_C3 5.55073358e-2f
#define SIMD_EXP2_C2 2.40222424e-1f
#define SIMD_EXP2_C1 6.93147004e-1f
#define SIMD_EXP2_C0 1.0f
