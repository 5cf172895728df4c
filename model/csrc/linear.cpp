#include "linear.h"

#include <algorithm>
#include <utility>

Linear::Linear(const Panels& shape, const PrecisionRow* precision)
    : shape(shape), precision(precision), count(shape.count()), last(round_up(shape.rows(count - 1), unit())) {}

Linear::Linear(const Panels& shape, const PrecisionRow& precision, const float* b, std::vector<float*> panels)
    : Linear(shape, &precision) {
    starts = std::move(panels);
    if (!b) return;
    bias = Buffer(columns());
    std::copy_n(b, shape.out, static_cast<float*>(bias));
}

Linear::Linear(const Panels& shape, float* memory) : Linear(shape, &row_of(Precision::fp32)) {
    for (int64_t p = 0; memory && p < panels(); p++) starts.push_back(memory + p * precision->words(shape));
}

RUNS_ONCE void Linear::pack(int64_t p, const Source& from) const {
    const int64_t width = shape.width, count = from.count(p);
    const Buffer block(precision->pack ? PACKED_ROWS * width : 0);
    for (int64_t k = 0; k < shape.in; k += PACKED_ROWS) {
        const int64_t rows = std::min(PACKED_ROWS, shape.in - k);
        float* const to = starts[p] + precision->words({shape.out, k, width});
        float* const floats = precision->pack ? block : to;
        if (from.runs * count < width) std::fill_n(floats, rows * width, 0.0f);
        for (int64_t run = 0; run < from.runs; run++)
            pack_rows(floats + run * count, width, from.from(p, run, k), count, rows);
        if (precision->pack) precision->pack(to, floats, rows, width);
    }
}

RUNS_ONCE Linear Linear::with_width(int64_t width, std::vector<float*> panels) const {
    Linear other({shape.out, shape.in, width}, *precision, bias, std::move(panels));
    // In every precision a row of a panel is some units: vectors of 32 bits a lane.
    const int64_t lanes = portable::lanes();
    const auto row = [&](const Linear& w, int64_t u, int64_t k) {
        const int64_t units = w.shape.width / unit();
        return w.starts[u / units] + (k * units + u % units) * lanes;
    };
    for (int64_t u = 0; u * unit() < shape.out; u++)
        for (int64_t k = 0; k < precision->panel_rows(shape.in); k++)
            std::copy_n(row(*this, u, k), lanes, row(other, u, k));
    return other;
}

void Linear::multiply(simd::Matrix y, simd::ConstMatrix x, int64_t rows, int64_t p, bool add,
                      int64_t first) const {
    y.data += p * width();
    const int64_t end = columns(p);
    for (int64_t r = 0; bias && r < rows; r++) {
        float* const to = y.data + r * y.ld;
        if (!add) std::fill_n(to, end, 0.0f);
        for (int64_t c = 0; c < end; c++) to[c] += bias[p * width() + c];
    }
    precision->multiply(y, x, starts[p], shape, rows, first, end, add || bias);
}
