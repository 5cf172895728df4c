// The SIMD helpers' interface on top of simd.ispc, whose exported functions have C names.
#include "simd/simd.h"

extern "C" {
int64_t ispc_lanes();
int64_t ispc_panel();
int64_t ispc_rows();
void ispc_transpose(float*, int64_t, const float*, int64_t, int64_t, int64_t, float);
void ispc_multiply(float*, int64_t, const float*, int64_t, int64_t, const float*, int64_t, int64_t, int64_t,
                   int64_t);
void ispc_multiply_add(float*, int64_t, const float*, int64_t, int64_t, const float*, int64_t, int64_t, int64_t,
                       int64_t, int64_t);
void ispc_multiply_bf16(float*, int64_t, const float*, int64_t, const uint32_t*, int64_t, int64_t, int64_t,
                        int64_t, bool);
void ispc_dot_rows(float*, const float*, const float*, int64_t, int64_t, int64_t, float);
void ispc_add_weighted_rows(float*, const float*, const float*, int64_t, int64_t, int64_t);
float ispc_row_max(const float*, int64_t, float);
float ispc_exp_sum(float*, int64_t, float);
void ispc_layer_norm(float*, const float*, const float*, const float*, int64_t);
void ispc_gelu(float*, int64_t);
void ispc_scale_row(float*, int64_t, float);
bool ispc_online_softmax(float*, int64_t, int64_t, int64_t, int64_t, float*, float*, float*);
void ispc_scale_columns(float*, int64_t, int64_t, int64_t, const float*);
}

namespace simd {

int64_t lanes() { return ispc_lanes(); }

int64_t panel() { return ispc_panel(); }

int64_t rows() { return ispc_rows(); }

const char* name() {
    return lanes() == 16 ? "ISPC, 16 floats" : lanes() == 8 ? "ISPC, 8 floats" : "ISPC, 4 floats";
}

void transpose(float* T, int64_t ldT, const float* X, int64_t ldX, int64_t rows, int64_t cols, float scale) {
    ispc_transpose(T, ldT, X, ldX, rows, cols, scale);
}

void multiply(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride, const float* B,
              int64_t ldB, int64_t rows, int64_t cols, int64_t depth) {
    ispc_multiply(C, ldC, A, row_stride, depth_stride, B, ldB, rows, cols, depth);
}

void multiply_add(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                  const float* B, int64_t ldB, int64_t rows, int64_t cols, int64_t depth, int64_t first) {
    ispc_multiply_add(C, ldC, A, row_stride, depth_stride, B, ldB, rows, cols, depth, first);
}

void multiply_bf16(float* C, int64_t ldC, const float* A, int64_t ldA, const uint32_t* B, int64_t ldB,
                   int64_t rows, int64_t cols, int64_t depth, bool add) {
    ispc_multiply_bf16(C, ldC, A, ldA, B, ldB, rows, cols, depth, add);
}

void dot_rows(float* s, const float* x, const float* B, int64_t ldB, int64_t rows, int64_t depth, float scale) {
    ispc_dot_rows(s, x, B, ldB, rows, depth, scale);
}

void add_weighted_rows(float* o, const float* p, const float* B, int64_t ldB, int64_t rows, int64_t cols) {
    ispc_add_weighted_rows(o, p, B, ldB, rows, cols);
}

float row_max(const float* x, int64_t n, float m) { return ispc_row_max(x, n, m); }

float exp_sum(float* x, int64_t n, float m) { return ispc_exp_sum(x, n, m); }

void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n) {
    ispc_layer_norm(y, x, weight, bias, n);
}

void gelu(float* x, int64_t n) { ispc_gelu(x, n); }

void scale_row(float* x, int64_t n, float a) { ispc_scale_row(x, n, a); }

bool online_softmax(float* S, int64_t ldS, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    return ispc_online_softmax(S, ldS, rows, cols, first, m, l, correction);
}

void scale_columns(float* C, int64_t ldC, int64_t rows, int64_t cols, const float* a) {
    ispc_scale_columns(C, ldC, rows, cols, a);
}

}  // namespace simd
