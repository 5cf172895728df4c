// The C interface of a library that holds a user's kernel, for own/kernel.py.
#include "tools/own.h"

#include <algorithm>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// struct Call of own.py.
struct OwnCall {
    int64_t B, H, Nq, Nk, d, causal, threads;
    const float *q, *k, *v;
    float* out;
    int64_t q_strides[3], k_strides[3], v_strides[3];  // batch, head, row
    float scale;
};

namespace {

constexpr int64_t TILE = 64;  // Br and Bc of a call, for a kernel that asks

Matrices matrices(const float* data, const int64_t* strides) {
    return {data, strides[0], strides[1], strides[2], 1};
}

Attention attention_of(const OwnCall& c) {
    return {{c.B, c.H, c.Nq, c.Nk, c.d, c.causal != 0, c.scale, std::min(TILE, c.Nq), std::min(TILE, c.Nk),
             static_cast<int>(c.threads)},
            matrices(c.q, c.q_strides),
            matrices(c.k, c.k_strides),
            matrices(c.v, c.v_strides),
            c.out};
}

}  // namespace

// The floats of scratch that a call needs.
EXPORTED int64_t own_scratch_of(const OwnCall* call) { return own_scratch(attention_of(*call)); }

// Runs it. Returns what it threw, valid until the next call, or null.
EXPORTED const char* own_call(const OwnCall* call, float* floats) {
    static std::string why;
    const NoDenormals flushed;
    try {
        own_attention(attention_of(*call), floats);
        return nullptr;
    } catch (const std::exception& error) {
        why = error.what();
    } catch (...) {
        why = "an exception";
    }
    return why.c_str();
}
