// Layers of the model: the layer norm, GELU and its gradient.
#include <cmath>

#include "simd/portable.h"
#include "simd/vectors/vectors.h"

namespace portable {
namespace {

// q(a) with Phi(-a) = 2^q(a) for a >= 0, Phi being the normal distribution function: a polynomial of degree 8,
// minimax in a * 2^q(a) with an absolute error of 4e-8, with constant term -1. q falls without bound.
constexpr float Q[] = {-1.0f,           -1.15111101f,    -4.59162146e-1f, -5.26276119e-2f, 7.24542048e-3f,
                       -2.72075355e-4f, -1.31473338e-4f, 2.80569584e-5f,  -1.90206663e-6f};
constexpr int DEGREE = 8;

constexpr float NORMAL_DENSITY = 0.398942280f;  // of the normal distribution at 0: 1 / sqrt(2 pi)

// Phi(x), with Phi(-|x|) = 2^q(|x|)
INLINE Vec normal(Vec x) {
    const Vec magnitude = bit_cast<Vec>(bit_cast<IntVec>(x) & 0x7fffffff);
    Vec q = splat(Q[DEGREE]);
    for (int i = DEGREE - 1; i >= 0; i--) q = q * magnitude + Q[i];
    const Vec tail = exp2_bounded(q);
    return x > 0 ? 1.0f - tail : tail;
}

INLINE Vec gelu(Vec x) { return x * normal(x); }

// x / (1 + 2^-y), by an exponent that is never positive
INLINE Vec gelu_tanh(Vec x) {
    constexpr float ROOT = 0.797884561f;  // sqrt(2 / pi)
    const Vec y = x * (1.0f + 0.044715f * x * x) * (2 * ROOT * SIMD_LOG2E);
    const Vec power = exp2_bounded(y > 0 ? -y : y);
    return x * (y > 0 ? splat(1.0f) : power) / (1.0f + power);
}

}  // namespace

void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n) {
    const auto sum_of = [&](auto term, float nothing) {  // term(nothing) is 0
        Vec sums[2] = {};
        fold(x, n, nothing, [&](int chain, Vec v) { sums[chain] += term(v); });
        return sum(sums[0] + sums[1]);
    };
    const float mean = sum_of([](Vec v) { return v; }, 0.0f) / n;
    const float variance = sum_of([mean](Vec v) { return (v - mean) * (v - mean); }, mean) / n;
    const float factor = 1 / std::sqrt(variance + LAYER_NORM_EPSILON);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const Vec v = (load(x + i) - mean) * factor * load(weight + i);
        store(y + i, bias ? v + load(bias + i) : v);
    }
    for (; i < n; i++) y[i] = (x[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

void gelu(float* x, int64_t n) {
    map(x, x, n, 0.0f, [](Vec v) { return gelu(v); });
}

void gelu_tanh(float* x, int64_t n) {
    map(x, x, n, 0.0f, [](Vec v) { return gelu_tanh(v); });
}

void gelu_gradient(float* dx, float* y, const float* x, int64_t n) {
    const auto step = [](Vec v, Vec d, Vec& value) {
        const Vec below = normal(v);
        value = v * below;
        return d * (below + v * NORMAL_DENSITY * exp2_bounded(v * v * (-0.5f * SIMD_LOG2E)));
    };
    int64_t i = 0;
    Vec value;
    for (; i + W <= n; i += W) {
        store(dx + i, step(load(x + i), load(dx + i), value));
        store(y + i, value);
    }
    if (i == n) return;
    store_part(dx + i, step(load_part(x + i, n - i, 0.0f), load_part(dx + i, n - i, 0.0f), value), n - i);
    store_part(y + i, value, n - i);
}

}  // namespace portable
