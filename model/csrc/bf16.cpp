// Weights in bfloat16, rounded to its 8 significant bits: half the memory. The sums are float32.
#include "bf16.h"

#include <cstring>

#include "precision.h"

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
    portable::multiply_bf16(y, x, {reinterpret_cast<const uint32_t*>(panel), s.width / 2}, rows, end, s.in,
                            add);
}
