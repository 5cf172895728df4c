// What a query sees beside `causal`, and what changes its scores: the rules of attention_ext/rules.py, whose
// change() is their PyTorch side. Parts 1 to 4 ask for a query's keys and for the change of a strip of scores.
#pragma once

#include <cstdint>
#include <limits>

struct AttentionSizes;

// Hidden scores: finite, so that a row in which all are hidden gives no NaN.
inline constexpr float HIDDEN = std::numeric_limits<float>::lowest();

struct Range {  // of keys
    int64_t first, end;

    int64_t count() const { return end - first; }
};

// Scores of `queries` queries from i0 on and `keys` keys from j0 on, in units of 1 / unit: that of query i0 + i
// and key j0 + j is data[i * query_stride + j * key_stride]. One of the strides is 1.
struct Strip {
    float* data;
    int64_t query_stride, key_stride, i0, queries, j0, keys;
    float unit;
    bool right = true;  // whether the keys right of the window are to be hidden
};

// Arrays are null, and softcap is 0, for a rule that is not given.
struct Rules {
    int64_t left,
        right;      // query i sees the keys p - left .. p + right around p = i + Nk - Nq; causal: right <= 0
    float softcap;  // scores are softcap * tanh(s / softcap)
    const float* slopes;  // (B, H), ALiBi's: - slope * |p - j|
    const float* bias;    // is added; its strides, 0 where heads or batches share it
    const bool* mask;     // hides the keys where it is false; bias's strides
    int64_t bias_batch, bias_head, bias_row;
    const float* sinks;        // (H), a logit more in the softmax
    const int64_t* documents;  // (B, Nk): query i sees the keys of key p's document
    const Range* extents;      // (B, Nk), of each key's document; they hold other documents unless `apart`
    bool apart;
    void (*mod)(const Strip&, int64_t b, int64_t h, float* slope);  // tools/score_mod.cpp

    // The keys that any of `count` queries from i on may see; may be empty.
    Range keys(const AttentionSizes&, int64_t head, int64_t i, int64_t count) const;

    // The end of the keys of query i if each query after it sees one more, else seen.end.
    int64_t staircase(const AttentionSizes&, int64_t head, int64_t i, const Range& seen) const;

    // Changes and hides a strip's scores. slope, of_mod <- the derivatives of softcap and mod there; or null.
    void change(const AttentionSizes&, int64_t head, const Strip&, float* slope = nullptr,
                float* of_mod = nullptr) const;
};
