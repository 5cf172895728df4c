// The table of the weights' precisions. Another one is a row here and its functions in precision.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "buffer.h"
#include "simd/portable.h"

// RUNS_ONCE marks a function that runs once for a model: the page's code is small.
#if defined(__wasm__)
#define RUNS_ONCE __attribute__((minsize))
#else
#define RUNS_ONCE
#endif

// A matrix (out, in) in panels of `width` rows, the last one padded with zeros. Panel p, (in, width), is the
// transpose of the rows p * width .. (p + 1) * width - 1. A product reads each panel from its start to its end.
struct Panels {
    int64_t out, in, width;

    int64_t count() const { return (out + width - 1) / width; }
    int64_t size() const { return count() * width * in; }
    int64_t rows(int64_t p) const { return std::min(width, out - p * width); }
};

enum class Precision { fp32, bf16, int8 };

constexpr int64_t PACKED_ROWS = portable::INT8_GROUP;

struct PrecisionRow {
    Precision precision;
    const char* name;
    int64_t bytes;    // of a weight
    int64_t vectors;  // the width of a panel is a multiple of this many vectors of portable::lanes()
    int64_t widest;   // vectors of a panel: those that the product of one row reads together, as one stream
    // Packs rows of a panel in float32, (rows, width): at most PACKED_ROWS, a multiple of it but for the last
    // ones. Null: they are packed as they are.
    void (*pack)(float* to, const float* from, int64_t rows, int64_t width);
    // The columns first .. end - 1 of y (rows, width) <- x (rows, in) times a panel, or with `add` y + that.
    // `end` is a multiple of the vectors. Columns before `first` may be computed too.
    void (*multiply)(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels&, int64_t rows,
                     int64_t first, int64_t end, bool add);
    // Words of a panel of 32 bits.
    int64_t words(const Panels& s) const { return s.width * panel_rows(s.in) / vectors; }
    // Rows of a panel; each has a word of 32 bits for every `vectors` columns.
    int64_t (*panel_rows)(int64_t in);
    // Words of a row of x as multiply() takes it, and what makes them; null if it takes floats.
    int64_t (*operand_words)(int64_t in);
    void (*operand)(float* to, const float* x, int64_t in);
};

#define DECLARE_PRECISION(name)                                                                                \
    void name##_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels&, int64_t rows, \
                         int64_t first, int64_t end, bool add);
DECLARE_PRECISION(fp32)
DECLARE_PRECISION(bf16)
DECLARE_PRECISION(int8)
#undef DECLARE_PRECISION
void bf16_pack(float* to, const float* from, int64_t rows, int64_t width);
void int8_pack(float* to, const float* from, int64_t rows, int64_t width);

inline int64_t a_row_each(int64_t in) { return in; }
int64_t int8_panel_rows(int64_t in);
int64_t int8_operand_words(int64_t in);
void int8_operand(float* to, const float* x, int64_t in);

inline constexpr PrecisionRow PRECISIONS[] = {
    {Precision::fp32, "fp32", 4, 1, 8, nullptr, fp32_multiply, a_row_each, nullptr, nullptr},
    {Precision::bf16, "bf16", 2, 2, 8, bf16_pack, bf16_multiply, a_row_each, nullptr, nullptr},
#if !defined(__wasm__)  // the page is small
    {Precision::int8, "int8", 1, 1, 4, int8_pack, int8_multiply, int8_panel_rows, int8_operand_words,
     int8_operand},
#endif
};

inline const PrecisionRow& row_of(Precision precision) { return PRECISIONS[static_cast<int>(precision)]; }

// to (terms, width), its first columns <- the transpose of W (rows, terms) with contiguous rows or columns.
void pack_rows(float* to, int64_t width, const simd::Strided& W, int64_t rows, int64_t terms);

// A panel of W (out, in) times `scale` (in) or null; if `transposed`, of W (in, out)^T times `scale` (out).
void fp32_pack_panel(float* panel, const float* W, const float* scale, const Panels&, int64_t p,
                     bool transposed);

// C <- A B, or with `add` C + A B, with `some` terms of each sum at a time; A (rows, depth), B (depth, cols).
void multiply_some(simd::Matrix C, const simd::Strided& A, simd::ConstMatrix B, int64_t rows, int64_t cols,
                   int64_t depth, int64_t some, bool add = false);
