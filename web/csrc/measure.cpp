// Calls of attention and the loops of the limits, which the page times.
#include <algorithm>
#include <cmath>

#include "page.h"
#include "parts.h"
#include "tools/limits.h"

namespace {

// A call over q, k, v and out (1, H, N, d), one after the other in data, and behind them the scratch.
Attention call_of(int64_t H, int64_t N, int64_t d, int64_t Br, int64_t Bc, float* data) {
    const int64_t head = N * d, size = H * head;
    const auto matrices = [&](int64_t i) { return Matrices{data + i * size, size, head, d, 1}; };
    const float scale = 1 / std::sqrt(static_cast<float>(d));
    Attention a{{1, H, N, N, d, /* causal */ false, scale, std::min(Br, N), std::min(Bc, N), /* threads */ 1}};
    a.q = matrices(0);
    a.k = matrices(1);
    a.v = matrices(2);
    a.out = data + 3 * size;
    return a;
}

}  // namespace

EXPORT(scratch_floats)
int32_t page_scratch_floats(int32_t part, int32_t H, int32_t N, int32_t d, int32_t Br, int32_t Bc) {
    return static_cast<int32_t>(PARTS[part].scratch(call_of(H, N, d, Br, Bc, nullptr)));
}

EXPORT(attend)
void page_attend(int32_t part, int32_t H, int32_t N, int32_t d, int32_t Br, int32_t Bc, float* data) {
    PARTS[part].attention(call_of(H, N, d, Br, Bc, data), data + int64_t{4} * H * N * d);
}

EXPORT(multiply_adds) double page_multiply_adds(int32_t steps) { return multiply_adds(steps); }

// `floats` is a multiple of 16.
EXPORT(read_floats) double page_read_floats(const float* data, int32_t floats) {
    return read_floats(data, floats, /* passes */ 1);
}
