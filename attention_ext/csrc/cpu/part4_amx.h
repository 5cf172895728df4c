// Part 4 in bfloat16 with Intel's AMX, the instructions that multiply tiles of matrices.
#pragma once

#include "attention.h"

namespace amx {

// Whether this processor, its kernel, the build and the shape permit it. Asks the kernel once.
bool takes(const AttentionOf<Bf16>&);

int64_t scratch(const AttentionOf<Bf16>&);  // in floats
void attention(const AttentionOf<Bf16>&, float* scratch);

}  // namespace amx
