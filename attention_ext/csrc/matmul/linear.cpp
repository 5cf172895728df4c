#include "matmul/linear.h"

#include <algorithm>

Linear::Linear(const float* W, const float* b, int64_t out, int64_t in, int64_t width, Precision precision)
    : shape{in, width, (out + width - 1) / width},
      precision(&row_of(precision)),
      weights(this->precision->pack(W, out, shape)) {
    if (!b) return;
    bias = Buffer(columns());
    std::copy_n(b, out, static_cast<float*>(bias));
}

void Linear::set(simd::Matrix y, simd::ConstMatrix x, int64_t rows, int64_t p, int64_t first) const {
    const int64_t width = shape.width;
    y.data += p * width;
    for (int64_t r = 0; bias && r < rows; r++) std::copy_n(bias + p * width, width, y.data + r * y.ld);
    precision->multiply(y, x, weights, shape, p, rows, first, bias != nullptr);
}

void Linear::add(simd::Matrix y, simd::ConstMatrix x, int64_t rows, int64_t p) const {
    const int64_t width = shape.width;
    y.data += p * width;
    for (int64_t r = 0; bias && r < rows; r++)
        for (int64_t c = 0; c < width; c++) y.data[r * y.ld + c] += bias[p * width + c];
    precision->multiply(y, x, weights, shape, p, rows, 0, true);
}
