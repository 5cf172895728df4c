// Weights in int8 with a float32 scale for each output and group of inputs: a quarter of the memory, and 6 % of
// that for scales and offsets. Activations are whole numbers too, so the sums within a group are exact.
//
// Activations have 21 bits, in three bytes. With 8 bits the loss is higher by up to 0.0005 nats; and where two
// parts round a sum differently, an activation may go to the next step, which changes the logits and then the
// text. With 21 bits the logits of two parts differ by less than 1e-4. This costs 6 % of the speed (Zen 5).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "precision.h"

namespace {

constexpr int64_t GROUP = portable::INT8_GROUP;

void set_word(float* word, int32_t x) { std::memcpy(word, &x, sizeof x); }

}  // namespace

int64_t int8_panel_rows(int64_t in) { return portable::int8_blocks(in) + 2 * portable::int8_groups(in); }

// As portable::Int8Panel describes.
Buffer int8_pack(const float* W, const Panels& s) {
    const int64_t panel_words = int8_panel_rows(s.in) * s.width;
    Buffer packed(s.count() * panel_words);
    for (int64_t c = 0; c < s.out; c++) {
        float* word = packed + c / s.width * panel_words + c % s.width;
        for (int64_t k0 = 0; k0 < s.in; k0 += GROUP) {
            const float* w = W + c * s.in + k0;
            const int64_t n = std::min(GROUP, s.in - k0), blocks = portable::int8_blocks(n);
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
