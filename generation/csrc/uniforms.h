// The uniform numbers of a seed: those of torch.rand(dtype=torch.float64) on the CPU.
#pragma once

#include <cstdint>
#include <random>

class Uniforms {
  public:
    // As in PyTorch, only the lower 32 bits of a seed are used.
    explicit Uniforms(uint64_t seed) : bits(static_cast<uint32_t>(seed)) {}

    // The next number in [0, 1): the lower 53 bits of two draws, the upper one first.
    double next() {
        const uint64_t upper = bits(), lower = bits();
        return static_cast<double>((upper << 32 | lower) & ((uint64_t{1} << 53) - 1)) * 0x1p-53;
    }

  private:
    std::mt19937 bits;
};
