// What the kernels of the cuda engine share: the model's sizes, what they are given, and small functions.
//
// Macros by engines/cuda.py beside those of online.h: WEIGHT_BITS, 32 or 16 (bfloat16); LAYERS, HEADS, VOCAB;
// TEXTS of a pass; BIAS of layers; CLOCKS: whether cycles of the phases are counted; SHARED_BYTES of a block;
// SETTINGS of a text and the place of each; those of ngrams_table.h.
#pragma once

#include "online.h"

constexpr int WIDTH = HEADS * HEAD_DIM, HIDDEN = 4 * WIDTH;

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
    __device__ float4 plus_bias(int k, float4 y) const {
#if BIAS
        y = y + load4(&bias[k]);
#endif
        return y;
    }
};

// The biases of a layer's matrices; null if layers have none.
struct Biases {
    const float *qkv, *proj, *fc, *out;
};
__device__ inline float biased(float y, const float* bias, int output) { return BIAS ? y + bias[output] : y; }

// What a layer holds beside its matrices, of which a block has `share` of WIDTH outputs.
template <int share> struct __align__(16) Vectors {
    Norm ln_1, ln_2;
#if BIAS
    float qkv[3 * share], proj[share], fc[4 * share], out[share];
    __device__ Biases biases() const { return {qkv, proj, fc, out}; }
#else
    __device__ Biases biases() const { return {}; }
#endif
};

// The weights, as engines/cuda.py lays them out for a block.
template <class Layer, class Head, int share> struct __align__(16) Model {
    Layer layers[LAYERS];
    Head head;
    Vectors<share> vectors[LAYERS];
    Norm ln_f;
};
struct Weights;  // of each kernel its own Model

enum Phase { EMBEDDING, QKV, ATTENTION, PROJECTION, MLP_UP, MLP_DOWN, HEAD, SAMPLING, WAITING, PHASES };

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
    const unsigned* tags;    // (CONTEXTS) of a draft's contexts
    const uint4* pairs;      // (CONTEXTS), their LISTED pairs of a byte for the token and one for the code
    int* drafts;             // (count, 2): passes, and guesses whose token was then chosen
    int count, rows, capacity;
    int leading;  // blocks of the grid whose attention comes before that of the others
    float scale;  // of the scores, times log2(e)
};

// Counts the cycles since the last call for a phase, in the memory of a block.
template <class Shared> __device__ inline void count(Shared& s, Phase phase) {
    if constexpr (CLOCKS) {
        if (threadIdx.x > 0) return;
        const long long now = clock64();
        s.cycles[phase] += now - s.last;
        s.last = now;
    }
}

template <class Shared> __device__ inline void start_counting(Shared& s) {
    if constexpr (CLOCKS) {
        if (threadIdx.x < PHASES) s.cycles[threadIdx.x] = 0;
        if (threadIdx.x == 0) s.last = clock64();
    }
}

template <class Shared> __device__ inline void report(const Shared& s, const Work& work) {
    if constexpr (CLOCKS)
        if (threadIdx.x < PHASES && blockIdx.x == 0) work.cycles[threadIdx.x] = s.cycles[threadIdx.x];
}

// Where the keys and values of a slot's head begin.
__device__ inline long long head_at(const Work& work, int slot, int layer, int head) {
    return ((long long)(slot * LAYERS + layer) * HEADS + head) * work.capacity * HEAD_DIM;
}

__device__ inline float gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678118654752f)); }

// 1 / the standard deviation of a row, as PyTorch's LayerNorm has it.
__device__ inline float inverse_deviation(float squares) { return rsqrtf(squares * (1.0f / WIDTH) + 1e-5f); }

// How a warp multiplies: `per_warp` rows of a matrix, which follow each other, by `lanes` lanes each. A lane
// has four inputs at 4 lane, then at 4 lanes + 4 lane ... Rows of 16 bits that are loaded together take these
// pieces in another order: the same piece of each would be in the same banks.
template <int rows, int K> struct Split {
    static constexpr int per_warp = (rows + WARPS - 1) / WARPS, lanes = LANES / power_of_two(per_warp);
    static constexpr int pieces = (K + 4 * lanes - 1) / (4 * lanes);
    static constexpr int together = sizeof(Weight) == 2 && lanes < LANES / 2 ? LANES / 2 / lanes : 1;
    static constexpr int orders = pieces % together == 0 ? together : 1;
    static_assert(per_warp <= LANES, "engines/cuda.py takes no more");
    __device__ static int input(int piece) {
        const int lane = threadIdx.x % LANES;
        return 4 * ((piece ^ lane / lanes % orders) * lanes + lane % lanes);
    }
};
using WholeWarp = Split<WARPS, WIDTH>;  // all lanes for a row

// A lane's numbers of a row for a Split, less the row's mean. By whole warps.
template <class Of> struct Deviations {
    float4 at[Of::pieces];

    __device__ explicit Deviations(const float* x) {
        float total = 0;
        UNROLLED(i, Of::pieces) {
            at[i] = Of::input(i) < WIDTH ? load4(x + Of::input(i)) : float4{};
            total += (at[i].x + at[i].y) + (at[i].z + at[i].w);
        }
        const float mean = sum<1, Of::lanes>(total) * (1.0f / WIDTH);
        UNROLLED(i, Of::pieces) at[i] = at[i] - mean;
    }
};
