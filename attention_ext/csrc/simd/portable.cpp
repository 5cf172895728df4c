// The helpers of simd.h in portable C++: those of portable.h.
#include "simd/portable.h"

#include "simd/portable/vectors.h"
#include "simd/simd.h"

namespace simd {

int64_t lanes() { return portable::lanes(); }

int64_t panel() { return portable::panel(); }

int64_t rows() { return portable::rows(); }

const char* name() {
    return portable::W == 16  ? "portable C++, 16 floats"
           : portable::W == 8 ? "portable C++, 8 floats"
                              : "portable C++, 4 floats";
}

// The maximum, x - m and the sum; 2^x; where 2^x loses NaN, another sum. Without AVX-512 2^x selects by an
// instruction of its own.
int64_t softmax_instructions() { return 3 + (portable::KEEPS_NAN ? 8 : portable::W == 16 ? 11 + 1 : 12 + 1); }

bool may_use_tiles() { return true; }

void transpose(Matrix T, ConstMatrix X, int64_t rows, int64_t cols, float scale) {
    portable::transpose(T, X, rows, cols, scale);
}

void multiply(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth) {
    portable::multiply(C, A, B, rows, cols, depth);
}

void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first) {
    portable::multiply_add(C, A, B, rows, cols, depth, first);
}

void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale) {
    portable::dot_rows(s, x, B, rows, depth, scale);
}

void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols) {
    portable::add_weighted_rows(o, p, B, rows, cols);
}

float row_max(const float* x, int64_t n, float m) { return portable::row_max(x, n, m); }

float exp_sum(float* x, int64_t n, float m) { return portable::exp_sum(x, n, m); }

void scale_row(float* x, int64_t n, float a) { portable::scale_row(x, n, a); }

bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    return portable::online_softmax(S, rows, cols, first, m, l, correction);
}

void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a) {
    portable::scale_columns(C, rows, cols, a);
}

}  // namespace simd
