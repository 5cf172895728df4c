// What a GPU can do at most, and a pause: lab/cuda/gpu.py measures with these. A grid has any number of blocks.

constexpr int CHAINS = 16;    // independent multiply-adds of a thread; a warp's next one waits four cycles
constexpr int UNROLLED = 16;  // links of each chain between two branches
constexpr int LOADS = 4;      // of 16 bytes, in flight for each thread

// CHAINS * UNROLLED * repeats multiply-adds for each thread, in registers alone. The sum is written only if it
// is a number that cannot come out, so that the compiler keeps the arithmetic and no memory is touched.
extern "C" __global__ void __launch_bounds__(256) fma_chains(float* never, int repeats, float a, float b) {
    float x[CHAINS];
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) x[i] = threadIdx.x + i;
    for (int r = 0; r < repeats; ++r) {
#pragma unroll
        for (int u = 0; u < UNROLLED; ++u)
#pragma unroll
            for (int i = 0; i < CHAINS; ++i) x[i] = fmaf(x[i], a, b);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) sum += x[i];
    if (sum == -1.0f) *never = sum;
}

// Reads `count` vectors of 16 bytes once. `never` as above.
extern "C" __global__ void __launch_bounds__(256) read_all(const float4* data, long long count, float* never) {
    const long long step = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (; i + (LOADS - 1) * step < count; i += LOADS * step) {
        float4 x[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) x[j] = data[i + j * step];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) sum += x[j].x + x[j].y + x[j].z + x[j].w;
    }
    for (; i < count; i += step) sum += data[i].x + data[i].y + data[i].z + data[i].w;
    if (sum == -1.0f) *never = sum;
}

// Keeps the stream busy for so many nanoseconds, while the host launches what comes next.
extern "C" __global__ void pause(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}
