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
    Attention a{};
    a.B = 1, a.H = H, a.Nq = a.Nk = N, a.d = d;
    a.q = matrices(0), a.k = matrices(1), a.v = matrices(2);
    a.out = data + 3 * size;
    a.scale = 1 / std::sqrt(static_cast<float>(d));
    a.Br = std::min(Br, N), a.Bc = std::min(Bc, N);
    a.threads = 1;
    return a;
}

}  // namespace

EXPORT(scratch_floats)
int32_t scratch_floats(int32_t part, int32_t H, int32_t N, int32_t d, int32_t Br, int32_t Bc) {
    return static_cast<int32_t>(PARTS[part].scratch(call_of(H, N, d, Br, Bc, nullptr)));
}

EXPORT(attend)
void attend(int32_t part, int32_t H, int32_t N, int32_t d, int32_t Br, int32_t Bc, float* data) {
    PARTS[part].attention(call_of(H, N, d, Br, Bc, data), data + int64_t{4} * H * N * d);
}

EXPORT(multiply_adds) double time_multiply_adds(int32_t steps) { return multiply_adds(steps); }

// Reads `floats` numbers, a multiple of 16, several times, as tools/limits.cpp does; returns the bytes. A
// browser's clock is too coarse to be read in between.
EXPORT(read_floats) double read_floats(const float* data, int32_t floats, int32_t passes) {
    constexpr int W = 4, CHAINS = 4;
    typedef float Vec __attribute__((vector_size(W * sizeof(float))));
    Vec total[CHAINS] = {};
    for (int32_t pass = 0; pass < passes; pass++) {
        asm volatile("" : : "r"(data) : "memory");  // each pass reads again
        for (int64_t b = 0; b < floats; b += W * CHAINS)
            for (int i = 0; i < CHAINS; i++) {
                Vec x;
                std::copy_n(data + b + i * W, W, reinterpret_cast<float*>(&x));
                total[i] += x;
            }
    }
    for (int i = 1; i < CHAINS; i++) total[0] += total[i];
    volatile float kept = total[0][0];
    (void)kept;
    return 4.0 * static_cast<double>(floats) * passes;
}
