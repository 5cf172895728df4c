// The activations that a step keeps for its backward pass, in one piece of scratch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model.h"
#include "products.h"

namespace training {

// Hands out consecutive pieces, each on cache lines of its own. From null it only counts.
class Space {
  public:
    explicit Space(float* start) : start(start) {}

    float* take(int64_t floats) {
        float* const piece = start ? start + used : nullptr;
        used += round_up(floats, LINE);
        return piece;
    }
    simd::Matrix matrix(int64_t rows, int64_t cols) {
        const int64_t ld = distance(cols);
        return {take(rows * ld), ld};
    }
    int64_t taken() const { return used; }

  private:
    float* start;
    int64_t used = 0;
};

// A layer's activations for its backward pass, a row per token. `normal` is a norm's result without its weight,
// `factor` that of normalize(). out and lse are the attention's, head by head; joined has out's heads in a row.
struct LayerActivations {
    simd::Matrix normal_1, qkv, joined, normal_2, h;
    float *factor_1, *factor_2, *out, *lse;

    LayerActivations(const Sizes& s, Space& space) {
        const int64_t M = s.rows();
        normal_1 = space.matrix(M, s.C), qkv = space.matrix(M, 3 * s.C), joined = space.matrix(M, s.C);
        normal_2 = space.matrix(M, s.C), h = space.matrix(M, 4 * s.C);
        factor_1 = space.take(M), factor_2 = space.take(M), out = space.take(M * s.C),
        lse = space.take(M * s.H);
    }
};

// Buffers that the layers use in turn: x is the residual stream, dx its gradient after a layer, dx_2 that
// between its attention and its MLP. normal, factor and dlogits belong to the head. dqkv has one buffer for
// even layers and one for odd ones: a layer's is in use until the next one's is complete.
struct SharedActivations {
    simd::Matrix x, normal, dlogits, dx, dx_2, djoined, dqkv[2], g, dh;
    float *factor, *losses;

    SharedActivations(const Sizes& s, Space& space) {
        const int64_t M = s.rows();
        for (simd::Matrix* each : {&x, &normal, &dx, &dx_2, &djoined}) *each = space.matrix(M, s.C);
        dlogits = space.matrix(M, s.V);
        for (simd::Matrix& each : dqkv) each = space.matrix(M, 3 * s.C);
        g = space.matrix(M, 4 * s.C), dh = space.matrix(M, 4 * s.C);
        factor = space.take(M), losses = space.take(M);
    }
};

}  // namespace training
