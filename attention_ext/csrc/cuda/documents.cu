// Where each key's document begins and ends. It is launched before the kernels that take the rule `documents`.
//
// Shapes: documents (B, Nk), whole numbers; extents (B, 1 + Nk, 2), zeros at first. Row 1 + j becomes the first
//     key of key j's document and the end of it. Row 0 becomes (1, 0) if a text's numbers do not grow, and then
//     the others mean nothing.
// Launch: B ceil(Nk / THREADS) blocks, a thread for each key, which searches by halves.
// Bound: the latency of the L2 cache, 2 log2(Nk) times, half of them beside the others.
#include "call.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_documents(const long long* documents, int2* extents, int Nk) {
    const unsigned blocks = (Nk + THREADS - 1) / THREADS;
    const long long batch = blockIdx.x / blocks;
    const int key = blockIdx.x % blocks * THREADS + threadIdx.x;
    if (key >= Nk) return;
    const long long *const numbers = documents + batch * Nk, own = numbers[key];
    int2* const of_keys = extents + batch * (Nk + 1LL);
    if (key > 0 && numbers[key - 1] > own) of_keys->x = 1;
    unsigned low[2] = {0, key + 1u}, high[2] = {(unsigned)key, (unsigned)Nk};
    while (low[0] < high[0] || low[1] < high[1])
        UNROLLED(e, 2) {
            const unsigned middle = (low[e] + high[e]) / 2;
            if (low[e] == high[e]) continue;
            if (e ? numbers[middle] > own : numbers[middle] >= own)
                high[e] = middle;
            else
                low[e] = middle + 1;
        }
    of_keys[1 + key] = {(int)low[0], (int)low[1]};
}
