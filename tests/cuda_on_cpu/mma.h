// What the kernels use of attention_ext/csrc/cuda/mma.h, in bfloat16, without PTX.
#pragma once

inline void multiply_16bit(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int g = emulated::current->thread % 32 / 4, t = emulated::current->thread % 4;
    float A[16][16], B[16][8];
    const auto unpack = [](float* to, int far, unsigned x) {
        to[0] = __uint_as_float(x << 16), to[far] = __uint_as_float(x & 0xffff0000u);
    };
    for (int i = 0; i < 4; i++) {
        const uint64_t* values = emulated::exchange(a[i]);
        for (int n = 0; n < 32; n++) unpack(&A[n / 4 + i % 2 * 8][n % 4 * 2 + i / 2 * 8], 1, values[n]);
    }
    for (int i = 0; i < 2; i++) {
        const uint64_t* values = emulated::exchange(i ? b1 : b0);
        for (int n = 0; n < 32; n++) unpack(&B[n % 4 * 2 + i * 8][n / 4], 8, values[n]);
    }
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 16; k++) c[i] += A[g + i / 2 * 8][k] * B[k][2 * t + i % 2];
    }
}
