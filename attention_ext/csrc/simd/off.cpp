// The SIMD helpers as scalar loops, compiled without vectorisation: the baseline of the others.
#include <cmath>
#include <limits>

#include "simd/constants.h"
#include "simd/simd.h"

namespace simd {

// 2^x, or 0 where that would be denormal.
static float exp2_or_zero(float x) { return x < SIMD_EXP2_LEAST ? 0.0f : std::exp2(x); }

int64_t lanes() { return 16; }  // nothing depends on it here; the tiles are as for AVX-512
int64_t panel() { return 48; }
int64_t rows() { return 1; }
const char* name() { return "off (scalar loops)"; }
int64_t softmax_instructions() { return 0; }
bool may_use_tiles() { return false; }

void transpose(Matrix T, ConstMatrix X, int64_t rows, int64_t cols, float scale) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) T.data[c * T.ld + r] = scale * X.data[r * X.ld + c];
}

void multiply(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++) C.data[i * C.ld + c] = 0;
    multiply_add(C, A, B, rows, cols, depth, depth);
}

void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t c = k < first ? 0 : k - first + 1; c < cols; c++)
                C.data[i * C.ld + c] += A.data[i * A.row_stride + k * A.depth_stride] * B.data[k * B.ld + c];
}

void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale) {
    for (int64_t j = 0; j < rows; j++) {
        float sum = 0;
        for (int64_t c = 0; c < depth; c++) sum += x[c] * B.data[j * B.ld + c];
        s[j] = scale * sum;
    }
}

void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t c = 0; c < cols; c++) o[c] += p[j] * B.data[j * B.ld + c];
}

float row_max(const float* x, int64_t n, float m) {
    for (int64_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

float exp_sum(float* x, int64_t n, float m) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] = exp_or_zero(x[i] - m);
    return sum;
}

void scale_row(float* x, int64_t n, float a) {
    for (int64_t i = 0; i < n; i++) x[i] *= a;
}

bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    constexpr float low = -std::numeric_limits<float>::infinity();
    bool changed = false;
    for (int64_t c = 0; c < cols; c++) {
        const int64_t live = first + c < rows ? first + c : rows;
        float* const s = S.data + c;
        float most = m[c], sum = 0;
        for (int64_t j = 0; j < live; j++) most = s[j * S.ld] > most ? s[j * S.ld] : most;
        const float after = most > m[c] + SIMD_MAX_LAG ? most : m[c];
        const float subtracted = after == low ? 0 : after;  // -inf - -inf would be NaN
        for (int64_t j = 0; j < live; j++) sum += s[j * S.ld] = exp2_or_zero(s[j * S.ld] - subtracted);
        correction[c] = exp2_or_zero(m[c] - subtracted);
        l[c] = correction[c] * l[c] + sum;
        m[c] = after;
        changed |= correction[c] != 1;
    }
    return changed;
}

void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++) C.data[i * C.ld + c] *= a[c];
}

}  // namespace simd
