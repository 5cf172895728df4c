// A linear layer with packed weights.
#pragma once

#include <utility>
#include <vector>

#include "precision.h"

// The rows of W that a panel holds: panel p has `rows` of each run of `apart` ones, from p * rows on.
struct Source {
    simd::Strided W;
    int64_t rows, apart, runs = 1;

    int64_t count(int64_t p) const { return std::min(rows, apart - p * rows); }
    simd::Strided from(int64_t p, int64_t run, int64_t k) const {
        return {W.data + (run * apart + p * rows) * W.row_stride + k * W.depth_stride, W.row_stride,
                W.depth_stride};
    }
};

// y <- x W^T + b; W (out, in) in panels of `width` outputs. Every sum goes from first to last in one chain, so
// a result does not depend on the number of rows or panels. The products take x as operand() gives it.
class Linear {
  public:
    Linear() = default;
    // With panels that pack() fills. b (out) may be null. The width is a multiple of the precision's vectors.
    Linear(const Panels&, const PrecisionRow&, const float* b, std::vector<float*> panels);

    // In float32 at `memory`, Panels::size() floats: for weights that change.
    Linear(const Panels&, float* memory);

    void pack(int64_t p, const Source&) const;

    // Packs panel p of W (out, in), times `scale` (in) or null; or, if `transposed`, of the transpose of
    // W (in, out), times `scale` (out).
    void pack(int64_t p, const float* W, const float* scale, bool transposed) const {
        fp32_pack_panel(starts[p], W, scale, shape, p, transposed);
    }

    // The same layer in panels of another width, at these places; no weight is rounded again.
    Linear with_width(int64_t width, std::vector<float*> panels) const;

    // Words of a row of x as the products take it; 0 if they take x itself.
    int64_t operand_words() const { return precision->operand_words ? precision->operand_words(shape.in) : 0; }

    // x (rows, in) as the products take it: in `memory`, rows * operand_words() floats, or x itself.
    simd::ConstMatrix operand(simd::ConstMatrix x, int64_t rows, float* memory) const {
        const int64_t words = operand_words();
        if (words == 0) return x;
        for (int64_t r = 0; r < rows; r++) precision->operand(memory + r * words, x.data + r * x.ld, shape.in);
        return {memory, words};
    }

    // In float32: W's number for output o and input k.
    float weight(int64_t o, int64_t k) const {
        return starts[o / shape.width][k * shape.width + o % shape.width];
    }

    const PrecisionRow& kept_in() const { return *precision; }
    int64_t inputs() const { return shape.in; }
    int64_t outputs() const { return shape.out; }
    int64_t width() const { return shape.width; }
    int64_t panels() const { return count; }
    // Columns that the products set: the outputs, rounded up to vectors; and those of panel p.
    int64_t columns() const { return (count - 1) * shape.width + last; }
    int64_t columns(int64_t p) const { return p + 1 < count ? shape.width : last; }

    // Columns of panel p of y (rows, columns()), or with `add` y + them; those before `first` are optional.
    void multiply(simd::Matrix y, simd::ConstMatrix x, int64_t rows, int64_t p, bool add,
                  int64_t first = 0) const;

  private:
    Linear(const Panels&, const PrecisionRow*);
    int64_t unit() const { return precision->vectors * portable::lanes(); }

    Panels shape{};
    const PrecisionRow* precision = nullptr;
    int64_t count = 0, last = 0;  // panels, and columns of the last one: divisions take part of a step's time
    Buffer bias;
    std::vector<float*> starts;  // of the panels
};
