// What a GPU can do at most, and a pause. A grid has any number of blocks.
#include "call.h"

// Macros of its own, by lab/cuda/device.py:
//   CHAINS  independent multiply-adds of a thread; a warp's next one waits four cycles
//   LINKS   of each chain between two branches
constexpr int LOADS = 4;  // of 16 bytes, in flight for each thread

// CHAINS * LINKS * repeats multiply-adds for each thread, in registers alone. The sum is written only if it
// is a number that cannot come out, so that the compiler keeps the arithmetic and no memory is touched.
extern "C" __global__ void __launch_bounds__(THREADS) fma_chains(float* never, int repeats, float a, float b) {
    float x[CHAINS];
    UNROLLED(i, CHAINS) x[i] = threadIdx.x + i;
    for (int r = 0; r < repeats; ++r) {
        UNROLLED(u, LINKS)
            UNROLLED(i, CHAINS) x[i] = fmaf(x[i], a, b);
    }
    float sum = 0;
    UNROLLED(i, CHAINS) sum += x[i];
    if (sum == -1.0f) *never = sum;
}

// Reads `count` vectors of 16 bytes once. `never` as above.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_all(const float4* data, long long count, float* never) {
    const long long apart = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (; i + (LOADS - 1) * apart < count; i += LOADS * apart) {
        float4 x[LOADS];
        UNROLLED(j, LOADS) x[j] = data[i + j * apart];
        UNROLLED(j, LOADS) sum += x[j].x + x[j].y + x[j].z + x[j].w;
    }
    for (; i < count; i += apart) sum += data[i].x + data[i].y + data[i].z + data[i].w;
    if (sum == -1.0f) *never = sum;
}

// Keeps the stream busy for so many nanoseconds, while the host launches what comes next.
extern "C" __global__ void pause(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}
