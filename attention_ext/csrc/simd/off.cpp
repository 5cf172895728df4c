// The SIMD helpers as plain loops, compiled without vectorisation: what the others are measured against.
#include <cmath>
#include <cstring>
#include <limits>

#include "simd/constants.h"
#include "simd/simd.h"

namespace simd {

constexpr int64_t W = 16;

int64_t lanes() { return W; }  // nothing depends on it here; the tiles are as for AVX-512

int64_t panel() { return 48; }

int64_t rows() { return 1; }

const char* name() { return "off (plain loops)"; }

void transpose(float* T, int64_t ldT, const float* X, int64_t ldX, int64_t rows, int64_t cols, float scale) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) T[c * ldT + r] = scale * X[r * ldX + c];
}

void multiply(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride, const float* B,
              int64_t ldB, int64_t rows, int64_t cols, int64_t depth) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++) C[i * ldC + c] = 0;
    multiply_add(C, ldC, A, row_stride, depth_stride, B, ldB, rows, cols, depth, depth);
}

void multiply_add(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                  const float* B, int64_t ldB, int64_t rows, int64_t cols, int64_t depth, int64_t first) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t c = k < first ? 0 : k - first + 1; c < cols; c++)
                C[i * ldC + c] += A[i * row_stride + k * depth_stride] * B[k * ldB + c];
}

void multiply_bf16(float* C, int64_t ldC, const float* A, int64_t ldA, const uint32_t* B, int64_t ldB,
                   int64_t rows, int64_t cols, int64_t depth, bool add) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < cols; c++) {
            float sum = add ? C[i * ldC + c] : 0;
            for (int64_t k = 0; k < depth; k++) {
                const uint32_t pair = B[k * ldB + c / (2 * W) * W + c % W];
                const uint32_t bits = c / W % 2 ? pair & 0xffff0000 : pair << 16;
                float b;
                std::memcpy(&b, &bits, sizeof b);
                sum += A[i * ldA + k] * b;
            }
            C[i * ldC + c] = sum;
        }
    }
}

void dot_rows(float* s, const float* x, const float* B, int64_t ldB, int64_t rows, int64_t depth, float scale) {
    for (int64_t j = 0; j < rows; j++) {
        float sum = 0;
        for (int64_t c = 0; c < depth; c++) sum += x[c] * B[j * ldB + c];
        s[j] = scale * sum;
    }
}

void add_weighted_rows(float* o, const float* p, const float* B, int64_t ldB, int64_t rows, int64_t cols) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t c = 0; c < cols; c++) o[c] += p[j] * B[j * ldB + c];
}

float row_max(const float* x, int64_t n, float m) {
    for (int64_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

float exp_sum(float* x, int64_t n, float m) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] = std::exp(x[i] - m);
    return sum;
}

void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n) {
    float mean = 0, variance = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i] / n;
    for (int64_t i = 0; i < n; i++) variance += (x[i] - mean) * (x[i] - mean) / n;
    for (int64_t i = 0; i < n; i++)
        y[i] =
            (x[i] - mean) / std::sqrt(variance + SIMD_LAYER_NORM_EPSILON) * weight[i] + (bias ? bias[i] : 0.0f);
}

void gelu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= 0.5f * std::erfc(-0.707106781f * x[i]);
}

void scale_row(float* x, int64_t n, float a) {
    for (int64_t i = 0; i < n; i++) x[i] *= a;
}

bool online_softmax(float* S, int64_t ldS, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    constexpr float low = -std::numeric_limits<float>::infinity();
    bool changed = false;
    for (int64_t c = 0; c < cols; c++) {
        const int64_t live = first + c < rows ? first + c : rows;
        float most = m[c], sum = 0;
        for (int64_t j = 0; j < live; j++) most = S[j * ldS + c] > most ? S[j * ldS + c] : most;
        const float after = most > m[c] + SIMD_MAX_LAG ? most : m[c];
        const float subtracted = after == low ? 0 : after;  // -inf - -inf would be NaN
        for (int64_t j = 0; j < live; j++) sum += S[j * ldS + c] = std::exp2(S[j * ldS + c] - subtracted);
        correction[c] = std::exp2(m[c] - subtracted);
        l[c] = correction[c] * l[c] + sum;
        m[c] = after;
        changed |= correction[c] != 1;
    }
    return changed;
}

void scale_columns(float* C, int64_t ldC, int64_t rows, int64_t cols, const float* a) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++) C[i * ldC + c] *= a[c];
}

}  // namespace simd
