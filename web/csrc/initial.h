// The weights before the first training step: GPT-2's, from PyTorch's random numbers.
//
// PyTorch draws a module's own weights before the GPT's: those draws are skipped. The head's weight is wte,
// whose last values are the head's; c_proj's are drawn once more.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "generation/csrc/sampling.h"
#include "training/csrc/training_step.h"

namespace training {

constexpr int64_t TOGETHER = 16;  // numbers that PyTorch makes from as many draws
constexpr float STD = 0.02f;      // of the weights
constexpr float PLACES = 0.1f;    // the largest number in the table of positions
constexpr float PI = 3.14159265358979323846f;

// The stream of torch.manual_seed() on a CPU.
class Random : public Uniforms {
  public:
    using Uniforms::Uniforms;

    void skip_uniform(int64_t count) { bits.discard(static_cast<uint64_t>(count)); }
    void skip_normal(int64_t count) { skip_uniform(count + (count % TOGETHER ? TOGETHER : 0)); }

    // to (count), at least 16 <- as torch.nn.init.normal_()
    void normal(float* to, int64_t count, float std) {
        for (int64_t i = 0; i < count; i++) to[i] = uniform();
        for (int64_t i = 0; i + TOGETHER <= count; i += TOGETHER) transform(to + i, std);
        if (count % TOGETHER == 0) return;
        float* const last = to + count - TOGETHER;
        for (int64_t i = 0; i < TOGETHER; i++) last[i] = uniform();
        transform(last, std);
    }

  private:
    float uniform() { return static_cast<float>(bits() & ((1u << 24) - 1)) * 0x1p-24f; }

    // Box & Muller 1958
    static void transform(float* x, float std) {
        for (int64_t i = 0; i < TOGETHER / 2; i++) {
            const float radius = std::sqrt(-2 * std::log(1 - x[i])), angle = 2 * PI * x[i + TOGETHER / 2];
            x[i] = radius * std::cos(angle) * std;
            x[i + TOGETHER / 2] = radius * std::sin(angle) * std;
        }
    }
};

// Vaswani et al.'s position encoding (T, C), times PLACES.
inline void sinusoids(float* to, int64_t T, int64_t C) {
    const float step = static_cast<float>(-std::log(10'000.0) / static_cast<double>(C));
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < C; c++) {
            const float frequency = std::exp(static_cast<float>(c - c % 2) * step);
            const float angle = static_cast<float>(t) * frequency;
            *to++ = PLACES * (c % 2 ? std::cos(angle) : std::sin(angle));
        }
}

// Writes the values with which Trainer of training/trainer.py begins after torch.manual_seed(seed), to 1e-6.
// The averages are the same. Returns the first place in the text, torch.rand()'s next number. At least 16
// numbers in each matrix. The model has a table of positions.
inline double begin_values(const Sizes& s, const std::vector<Parameter>& parameters, uint64_t seed) {
    Random random(seed);
    const float residual = STD / std::sqrt(2 * static_cast<float>(s.L));
    const Parameter& places = parameters[WPE];
    const auto normal = [&](int64_t i, float std) {
        const Parameter& p = parameters[i];
        random.normal(p.value, p.shape.count, std);
    };
    const auto layers = [&](std::initializer_list<int64_t> matrices, float std) {
        for (int64_t l = 0; l < s.L; l++)
            for (const int64_t matrix : matrices) normal(FIRST_LAYER + l * OF_LAYER + matrix, std);
    };
    // The trainer makes a model and one for the averages, which then takes the first one's values. The second
    // one's are dropped.
    const auto model = [&] {
        random.skip_normal(s.V * s.C);
        random.skip_normal(places.shape.count);
        random.skip_uniform(12 * s.C * s.C * s.L + s.V * s.C);
        normal(WTE, STD);
        random.skip_normal(places.shape.count);
        layers({C_ATTN, ATTN_PROJ, C_FC, MLP_PROJ}, STD);
        normal(WTE, STD);
        layers({ATTN_PROJ, MLP_PROJ}, residual);
    };
    for (const Parameter& p : parameters) std::fill_n(p.value, p.shape.count, 1.0f);  // the norms'
    model();
    sinusoids(places.value, s.T, s.C);
    for (const Parameter& p : parameters) std::copy_n(p.value, p.shape.count, p.average);
    model();
    for (const Parameter& p : parameters) std::copy_n(p.average, p.shape.count, p.value);
    return random.next();
}

}  // namespace training
