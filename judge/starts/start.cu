// Attention of your own in CUDA: out = softmax(scale * q k^T) v for each batch and head.
//
// NVRTC compiles this file, without CUDA's headers. A block is launched for each BR queries of each head. BR,
// THREADS and SHARED, the bytes of dynamic shared memory, are macros here; HEAD_DIM, d, is given. arguments.h
// says what a call holds.
//
// The loop nest: a thread has a query. It goes over all keys it sees twice, for the largest score m, and for
// the weights p, their sum l and the output o.
#include "call.h"

#define BR 64       // queries of a block
#define THREADS 64  // of a block: one for each query
#define SHARED 0    // bytes; may use HEAD_DIM

extern "C" __global__ void attention(const Call call) {
    const Block block = block_of(call, BR);  // where its head begins, and its first query
    const int i = block.first_query + threadIdx.x;
    if (i >= call.Nq) return;
    const Element* q = block.q + i * call.q_strides.row;
    const int n = keys_seen(call, i);  // query i sees the keys 0 .. n - 1

    float m = -INF;
    for (int j = 0; j < n; ++j) {
        float s = 0;
        for (int c = 0; c < HEAD_DIM; ++c) s += to_float(q[c]) * to_float(block.k[j * call.k_strides.row + c]);
        m = fmaxf(m, call.scale * s);
    }

    float l = 0, o[HEAD_DIM] = {};
    for (int j = 0; j < n; ++j) {
        float s = 0;
        for (int c = 0; c < HEAD_DIM; ++c) s += to_float(q[c]) * to_float(block.k[j * call.k_strides.row + c]);
        const float p = exp2_approx(call.scale * s - m);  // the scale holds log2(e)
        l += p;
        for (int c = 0; c < HEAD_DIM; ++c) o[c] += p * to_float(block.v[j * call.v_strides.row + c]);
    }
    Element* out = call.out + (block.head * call.Nq + i) * HEAD_DIM;
    for (int c = 0; c < HEAD_DIM; ++c) out[c] = to_element(o[c] / l);
}
