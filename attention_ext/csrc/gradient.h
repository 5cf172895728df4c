// The shape contract of a backward pass: the gradients of attention.h's `out` and `lse`, in float32.
//
//   P = exp(scale q k^T - lse)    dS = scale * P * (dout v^T - D + dlse), D = rowsum(dout * out)
//   dq = dS k                     dk = dS^T q                            dv = P^T dout
//
// q, dout (B, H, Nq, d); k, v (B, H, Nk, d): strided, the last dimension contiguous. out, dq (B, H, Nq, d),
// dk, dv (B, H, Nk, d), lse and dlse (B, H, Nq): contiguous; dlse may be null. causal as in attention.h.
#pragma once

#include "attention.h"

struct AttentionGradient : AttentionSizes {
    Matrices q, k, v, dout;
    const float *out, *lse, *dlse;
    float *dq, *dk, *dv;
};

// Part 4's backward pass; its scratch in floats.
int64_t flash_backward_scratch(const AttentionGradient&);
void flash_backward(const AttentionGradient&, float* scratch);
