// Weights in float32: the panels as they are.
#include <algorithm>

#include "precision.h"

Buffer fp32_pack(const float* W, int64_t out, const Panels& s) {
    Buffer packed(s.size());
    for (int64_t p = 0; p < s.panels; p++) {
        const int64_t at = p * s.width * s.in;
        portable::transpose({packed + at, s.width}, {W + at, s.in}, std::min(s.width, out - p * s.width), s.in,
                            1.0f);
    }
    return packed;
}

int64_t fp32_panel_rows(int64_t in) { return in; }

int64_t fp32_operand_words(int64_t) { return 0; }

void fp32_operand(float*, const float*, int64_t) {}

void fp32_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels& s, int64_t rows,
                   int64_t first, bool add) {
    y.data += first;
    const float* W = panel + first;
    if (add)
        portable::multiply_add(y, {x.data, x.ld, 1}, {W, s.width}, rows, s.width - first, s.in, s.in);
    else
        portable::multiply(y, {x.data, x.ld, 1}, {W, s.width}, rows, s.width - first, s.in);
}
