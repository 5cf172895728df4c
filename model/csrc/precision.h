// The table of the precisions that weights can be kept in. Another precision is a row here and a file
// model/csrc/name.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "buffer.h"
#include "simd/portable.h"

// A matrix of (panels * width) rows in `panels` panels: panel p, (in, width), is the transpose of the rows
// p * width .. (p + 1) * width - 1. A product reads each panel from its start to its end.
struct Panels {
    int64_t in, width, panels;

    int64_t size() const { return panels * width * in; }
};

// A row for each precision `name`, with the functions
//   name_pack           W (out, in) as Panels, whose rows from `out` on are 0
//   name_panel_rows     rows of a panel; each has a word of 32 bits for every `vectors` columns
//   name_operand_words  words of a row of x as name_multiply takes it; 0 if it takes floats
//   name_operand        makes that row of x (in); not called if it has no words
//   name_multiply       y (rows, width) <- x (rows, in) times a panel, or with `add` y + that. The columns of y
//                       before `first`, which is less than width, need not be computed.
// bytes: those of a weight. vectors: the width of a panel is a multiple of this many vectors of
// portable::lanes().
//
//              name, bytes, vectors
#define EACH_PRECISION(PRECISION) \
    PRECISION(fp32, 4, 1)         \
    PRECISION(bf16, 2, 2)         \
    PRECISION(int8, 1, 1)

#define DECLARE_PRECISION(name, bytes, vectors)                                                                \
    Buffer name##_pack(const float* W, int64_t out, const Panels&);                                            \
    int64_t name##_panel_rows(int64_t in);                                                                     \
    int64_t name##_operand_words(int64_t in);                                                                  \
    void name##_operand(float* to, const float* x, int64_t in);                                                \
    void name##_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels&, int64_t rows, \
                         int64_t first, bool add);
EACH_PRECISION(DECLARE_PRECISION)
#undef DECLARE_PRECISION

#define PRECISION_NAME(name, bytes, vectors) name,
enum class Precision { EACH_PRECISION(PRECISION_NAME) };
#undef PRECISION_NAME

struct PrecisionRow {
    Precision precision;
    const char* name;
    int64_t bytes, vectors;
    Buffer (*pack)(const float* W, int64_t out, const Panels&);
    int64_t (*panel_rows)(int64_t in);
    int64_t (*operand_words)(int64_t in);
    void (*operand)(float* to, const float* x, int64_t in);
    void (*multiply)(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels&, int64_t rows,
                     int64_t first, bool add);
};

#define PRECISION_ROW(name, bytes, vectors)                                                         \
    {Precision::name,      #name,          bytes,          vectors, name##_pack, name##_panel_rows, \
     name##_operand_words, name##_operand, name##_multiply},
inline constexpr PrecisionRow PRECISIONS[] = {EACH_PRECISION(PRECISION_ROW)};
#undef PRECISION_ROW

inline const PrecisionRow& row_of(Precision precision) { return PRECISIONS[static_cast<int>(precision)]; }
