// Matrices as the SIMD helpers take them: row-major, float32, with any alignment.
#pragma once

#include <cstdint>

namespace simd {

// The first element of a matrix, and the distance between its rows in elements.
struct Matrix {
    float* data;
    int64_t ld;
};

struct ConstMatrix {
    const float* data;
    int64_t ld;
};

// The left operand of a product: A(i, k) is data[i * row_stride + k * depth_stride].
// Passed by reference: GCC copies it to the stack so that the callee waits for it, 2 % of a decoder's step.
struct Strided {
    const float* data;
    int64_t row_stride, depth_stride;
};

}  // namespace simd
