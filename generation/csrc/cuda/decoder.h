// What the kernels of the cuda engine share: the model's sizes, what they are given, and small functions.
//
// Macros, which engines/cuda.py sets: FORMAT of call.h for the keys and values; WEIGHT_BITS, 32 or 16
// (bfloat16); LAYERS, HEADS, HEAD_DIM, VOCAB; TEXTS of a pass; THREADS of a block; BIAS, whether layers have
// one; CLOCKS, whether the cycles of the phases are counted; SHARED_BYTES of a block.
#pragma once

#include "call.h"

constexpr int WIDTH = HEADS * HEAD_DIM, HIDDEN = 4 * WIDTH;
constexpr int LANES = 32, WARPS = THREADS / LANES;

constexpr int most(int a, int b) { return a > b ? a : b; }

#if WEIGHT_BITS == 16
using Weight = unsigned short;
#else
using Weight = float;
#endif

struct Norm {
    float gain[WIDTH];
#if BIAS
    float bias[WIDTH];
#endif
};

// Of generation/csrc/sampling.h, in its order; whether logits are changed before the choice; and
// 1 / temperature.
constexpr int SETTINGS = 10;
enum Phase { EMBEDDING, QKV, ATTENTION, PROJECTION, MLP_UP, MLP_DOWN, HEAD, SAMPLING, WAITING, PHASES };

struct Weights;  // of each kernel its own

// A text, or a token of a prompt. length: tokens in the cache. token: the one to be read next; -1 if the logits
// are known. flags: of a prompt's token; of a text with drafts the four tokens before `token`, or of the cache
// if there is none, a byte each, the latest one lowest.
struct __align__(16) Text {
    int slot, length, token, flags;
};

// Flags of a prompt's token: counts of the slot's tokens begin with it; the slot's logits are those after it.
enum { FIRST = 1, LAST = 2 };

struct Work {
    const Weights* weights;           // as the kernel holds them
    const float *tokens, *positions;  // the embeddings, (VOCAB, WIDTH) and (positions, WIDTH)
    Element *keys, *values;           // (slots, LAYERS, HEADS, capacity, HEAD_DIM)
    float* logits;                    // (slots, VOCAB), the latest
    float* every;                     // (rows, count, VOCAB) of this call, unless it is null
    int *seen, *written;              // (slots, VOCAB): how often a token has occurred, and since the prompt
    const double* sampling;           // (slots, SETTINGS)
    const double* bias;               // (slots, VOCAB), added to the logits
    const Text* texts;
    const double* uniforms;  // (rows, count) in [0, 1)
    int* chosen;             // (rows, count); -1 where the logits hold NaN, or the largest is infinite
    long long* cycles;       // (PHASES) of the first block
    unsigned* arrived;       // (blocks of the grid) or, for prompts, (1) of announce(), 0 at first
    const uint2* contexts;   // of generation/distributions.py
    const unsigned* codes;   // a row of all lanes, a lane's in words of four
    int* drafts;  // (count, 3): passes, guesses that were rows of them, and those whose token was then chosen
    int count, rows, capacity, context_bits;
    int leading;  // blocks of the grid whose attention comes before that of the others
    float scale;  // of the scores, times log2(e)
};

// Counts the cycles since the last call for a phase, in the memory of a block.
template <class Shared>
__device__ inline void count(Shared& s, Phase phase) {
#if CLOCKS
    if (threadIdx.x == 0) {
        const long long now = clock64();
        s.cycles[phase] += now - s.last;
        s.last = now;
    }
#endif
}

template <class Shared>
__device__ inline void start_counting(Shared& s) {
#if CLOCKS
    if (threadIdx.x < PHASES) s.cycles[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.last = clock64();
#endif
}

template <class Shared>
__device__ inline void report(const Shared& s, const Work& work) {
#if CLOCKS
    if (threadIdx.x < PHASES && blockIdx.x == 0) work.cycles[threadIdx.x] = s.cycles[threadIdx.x];
#endif
}

__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline float4 load4(const unsigned short* p) {  // bfloat16
    const uint2 bits = *reinterpret_cast<const uint2*>(p);
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
            __uint_as_float(bits.y & 0xffff0000u)};
}

__device__ inline float dot(float sum, float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Where the keys and values of a slot's head begin.
__device__ inline long long head_at(const Work& work, int slot, int layer, int head) {
    return ((long long)(slot * LAYERS + layer) * HEADS + head) * work.capacity * HEAD_DIM;
}

__device__ inline float gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678118654752f)); }
