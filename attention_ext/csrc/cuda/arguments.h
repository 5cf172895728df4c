// The arguments of the kernels, which bindings/launcher.cpp fills in.
#pragma once

#ifdef FORMAT
#include "numbers.h"
#else  // the launcher, which knows no dtype
using Element = void;
struct int2;
struct float2;
#endif

// RULES is a sum of these.
#define RULED 1  // always: a window, perhaps without limits, sinks, and heads of q that share those of k and v
#define SOFTCAP 2
#define ALIBI 4
#define DOCUMENTS 8
#define BIAS_ADDS 16
#define BIAS_HIDES 32     // a boolean one
#define BIAS_GRADIENT 64  // of the backward pass
#define MODIFIED 128      // by a user's header

// Elements from one batch, head and row to the next. The numbers of a row lie side by side.
struct Strides {
    long long batch, head, row;
};

// Arrays are null where a rule is not given.
struct Rules {
    const float *slopes, *sinks;   // (B, H), (H)
    const long long* documents;    // (B, Nk)
    const int2* extents;           // (B, extent_rows), as documents.cu gives them
    int left, right;               // query i sees the keys p - left .. p + right, p = i + Nk - Nq
    int group;                     // heads of q that read one head of k and v
    float softcap, softcap_below;  // times log2(e); 1 / softcap
    int extent_rows;               // 1 + Nk, or in the forward pass the first and those of the last keys
    const void* bias;              // float, or bool with BIAS_HIDES; the keys' numbers lie side by side
    Strides bias_strides;          // 0 where batches, heads or queries share it
};

// softmax(scale q k^T) v for every batch and head. q is (B, H, Nq, d); k and v are (B, H, Nk, d); out is
// (B, H, Nq, d), contiguous, but for kernel 6 with strides; lse, (B, H, Nq), gets the rows' logsumexp unless it
// is null.
//   causal  query i sees the keys j <= i + Nk - Nq. The score of a masked key becomes -inf and its weight 0. A
//           NaN or infinity in its value may reach the rows of the same tile, because 0 times NaN is NaN.
//   scale   of the scores, times log2(e), because the softmax takes powers of two
struct Call {
    const Element *q, *k, *v;
    Element* out;
    float* lse;
    Strides q_strides, k_strides, v_strides, out_strides;
    int batches, heads, Nq, Nk;
    int causal;
    float scale;
    Rules rules;  // read where RULES are compiled in
};

// Beside Call, whose `out` and `lse` are the forward pass's.
struct Gradients {
    const Element* dout;
    Strides dout_strides;
    const float* dlse;      // (B, H, Nq), or null: 0
    float2* rows;           // (B H, padded_rows()): a query's logsumexp in powers of two, and its D
    Element *dq, *dk, *dv;  // (B, H, Nq, d), (B, Hk, Nk, d) twice, contiguous
    float* dbias;           // (B, H, Nq, Nk), zeros; with BIAS_GRADIENT
};
