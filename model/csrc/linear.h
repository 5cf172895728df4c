// A linear layer with packed weights.
#pragma once

#include <functional>
#include <vector>

#include "precision.h"

// y <- x W^T + b; W (out, in) in panels of `width` outputs, the last one padded with zeros. Every sum over `in`
// goes from first to last in one chain, so a result does not depend on the number of rows or panels. The
// products take x as operand() gives it.
class Linear {
  public:
    Linear() = default;
    // b (out) may be null. width: a multiple of row_of(precision).vectors vectors.
    Linear(const float* W, const float* b, int64_t out, int64_t in, int64_t width, Precision precision);

    // The same layer in panels of another width, panel p at place(p); no weight is rounded again.
    Linear with_width(int64_t width, const std::function<float*(int64_t p)>& place) const;

    // 32-bit words of a panel of this width.
    int64_t panel_words(int64_t width) const {
        return width * precision->panel_rows(shape.in) / precision->vectors;
    }

    // Words of a row of x as the products take it; 0 if they take x itself.
    int64_t operand_words() const { return precision->operand_words(shape.in); }

    // x (rows, in) as the products take it: in `memory`, rows * operand_words() floats, or x itself.
    simd::ConstMatrix operand(simd::ConstMatrix x, int64_t rows, float* memory) const {
        const int64_t words = operand_words();
        if (words == 0) return x;
        for (int64_t r = 0; r < rows; r++) precision->operand(memory + r * words, x.data + r * x.ld, shape.in);
        return {memory, words};
    }

    const PrecisionRow& kept_in() const { return *precision; }
    int64_t outputs() const { return out; }
    int64_t width() const { return shape.width; }
    int64_t panels() const { return shape.panels; }
    int64_t columns() const { return shape.panels * shape.width; }

    // Columns p * width() .. (p + 1) * width() - 1 of y (rows, columns()); those before the `first` of them
    // need not be set.
    void set(simd::Matrix y, simd::ConstMatrix x, int64_t rows, int64_t p, int64_t first = 0) const;

    // The same columns, added to y.
    void add(simd::Matrix y, simd::ConstMatrix x, int64_t rows, int64_t p) const;

  private:
    int64_t out = 0;
    Panels shape{};
    const PrecisionRow* precision = nullptr;
    Buffer weights, bias;        // weights: empty if the panels lie elsewhere
    std::vector<float*> starts;  // of the panels
};
