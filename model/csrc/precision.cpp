// Weights in each precision: packed, and multiplied by rows of activations. The sums are float32.
#include "precision.h"

#include <cmath>
#include <cstring>

#include "bf16.h"

void multiply_some(simd::Matrix C, const simd::Strided& A, simd::ConstMatrix B, int64_t rows, int64_t cols,
                   int64_t depth, int64_t some, bool add) {
    for (int64_t k = 0; k < depth; k += some) {
        const simd::Strided a{A.data + k * A.depth_stride, A.row_stride, A.depth_stride};
        const simd::ConstMatrix b{B.data + k * B.ld, B.ld};
        const int64_t terms = std::min(some, depth - k);
        if (add || k > 0)
            portable::multiply_add(C, a, b, rows, cols, terms, terms);
        else
            portable::multiply(C, a, b, rows, cols, terms);
    }
}

// One row reads its panel as one stream already.
static bool is_few(int64_t rows) { return rows > 1 && rows <= portable::FEW_ROWS; }

// ---- float32: the panels as they are ----

void fp32_pack_panel(float* panel, const float* W, const float* scale, const Panels& s, int64_t p,
                     bool transposed) {
    const int64_t o = p * s.width, rows = s.rows(p), padded = round_up(rows, portable::lanes());
    if (!transposed) portable::transpose({panel, s.width}, {W + o * s.in, s.in}, rows, s.in, 1.0f);
    for (int64_t k = 0; k < s.in; k++, panel += s.width) {
        if (transposed)
            for (int64_t i = 0; i < rows; i++) panel[i] = W[k * s.out + o + i] * (scale ? scale[o + i] : 1.0f);
        else if (scale)
            portable::scale_row(panel, rows, scale[k]);
        std::fill(panel + rows, panel + padded, 0.0f);
    }
}

RUNS_ONCE void pack_rows(float* to, int64_t width, const simd::Strided& W, int64_t rows, int64_t terms) {
    if (W.depth_stride == 1) return portable::transpose({to, width}, {W.data, W.row_stride}, rows, terms, 1.0f);
    for (int64_t k = 0; k < terms; k++) std::copy_n(W.data + k * W.depth_stride, rows, to + k * width);
}

void fp32_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels& s, int64_t rows,
                   int64_t first, int64_t end, bool add) {
    // Rows of a narrow panel at a time: half of them stay in L1. Wide panels are for few rows of x.
    constexpr int64_t DEPTH = 256;
    y.data += first;
    if (is_few(rows) && (end - first) % portable::lanes() == 0)
        return portable::multiply_few(y, x, {panel + first, s.width}, rows, end - first, s.in, add);
    multiply_some(y, {x.data, x.ld, 1}, {panel + first, s.width}, rows, end - first, s.in,
                  s.width > portable::panel() ? s.in : DEPTH, add);
}

// ---- bfloat16: rounded to its 8 significant bits, half the memory ----

// Two weights share 32 bits, as portable::Bf16Pairs describes.
RUNS_ONCE void bf16_pack(float* to, const float* from, int64_t rows, int64_t width) {
    const int64_t lanes = portable::lanes();
    for (int64_t pairs = 0; pairs < rows * width / 2; pairs += lanes, from += 2 * lanes)
        for (int64_t i = 0; i < lanes; i++) {
            const uint32_t pair = rounded(from[i]).bits | uint32_t{rounded(from[lanes + i]).bits} << 16;
            std::memcpy(to + pairs + i, &pair, sizeof pair);
        }
}

// The columns before the first are computed too: a pair cannot be split.
void bf16_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels& s, int64_t rows,
                   int64_t, int64_t end, bool add) {
    const portable::Bf16Pairs weights{reinterpret_cast<const uint32_t*>(panel), s.width / 2};
    if (is_few(rows)) return portable::multiply_few(y, x, weights, rows, end, s.in, add);
    portable::multiply_bf16(y, x, weights, rows, end, s.in, add);
}

// ---- int8 with a float32 scale for each output and group of inputs: 27 % of the memory ----
//
// Activations are integers too, so the sums within a group are exact; with 21 bits the logits of two parts
// differ by less than 1e-4.

int64_t int8_panel_rows(int64_t in) { return portable::int8_blocks(in) + 2 * portable::int8_groups(in); }

// As portable::Int8Panel describes. The columns are in the inner loops, which are vectors.
void int8_pack(float* to, const float* from, int64_t rows, int64_t width) {
    auto* const sums = reinterpret_cast<int32_t*>(to);
    float* const scales = to + width;
    std::fill_n(sums, (2 + portable::int8_blocks(rows)) * width, 0);
    std::fill_n(scales, width, 0.0f);
    for (int64_t k = 0; k < rows; k++)
        for (int64_t c = 0; c < width; c++) scales[c] = std::max(scales[c], std::fabs(from[k * width + c]));
    for (int64_t c = 0; c < width; c++) scales[c] /= 127;
    for (int64_t k = 0; k < rows; k++)
        for (int64_t c = 0; c < width; c++) {
            const float rounded = std::nearbyint(from[k * width + c] / (scales[c] > 0 ? scales[c] : 1));
            const auto weight = static_cast<int32_t>(std::clamp(rounded, -127.0f, 127.0f));
            sums[(2 + k / 4) * width + c] |= static_cast<int32_t>((weight & 255u) << (8 * (k % 4)));
            sums[c] -= 64 * weight;
        }
}

int64_t int8_operand_words(int64_t in) { return round_up(portable::fixed_words(in), portable::lanes()); }

void int8_operand(float* to, const float* x, int64_t in) {
    portable::to_fixed(reinterpret_cast<uint32_t*>(to), x, in);
}

void int8_multiply(simd::Matrix y, simd::ConstMatrix x, const float* panel, const Panels& s, int64_t rows,
                   int64_t first, int64_t end, bool add) {
    const int64_t skipped = first / portable::lanes() * portable::lanes();
    y.data += skipped;
    portable::multiply_int8(y, {reinterpret_cast<const uint32_t*>(x.data), x.ld},
                            {reinterpret_cast<const uint32_t*>(panel) + skipped, s.width}, rows, end - skipped,
                            s.in, add);
}
