// A prompt in the middle of being read.
//
// Each layer has three stages: q, k and v of all tokens, attention, and the rest. A stage's pieces do not
// depend on each other, so reading can pause after any piece. If log-probabilities are asked for, a last stage
// computes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "sampling.h"

constexpr int64_t PREFILL_ROWS = 64;  // tokens that pass through a layer together: their MLP stays in L2

// The pieces of each stage. Small, because every member of the team has a copy.
struct PromptStages {
    int64_t T, chunk;  // tokens, and how many of them attend together
    int32_t layers;
    bool scored;  // the last layer is computed for all tokens, not for the last one alone

    struct Rows {
        int64_t t0, rows;
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
    Rows queries(int64_t layer, int64_t i) const {
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

struct Prompt {
    PromptStages stages;
    std::vector<int64_t> ids;
    int64_t top;           // alternatives in each log-probability; -1: none are computed
    int64_t stage, piece;  // the next ones
    int64_t row_floats, scratch_floats;
    Buffer X, Q, A;                      // (T, ldX), (T, q k v of each head), (H, T, d)
    Buffer rows, scratch, logits;        // for each thread
    std::vector<TokenLogprob> logprobs;  // of ids[1:]
};
