// The SIMD helpers on top of simd.ispc: the products and the softmax. The others are the portable ones.
#include "simd/simd.h"

struct Operands {  // of simd.ispc
    simd::Matrix C;
    simd::Strided A;
    simd::ConstMatrix B;
};

extern "C" {
int64_t ispc_lanes();
int64_t ispc_panel();
int64_t ispc_rows();
void ispc_product(const Operands&, int64_t, int64_t, int64_t, int64_t, bool);
void ispc_dot_rows(float*, const float*, const float*, int64_t, int64_t, int64_t, float);
void ispc_add_weighted_rows(float*, const float*, const float*, int64_t, int64_t, int64_t);
float ispc_exp_sum(float*, int64_t, float);
bool ispc_online_softmax(float*, int64_t, int64_t, int64_t, int64_t, float*, float*, float*);
}

namespace simd {

int64_t lanes() { return ispc_lanes(); }
int64_t panel() { return ispc_panel(); }
int64_t rows() { return ispc_rows(); }
bool may_use_tiles() { return false; }

const char* name() {
    return lanes() == 16 ? "ISPC, 16 floats" : lanes() == 8 ? "ISPC, 8 floats" : "ISPC, 4 floats";
}

// As simd.ispc has them: the maximum, x - m, 2^x, the sum and that of the witness.
int64_t softmax_instructions() { return lanes() == 16 ? 15 : 16; }

void multiply(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth) {
    ispc_product({C, A, B}, rows, cols, depth, depth, false);
}

void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first) {
    ispc_product({C, A, B}, rows, cols, depth, first, true);
}

void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale) {
    ispc_dot_rows(s, x, B.data, B.ld, rows, depth, scale);
}

void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols) {
    ispc_add_weighted_rows(o, p, B.data, B.ld, rows, cols);
}

float exp_sum(float* x, int64_t n, float m) { return ispc_exp_sum(x, n, m); }

bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    return ispc_online_softmax(S.data, S.ld, rows, cols, first, m, l, correction);
}

void transpose(Matrix T, ConstMatrix X, int64_t rows, int64_t cols, float scale) {
    portable::transpose(T, X, rows, cols, scale);
}
float row_max(const float* x, int64_t n, float m) { return portable::row_max(x, n, m); }
void scale_row(float* x, int64_t n, float a) { portable::scale_row(x, n, a); }
void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a) {
    portable::scale_columns(C, rows, cols, a);
}

}  // namespace simd
