// The decoder's private state, and the work on it: step.cpp, prefill.cpp, decoder.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "decoder.h"
#include "model/csrc/block.h"
#include "model/csrc/cache.h"
#include "pace.h"
#include "team.h"

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

struct Decoder::State {
    ModelShape shape;
    const Part& part;
    int64_t cache_bytes, br, bc, capacity, d;
    CacheShape cache_shape;
    float scale;  // attention's
    int threads;
    Weights weights;
    Weights shares;                          // a copy of the matrices in panels for a team of `shared_by`
    int shared_by = 1;                       // `shares` is empty if 1
    Pace::Clock::time_point packed_until{};  // no packing before this time
    Buffer caches;
    std::vector<Slot> slots;

    // Each thread's rows of a step, one for each slot, of which N and O are its own; and its scratch for
    // attention, behind the K and V of a head in fp32 if the part cannot read the cache.
    Buffer memory;
    std::vector<Rows> rows;
    std::vector<float*> scratch;
    int64_t widened_floats = 0;

    Trace trace;
    Pace pace;
    std::array<TeamSize, 32> sizes;            // by the binary logarithm of the rows
    double group_seconds = 0;                  // per row of a group, in the last write_groups()
    std::unique_ptr<Team, Team::Delete> team;  // declared last: its threads read the members above

    State(const ModelShape&, const Tensors&, Precision, CachePrecision, const Part&, int64_t br, int64_t bc,
          int64_t slot_count, int64_t capacity, int threads, int64_t cache_bytes);

    // Prepares to read ids. top: as in prefill().
    void begin_prompt(Slot& slot, const std::vector<int64_t>& ids, int64_t top);

    // Reads on for at least one piece, until `seconds` are over. Returns whether the logits after the last
    // token are computed. K and V are then in the cache.
    bool read_prompt(Slot& slot, double seconds);

    // Reads the pending tokens of those of these slots that have one, with the help of the team.
    void advance(const std::vector<int64_t>& which);

    // Appends rows of tokens for these slots until there are `count`; row i comes from uniforms[i]. The slots
    // are divided into groups, each of which goes through all new rows on one thread.
    void write_groups(const std::vector<int64_t>& which, const std::vector<std::vector<double>>& uniforms,
                      int64_t count, std::vector<std::vector<int64_t>>& tokens);

    int64_t choose(int64_t slot, double uniform);

    // Tokens in the cache, and the pending one.
    int64_t length(int64_t slot) const { return slots[slot].length + (slots[slot].pending >= 0); }

  private:
    // A call of the part for a head, without its tensors. Inlined into a step, which calls the part for each
    // head and text.
    Attention attention(int64_t Nq, int64_t Nk) const {
        Attention a{};
        a.B = 1, a.H = 1, a.Nq = Nq, a.Nk = Nk, a.d = d;
        a.causal = true;
        a.scale = scale;
        a.Br = std::min(br, Nq), a.Bc = std::min(bc, Nk);
        a.threads = 1;
        return a;
    }

    void prompt_piece(Slot& slot, int64_t stage, int64_t i, int64_t thread);
    void finish_prompt(Slot& slot);
    std::vector<int64_t> behind(const int64_t* begin, const int64_t* end) const;
    void embed_rows(const std::vector<int64_t>& which, int64_t row);
    void finish_rows(const std::vector<int64_t>& which, int64_t row);
    void step(const Weights& model, const int64_t* which, const Rows& rows, Member& member);
    void attend(const Slot& slot, int64_t layer, int64_t head, const float* q, float* to, int64_t thread) const;
    void pack_for(int members);
    // The start of each group of these slots, and the end of the last one.
    std::vector<int64_t> groups(const std::vector<int64_t>& which) const;
};
