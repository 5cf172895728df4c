// What a decoder holds of a text, and of a prompt in the middle of being read.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "model/csrc/block.h"
#include "model/csrc/cache.h"
#include "sampling.h"

constexpr int64_t PREFILL_ROWS = 64;  // tokens that pass through a layer together: their MLP stays in L2

// The stages of a prompt: for each layer q, k and v of all tokens, attention, and the rest; and the
// log-probabilities if they are asked for. A stage's pieces do not depend on each other, so reading can pause
// after any piece. Small, because every member of the team has a copy.
struct PromptStages {
    int64_t T, chunk;  // tokens, and how many of them attend together
    int32_t layers;
    bool scored;  // the last layer is computed for all tokens, not for the last one alone

    struct Tokens {
        int64_t t0, count;
    };

    int64_t count() const { return 3 * layers + (scored && T > 1); }

    int64_t pieces(int64_t stage, int64_t heads) const {
        if (stage == 3 * layers) return blocks(T - 1);
        if (stage % 3 == 0) return blocks(T);
        if (stage % 3 == 2) return blocks(T - from(stage / 3));
        const bool last = is_last(stage / 3);
        return heads * (last ? 1 + scored * chunks(T - 1) : chunks(T));
    }

    // The first token whose output of a layer is needed.
    int64_t from(int64_t layer) const { return is_last(layer) && !scored ? T - 1 : 0; }

    // The tokens of the i-th attention of a head; those that see most keys come first. In the last layer the
    // last token always attends alone, so computing the others changes no bit of its output.
    Tokens queries(int64_t layer, int64_t i) const {
        const bool last = is_last(layer);
        if (last && i == 0) return {T - 1, 1};
        const int64_t end = T - last, t0 = (chunks(end) - 1 - (i - last)) * chunk;
        return {t0, std::min(chunk, end - t0)};
    }

  private:
    bool is_last(int64_t layer) const { return layer + 1 == layers; }
    int64_t chunks(int64_t tokens) const { return (tokens + chunk - 1) / chunk; }
    static int64_t blocks(int64_t tokens) { return (tokens + PREFILL_ROWS - 1) / PREFILL_ROWS; }
};

// A prompt in the middle of being read.
struct Prompt {
    PromptStages stages;
    std::vector<int64_t> ids;
    int64_t top;                         // alternatives in each log-probability; -1: none are computed
    int64_t stage = 0, piece = 0;        // the next ones
    std::vector<TokenLogprob> logprobs;  // of ids[1:]
    Buffer memory;
    simd::Matrix X, Q;            // (T, n_embd), (T, q k v of each head)
    float* A = nullptr;           // attention's result of each head, (H, T, d)
    std::vector<Rows> rows;       // each thread's PREFILL_ROWS rows, but for X and Q
    std::vector<float*> scratch;  // each thread's, for attention

    // The rows of `count` tokens from t0 on.
    Rows rows_of(int64_t t0, int64_t count, int64_t thread) const {
        Rows some = rows[thread];
        some.count = count;
        some.X = {X.data + t0 * X.ld, X.ld}, some.Q = {Q.data + t0 * Q.ld, Q.ld};
        return some;
    }
};

struct Slot {
    Cache cache;
    int64_t length = 0;    // tokens in the cache; 0 while a prompt is being read
    int64_t pending = -1;  // the token chosen last, if it is not in the cache yet
    std::vector<float> logits;
    Occurrences text;
    Sampling sampling;
    std::unique_ptr<Prompt> prompt;      // the one being read
    int64_t top = -1;                    // alternatives in each log-probability; -1: none are kept
    std::vector<TokenLogprob> logprobs;  // not taken yet
};
