// A user's file as a part: the functions that it defines, and what the kernels' headers ask of a program.
// own.cpp makes a library of it, alone.cpp a program.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "attention.h"
#include "threads.h"

#if defined(OWN_ISPC)

// struct Attention of attention.isph, which ISPC's functions take.
struct AttentionInIspc {
    int64_t B, H, Nq, Nk, d;
    const float *q, *k, *v;
    float* out;
    int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;
    float scale;
    int32_t causal;
};
extern "C" void attention(const AttentionInIspc&, float* scratch);
extern "C" __attribute__((weak)) int64_t scratch(const AttentionInIspc&);

inline AttentionInIspc in_ispc(const Attention& a) {
    return {a.B,
            a.H,
            a.Nq,
            a.Nk,
            a.d,
            a.q.data,
            a.k.data,
            a.v.data,
            a.out,
            a.q.batch_stride,
            a.q.head_stride,
            a.q.row_stride,
            a.k.batch_stride,
            a.k.head_stride,
            a.k.row_stride,
            a.v.batch_stride,
            a.v.head_stride,
            a.v.row_stride,
            a.scale,
            a.causal};
}
inline int64_t own_scratch(const Attention& a) { return scratch ? scratch(in_ispc(a)) : 0; }
inline void own_attention(const Attention& a, float* floats) { attention(in_ispc(a), floats); }

#else

void attention(const Attention&, float* scratch);
__attribute__((weak)) int64_t scratch(const Attention&);
inline int64_t own_scratch(const Attention& a) { return scratch ? scratch(a) : 0; }
inline void own_attention(const Attention& a, float* floats) { attention(a, floats); }

#endif

// Over threads of the call, because a library of one file has no pool.
void on_threads(int threads, const std::function<void(int)>& body) {
    std::exception_ptr failed;
    std::mutex mutex;
    const auto guarded = [&](int thread) {
        try {
            body(thread);
        } catch (...) {
            const std::lock_guard<std::mutex> held(mutex);
            failed = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(guarded, thread);
    guarded(0);
    for (std::thread& other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}
