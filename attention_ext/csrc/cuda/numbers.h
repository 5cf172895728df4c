// The elements of q, k, v and the output, and functions of numbers that need PTX.
#pragma once

#define FP32 0
#define BF16 1
#define FP16 2

#if FORMAT == FP32
using Element = float;
#else
using Element = unsigned short;  // the bits
#endif

// The name of a 16-bit format in PTX
#if FORMAT == FP16
#define KIND "f16"
#else
#define KIND "bf16"
#endif

// ex2.approx (PTX ISA): 2^x by the MUFU, to about 2 units in the last place; 2^-inf is 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float tanh_approx(float x) {  // to 2^-11
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float reciprocal_approx(float x) {  // to one unit in the last place
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The 32-bit address within shared memory that PTX instructions take.
__device__ inline unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// An element as float32, and float32 rounded to an element (.rn: to nearest, ties to even).
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(unsigned short bits) {
#if FORMAT == FP16
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#else
    return __uint_as_float((unsigned)bits << 16);
#endif
}

__device__ inline Element to_element(float x) {
#if FORMAT == FP32
    return x;
#elif FORMAT == BF16 && __CUDA_ARCH__ < 800  // has no such instruction
    const unsigned bits = __float_as_uint(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
#else
    unsigned short bits;
    asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#endif
}

// Two numbers rounded to 16 bits in one register, `low` in the lower half. PTX names the upper one first.
__device__ inline unsigned pack(float low, float high) {
#if __CUDA_ARCH__ < 800
    return (unsigned)to_element(low) | (unsigned)to_element(high) << 16;
#else
    unsigned both;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}
