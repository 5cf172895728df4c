// The SIMD helpers as scalar loops, compiled without vectorisation: the baseline of the others.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd/constants.h"
#include "simd/simd.h"

namespace simd {

constexpr int64_t W = 16;

// 2^x, or 0 where that would be denormal.
static float exp2_or_zero(float x) { return x < SIMD_EXP2_LEAST ? 0.0f : std::exp2(x); }

int64_t lanes() { return W; }  // nothing depends on it here; the tiles are as for AVX-512

int64_t panel() { return 48; }

int64_t rows() { return 1; }

const char* name() { return "off (plain loops)"; }

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

// Column c of row k.
static float element(Bf16Pairs B, int64_t k, int64_t c) {
    const uint32_t pair = B.data[k * B.ld + c / (2 * W) * W + c % W];
    const uint32_t bits = c / W % 2 ? pair & 0xffff0000 : pair << 16;
    float b;
    std::memcpy(&b, &bits, sizeof b);
    return b;
}

void multiply_bf16(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < cols; c++) {
            float sum = add ? C.data[i * C.ld + c] : 0;
            for (int64_t k = 0; k < depth; k++) sum += A.data[i * A.ld + k] * element(B, k, c);
            C.data[i * C.ld + c] = sum;
        }
    }
}

void to_fixed(uint32_t* row, const float* x, int64_t n) {
    const int64_t blocks = int8_blocks(n);
    float largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
        finite = finite && std::isfinite(x[i]);
    }
    const Int8Scale scale(finite ? largest : INFINITY);
    std::fill_n(row, 3 * blocks, 0u);
    for (int64_t i = 0; finite && i < n; i++) {
        const int shift = static_cast<int>(8 * (i % 4));
        const int number = static_cast<int>(std::nearbyint(x[i] * scale.factor)) + (1 << (SIMD_INT8_BITS - 1));
        for (int64_t digit = 0; digit < 3; digit++)
            row[digit * blocks + i / 4] |= static_cast<uint32_t>(number >> (14 - 7 * digit) & 127) << shift;
    }
    std::memcpy(row + 3 * blocks, &scale.scale, sizeof scale.scale);
}

void multiply_int8(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t depth, bool add) {
    const int64_t blocks = int8_blocks(depth);
    const auto byte = [](uint32_t word, int j) { return static_cast<int>(word >> 8 * j & 255); };
    for (int64_t i = 0; i < rows; i++) {
        const uint32_t* a = A.data + i * A.ld;
        float a_scale;
        std::memcpy(&a_scale, a + 3 * blocks, sizeof a_scale);
        for (int64_t c = 0; c < cols; c++) {
            const uint32_t* b = B.data + c;
            float total = 0;
            for (int64_t k = 0; k < blocks;) {
                int32_t sums[3] = {};
                float b_scale;
                std::memcpy(sums, b, sizeof sums[0]);
                std::memcpy(&b_scale, b + B.ld, sizeof b_scale);
                b += 2 * B.ld;
                for (const int64_t end = std::min(blocks, k + SIMD_INT8_GROUP / 4); k < end; k++, b += B.ld)
                    for (int digit = 0; digit < 3; digit++)
                        for (int j = 0; j < 4; j++)
                            sums[digit] += byte(a[digit * blocks + k], j) * static_cast<int8_t>(byte(*b, j));
                const float upper = static_cast<float>(128 * sums[0] + sums[1]);
                total += (128 * upper + static_cast<float>(sums[2])) * b_scale;
            }
            float& to = C.data[i * C.ld + c];
            to = add ? to + total * a_scale : total * a_scale;
        }
    }
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

void add_weighted_rows_bf16(float* o, const float* p, Bf16Pairs B, int64_t rows, int64_t cols) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t c = 0; c < cols; c++) o[c] += p[j] * element(B, j, c);
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

void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n) {
    float mean = 0, variance = 0;
    for (int64_t i = 0; i < n; i++) mean += x[i] / n;
    for (int64_t i = 0; i < n; i++) variance += (x[i] - mean) * (x[i] - mean) / n;
    for (int64_t i = 0; i < n; i++)
        y[i] =
            (x[i] - mean) / std::sqrt(variance + SIMD_LAYER_NORM_EPSILON) * weight[i] + (bias ? bias[i] : 0.0f);
}

// Phi(x), or 0 where that would be denormal.
static float normal(float x) {
    const float tail = 0.5f * std::erfc(-0.707106781f * x);
    return tail < SIMD_LEAST_NORMAL ? 0.0f : tail;
}

void gelu(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= normal(x[i]);
}

void gelu_gradient(float* dx, float* y, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float v = x[i], below = normal(v);
        dx[i] *= below + v * SIMD_NORMAL_DENSITY * exp_or_zero(-0.5f * v * v);
        y[i] = v * below;
    }
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

void softmax_gradient(Matrix S, Matrix dP, int64_t rows, int64_t cols, int64_t first, const float* lse,
                      const float* rest, const float* D) {
    for (int64_t j = 0; j < rows; j++) {
        for (int64_t c = 0; c < cols; c++) {
            float &s = S.data[j * S.ld + c], &ds = dP.data[j * dP.ld + c];
            if (j >= first + c + W) continue;  // not a number yet
            const bool live = j < first + c;
            const float x = s - lse[c] - rest[c];
            s = live ? exp2_or_zero(x > 0 ? 0 : x) : 0;
            ds = live ? s * (ds - D[c]) : 0;
        }
    }
}

void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++) C.data[i * C.ld + c] *= a[c];
}

}  // namespace simd
