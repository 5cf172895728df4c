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

Buffer fp32_pack(const float* W, const Panels& s) {
    Buffer packed(s.size());
    for (int64_t p = 0; p < s.count(); p++)
        fp32_pack_panel(packed + p * s.width * s.in, W, nullptr, s, p, false);
    return packed;
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
Buffer bf16_pack(const float* W, const Panels& s) {
    const Buffer floats = fp32_pack(W, s);
    const int64_t lanes = portable::lanes();
    Buffer packed(s.size() / 2);
    for (int64_t i = 0; i < s.size() / 2; i++) {
        const float* lower = floats + i / lanes * 2 * lanes + i % lanes;
        const uint32_t pair = rounded(lower[0]).bits | uint32_t{rounded(lower[lanes]).bits} << 16;
        std::memcpy(packed + i, &pair, sizeof pair);
    }
    return packed;
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

static void set_word(float* word, int32_t x) { std::memcpy(word, &x, sizeof x); }

int64_t int8_panel_rows(int64_t in) { return portable::int8_blocks(in) + 2 * portable::int8_groups(in); }

// As portable::Int8Panel describes.
Buffer int8_pack(const float* W, const Panels& s) {
    const int64_t panel_words = int8_panel_rows(s.in) * s.width;
    Buffer packed(s.count() * panel_words);
    for (int64_t c = 0; c < s.out; c++) {
        float* word = packed + c / s.width * panel_words + c % s.width;
        for (int64_t k0 = 0; k0 < s.in; k0 += portable::INT8_GROUP) {
            const float* w = W + c * s.in + k0;
            const int64_t n = std::min(portable::INT8_GROUP, s.in - k0), blocks = portable::int8_blocks(n);
            float largest = 0;
            for (int64_t k = 0; k < n; k++) largest = std::max(largest, std::fabs(w[k]));
            const float scale = largest / 127;
            int32_t sum = 0;
            for (int64_t block = 0; block < blocks; block++) {
                uint32_t bytes = 0;
                for (int64_t k = 4 * block; k < std::min(n, 4 * block + 4); k++) {
                    const float rounded = scale > 0 ? std::nearbyint(w[k] / scale) : 0;
                    const int32_t weight = static_cast<int32_t>(std::clamp(rounded, -127.0f, 127.0f));
                    sum += weight;
                    bytes |= (static_cast<uint32_t>(weight) & 255) << (8 * (k % 4));
                }
                set_word(word + (2 + block) * s.width, static_cast<int32_t>(bytes));
            }
            set_word(word, -64 * sum);
            word[s.width] = scale;
            word += (2 + blocks) * s.width;
        }
    }
    return packed;
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
