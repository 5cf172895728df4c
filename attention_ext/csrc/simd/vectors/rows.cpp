// Rows: dot products with one, and the softmax of one.
#include <cmath>

#include "simd/portable.h"
#include "simd/vectors/vectors.h"

namespace portable {
namespace {

// One step of sums(): adds neighbouring chunks of C lanes. Of each block of lanes the sums of a fill the first
// half, those of b the second.
template <int C, int BLOCK, size_t... I> INLINE Vec pairwise(Vec a, Vec b, std::index_sequence<I...>) {
    constexpr auto source = [](int lane, int odd) {
        const int of_b = lane % BLOCK / (BLOCK / 2), i = lane % (BLOCK / 2);
        return of_b * W + lane / BLOCK * BLOCK + (2 * (i / C) + odd) * C + i % C;
    };
    return __builtin_shufflevector(a, b, source(I, 0)...) + __builtin_shufflevector(a, b, source(I, 1)...);
}

// Lane i <- sum(v[i]), each in the same order: first within 128 bits, then of these.
template <int N = W> INLINE Vec sums(Vec* v) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        constexpr bool within = 4 * N > W;
        for (int i = 0; i < N / 2; i++)
            v[i] =
                pairwise<within ? 1 : 4, within ? 4 : W>(v[2 * i], v[2 * i + 1], std::make_index_sequence<W>());
        return sums<N / 2>(v);
    }
}

}  // namespace

void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale) {
    const int64_t whole = depth / W * W;
    int64_t j = 0;
    for (; j + W <= rows; j += W) {
        const float* b = B.data + j * B.ld;
        Vec acc[W];
        for (int i = 0; i < W; i++) acc[i] = Vec{};
        for (int64_t c = 0; c < whole; c += W) {
            const Vec a = load(x + c);
            const float* p = b + c;
            for (int i = 0; i < W; i++, p += B.ld) acc[i] += a * load(p);
        }
        Vec dots = sums(acc);
        for (int64_t c = whole; c < depth; c++)  // the last features, one at a time
            for (int i = 0; i < W; i++) dots[i] += x[c] * b[i * B.ld + c];
        store(s + j, scale * dots);
    }
    for (; j < rows; j++) {
        const float* b = B.data + j * B.ld;
        Vec acc{};
        for (int64_t c = 0; c < whole; c += W) acc += load(x + c) * load(b + c);
        float dot = sum(acc);
        for (int64_t c = whole; c < depth; c++) dot += x[c] * b[c];
        s[j] = scale * dot;
    }
}

float row_max(const float* x, int64_t n, float m) {
    Vec most[2] = {splat(m), splat(m)};
    fold(x, n, m, [&](int chain, Vec v) { most[chain] = max(most[chain], v); });
    return largest(max(most[0], most[1]));
}

float exp_sum(float* x, int64_t n, float m) {
    Vec total{}, witness{};
    map(x, x, n, -INFINITY, [&](Vec v) {  // 2^-inf adds 0
        const Vec y = (v - m) * SIMD_LOG2E, e = exp2_bounded(y);
        total += e;
        if (!KEEPS_NAN) witness += y;
        return e;
    });
    return sum(nan_if(witness, total));
}

void scale_row(float* x, int64_t n, float a) {
    map(x, x, n, 0.0f, [a](Vec v) { return v * a; });
}

}  // namespace portable
