// Calls of attention and of the processor's limits, which the page times.
//
// The loops are those of tools/limits.cpp. Here they do a given amount of work, because a browser's clock is
// too coarse to be read inside them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "buffer.h"
#include "parts.h"

namespace {

constexpr int W = 4, CHAINS = 4;
typedef float Vec __attribute__((vector_size(W * sizeof(float))));

// n numbers from -1 to 1; each seed has a sequence of its own.
Buffer noise(int64_t n, uint32_t seed) {
    Buffer x(n);
    for (int64_t i = 0; i < n; i++) {
        seed = 1664525 * seed + 1013904223;
        x[i] = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
    }
    return x;
}

struct Call {
    const Part& part;
    Attention a;
    Buffer q, k, v, out, scratch;
};

Attention sizes(int64_t H, int64_t N, int64_t d, int64_t Br, int64_t Bc, bool causal) {
    Attention a{};
    a.B = 1, a.H = H, a.Nq = a.Nk = N, a.d = d;
    a.causal = causal, a.scale = 1 / std::sqrt(static_cast<float>(d));
    a.Br = std::min(Br, N), a.Bc = std::min(Bc, N);
    a.threads = 1;
    return a;
}

}  // namespace

// A call of PARTS[part] over noise (1, H, N, d).
EXPORT(open_call)
Call* open_call(int32_t part, int32_t H, int32_t N, int32_t d, int32_t Br, int32_t Bc, int32_t causal) {
    const int64_t head = int64_t{N} * d, size = H * head;
    Attention a = sizes(H, N, d, Br, Bc, causal);
    const int64_t scratch = PARTS[part].scratch(a);
    auto* call =
        new Call{PARTS[part], a, noise(size, 1), noise(size, 2), noise(size, 3), Buffer(size), Buffer(scratch)};
    const auto matrices = [&](const float* data) { return Matrices{data, size, head, d, 1}; };
    call->a.q = matrices(call->q), call->a.k = matrices(call->k), call->a.v = matrices(call->v);
    call->a.out = call->out;
    return call;
}

EXPORT(run_call) void run_call(Call* call) { call->part.attention(call->a, call->scratch); }
EXPORT(output_of) const float* output_of(const Call* call) { return call->out; }
EXPORT(close_call) void close_call(Call* call) { delete call; }

EXPORT(scratch_floats)
int32_t scratch_floats(int32_t part, int32_t H, int32_t N, int32_t d, int32_t Br, int32_t Bc) {
    return static_cast<int32_t>(PARTS[part].scratch(sizes(H, N, d, Br, Bc, false)));
}

// Multiply-adds in registers; returns the floating-point operations.
EXPORT(multiply_adds) double multiply_adds(int32_t steps) {
    // volatile: the compiler must not see that 1 * 0.999 + 0.001 is 1, or it drops that chain.
    volatile float given[2] = {0.999f, 0.001f};
    Vec acc[CHAINS][3], factor = Vec{} + given[0], term = Vec{} + given[1];
    for (int i = 0; i < CHAINS; i++)  // all different, so that the compiler drops none
        for (int v = 0; v < 3; v++) acc[i][v] = Vec{} + static_cast<float>(3 * i + v);
    for (int32_t step = 0; step < steps; step++)
        for (int i = 0; i < CHAINS; i++)
            for (int v = 0; v < 3; v++) acc[i][v] = acc[i][v] * factor + term;
    Vec total{};
    for (int i = 0; i < CHAINS; i++) total += acc[i][0] + acc[i][1] + acc[i][2];
    volatile float kept = total[0];  // uses the results, so that the work is done
    (void)kept;
    return 2.0 * W * CHAINS * 3 * steps;
}

// Reads `floats` numbers, a multiple of 16, several times; returns the bytes.
EXPORT(read_floats) double read_floats(const float* data, int32_t floats, int32_t passes) {
    constexpr int64_t STRIDE = W * CHAINS;
    Vec total[CHAINS] = {};
    for (int32_t pass = 0; pass < passes; pass++) {
        asm volatile("" : : "r"(data) : "memory");  // each pass reads again
        for (int64_t b = 0; b + STRIDE <= floats; b += STRIDE) {
            for (int i = 0; i < CHAINS; i++) {
                Vec x;
                std::copy_n(data + b + i * W, W, reinterpret_cast<float*>(&x));
                total[i] += x;
            }
        }
    }
    for (int i = 1; i < CHAINS; i++) total[0] += total[i];
    volatile float kept = total[0][0];
    (void)kept;
    return 4.0 * static_cast<double>(floats) * passes;
}
