// Weights in float32: the panels as they are.
#include "precision.h"

void fp32_pack_panel(float* panel, const float* W, const float* scale, const Panels& s, int64_t p,
                     bool transposed) {
    const int64_t o = p * s.width, rows = s.rows(p), padded = round_up(rows, portable::lanes());
    if (!transposed) portable::transpose({panel, s.width}, {W + o * s.in, s.in}, rows, s.in, 1.0f);
    for (int64_t k = 0; k < s.in; k++, panel += s.width) {
        if (transposed)
            for (int64_t i = 0; i < rows; i++) panel[i] = W[k * s.out + o + i] * (scale ? scale[o + i] : 1.0f);
        else if (scale)
            portable::scale_row(panel, rows, scale[k]);
        std::fill(panel + rows, panel + padded, 0.0f);
    }
}

Buffer fp32_pack(const float* W, const Panels& s) {
    Buffer packed(s.size());
    for (int64_t p = 0; p < s.count(); p++)
        fp32_pack_panel(packed + p * s.width * s.in, W, nullptr, s, p, false);
    return packed;
}

void fp32_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels& s, int64_t rows,
                   int64_t first, int64_t end, bool add) {
    // Rows of a narrow panel at a time: half of them stay in L1 while many rows of x read them. Wide panels are
    // for few rows of x.
    constexpr int64_t DEPTH = 256;
    const int64_t some = s.width > portable::panel() ? s.in : DEPTH;
    y.data += first;
    for (int64_t k = 0; k < s.in; k += some) {
        const simd::Strided A{x.data + k, x.ld, 1};
        const simd::ConstMatrix W{panel + k * s.width + first, s.width};
        const int64_t depth = std::min(some, s.in - k);
        if (add || k > 0)
            portable::multiply_add(y, A, W, rows, end - first, depth, depth);
        else
            portable::multiply(y, A, W, rows, end - first, depth);
    }
}
