// What passes.cu and update.cu share: how weights are packed for mma.sync.
//
// A packed matrix W (n, k), n a multiple of 8 and k of BLOCK_K, is blocks of 8 rows and BLOCK_K columns. A
// block is 32 lanes x 16 bytes: a lane reads its B of mma.sync for a whole block with one load.
#pragma once
#include "call.h"
#include "mma.h"

// A launch may begin while the ones before it end (PTX ISA, griddepcontrol); each kernel first waits for them.
__device__ inline void wait_for_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int BLOCK_K = FORMAT == FP32 ? 16 : 32;
constexpr int OF_LANE = 16 / sizeof(Element);  // numbers of a lane in a block

// Two neighbours in memory, rounded to elements.
__device__ inline void put(Element* to, float first, float second) {
#if FORMAT == FP32
    *(float2*)to = {first, second};
#else
    *(unsigned*)to = pack(first, second);
#endif
}

// The column, in a block, of a lane's j-th number; its row is lane / 4. Of 16-bit numbers, j = 4 slice + 2 half
// + e, of float32 2 slice + half: b0 and b1 of each product's slice.
__device__ inline int packed_column(int lane, int j) {
    const int t = lane % 4;
    return FORMAT == FP32 ? j * 4 + t : j / 2 * 8 + 2 * t + j % 2;
}
