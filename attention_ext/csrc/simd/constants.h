// Numbers that the implementations of simd.h share. They are macros, so that simd.ispc can include this file.
#pragma once

#define SIMD_LOG2E 1.44269504f  // log2(e)
#define SIMD_LN2 0.693147181f   // log(2)

// How far the online softmax lets its maximum lag behind the scores, in units of log(2).
#define SIMD_MAX_LAG 8.0f

// PyTorch's epsilon, added to the variance.
#define SIMD_LAYER_NORM_EPSILON 1e-5f

// Products with int8 weights: the weights of an output that share a scale, and the bits of a whole number that
// stands for an activation. The number plus half of 2^bits is three bytes of 7 bits, which every processor's
// dot product of bytes takes, signed or not.
#define SIMD_INT8_GROUP 128
#define SIMD_INT8_BITS 21

// 2^x for x <= 8 with a relative error of 2e-7; 0 for x < SIMD_EXP2_LEAST, where results would be denormal: a
// multiply-add with a denormal number takes over a hundred cycles on many processors.
// x = n + f with n whole and |f| <= 1/2. 2^n is an addition to the exponent bits.
// Adding SIMD_ROUND = 1.5 * 2^23 rounds x to n, which is then in the low bits of the sum.
#define SIMD_EXP2_LEAST (-126.0f)
#define SIMD_ROUND 12582912.0f

// e^x is below the smallest normal float for x below this.
#define SIMD_EXP_LEAST (-87.3365402f)
#define SIMD_LEAST_NORMAL 1.17549435e-38f

// 2^f for |f| <= 1/2: a polynomial of degree 5, minimax in relative error, with constant term 1.
#define SIMD_EXP2_C5 1.32647273e-3f
#define SIMD_EXP2_C4 9.67151299e-3f
#define SIMD_EXP2_C3 5.55073358e-2f
#define SIMD_EXP2_C2 2.40222424e-1f
#define SIMD_EXP2_C1 6.93147004e-1f
#define SIMD_EXP2_C0 1.0f

// q(a) with Phi(-a) = 2^q(a) for a >= 0, Phi being the normal distribution function: a polynomial of degree 8,
// minimax in a * 2^q(a) with an absolute error of 4e-8, with constant term -1. q falls without bound.
#define SIMD_GELU_C8 (-1.90206663e-6f)
#define SIMD_GELU_C7 2.80569584e-5f
#define SIMD_GELU_C6 (-1.31473338e-4f)
#define SIMD_GELU_C5 (-2.72075355e-4f)
#define SIMD_GELU_C4 7.24542048e-3f
#define SIMD_GELU_C3 (-5.26276119e-2f)
#define SIMD_GELU_C2 (-4.59162146e-1f)
#define SIMD_GELU_C1 (-1.15111101f)
#define SIMD_GELU_C0 (-1.0f)

#define SIMD_NORMAL_DENSITY 0.398942280f  // of the normal distribution at 0: 1 / sqrt(2 pi)
