// The decoder's private state, and the work on it: step.cpp, prefill.cpp, decoder.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "alone.h"
#include "decoder.h"
#include "model/csrc/cache.h"
#include "model/csrc/weights.h"
#include "pace.h"
#include "prompt.h"
#include "team_size.h"
#if defined(__wasm__)
#include "no_threads.h"
#else
#include "attempts.h"
#include "team.h"
#endif

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
    CachePrecision kv;
    int64_t cache_bytes;
    int64_t d, br, bc, capacity, panel;  // panel: keys of a transposed panel of the cache
    CacheShape cache_shape;
    float scale;  // attention's
    int threads;
    Weights weights;
    Weights shares;                          // a copy of the matrices in panels for a team of `shared_by`
    int shared_by = 1;                       // `shares` is empty if 1
    Pace::Clock::time_point packed_until{};  // no packing before this time
    Buffer caches;
    std::vector<Slot> slots;

    // Activations of a step, a row for each of its slots. Each thread has its own `normed`, `operands` (rows in
    // the products' format) and `scratch`.
    int64_t ldX, ldQ, ldH, ldL, ldO;  // row strides of x, qkv, hidden, logits, operands
    Buffer x, qkv, attended, hidden, logits, normed, operands, scratch;
    int64_t scratch_floats, widened_floats;  // widened: K and V of a head, for a part that takes only fp32

    Trace trace;
    Pace pace;
    std::array<TeamSize, 32> sizes;            // by the binary logarithm of the rows
    double group_seconds = 0;                  // per row of a group, in the last write_groups()
    std::unique_ptr<Team, Team::Delete> team;  // declared last: its threads read the members above

    State(const ModelShape&, const Tensors&, Precision, CachePrecision, const Part&, int64_t br, int64_t bc,
          int64_t slot_count, int64_t capacity, int threads, int64_t cache_bytes);

    // A call of the part, without its tensors. Inlined into a step, which calls the part for each head and
    // text.
    Attention attention(int64_t heads, int64_t Nq, int64_t Nk) const {
        Attention a{};
        a.B = 1, a.H = heads, a.Nq = Nq, a.Nk = Nk, a.d = d;
        a.causal = true;
        a.scale = scale;
        a.Br = std::min(br, Nq), a.Bc = std::min(bc, Nk);
        a.threads = 1;
        return a;
    }

    // to (n_embd) <- wte[token] + wpe[position]
    void embed(float* to, int64_t token, int64_t position) const;

    // Prepares to read ids. top: as in prefill().
    void begin_prompt(Slot& slot, const std::vector<int64_t>& ids, int64_t top);

    // Reads on for at least one piece, until `seconds` are over. Returns whether the logits after the last
    // token are computed. K and V are then in the cache.
    bool read_prompt(Slot& slot, double seconds);

    // Reads the pending tokens of these slots, with the help of the team.
    void advance(const std::vector<int64_t>& which);

    // A token for each of these slots, after their pending ones are read.
    std::vector<int64_t> next(const std::vector<int64_t>& which, const double* uniforms);

    // Appends rows of tokens for these slots until there are `count`; row i comes from uniforms[i]. The slots
    // are divided into groups, each of which goes through all new rows on one thread.
    void write_groups(const std::vector<int64_t>& which, const std::vector<std::vector<double>>& uniforms,
                      int64_t count, std::vector<std::vector<int64_t>>& tokens);

    // Tokens in the cache, and the pending one.
    int64_t length(int64_t slot) const { return slots[slot].length + (slots[slot].pending >= 0); }

  private:
    void prompt_piece(Slot& slot, int64_t stage, int64_t i, int64_t thread);
    void prompt_qkv(Slot& slot, int64_t layer, int64_t i, int64_t thread);
    void prompt_attention(Prompt& prompt, int64_t layer, int64_t i, int64_t thread);
    void prompt_rest(Prompt& prompt, int64_t layer, int64_t i, int64_t thread);
    void prompt_logprobs(Prompt& prompt, int64_t i, int64_t thread);
    void finish_prompt(Slot& slot);
    template <class Pieces>
    void step(const Weights& model, const int64_t* which, int64_t rows, int64_t row, int64_t thread,
              Pieces& pieces);
    void embed_rows(const int64_t* which, int64_t rows, int64_t row);
    void finish_rows(const int64_t* which, int64_t rows, int64_t row);
    void step_in_team(const std::vector<int64_t>& which, int members);
    void pack_for(int members);
    void write_group(const std::vector<int64_t>& which, int64_t from, int64_t to, int64_t thread,
                     const double* uniforms, int64_t* tokens);
    // The start of each group of these slots, and the end of the last one.
    std::vector<int64_t> groups(const std::vector<int64_t>& which) const;
    int64_t choose(int64_t slot, double uniform);
    void attend(const Slot& slot, int64_t layer, int64_t head, const float* q, float* to, int64_t thread) const;
};

// A member of the team that records its waiting. The caller's wait at the end of a stage is a span. A helper's
// may outlast the call, so it appears only as gaps between its spans.
struct Recorded {
    Trace& trace;
    Member& member;

    template <class Piece>
    void run(int64_t stage, int64_t pieces, const Piece& piece) {
        traced([&] { member.run(stage, pieces, piece); });
    }

    template <class Piece>
    void share(int64_t stage, int64_t pieces, const Piece& piece) {
        traced([&] { member.share(stage, pieces, piece); });
    }
    int members() const { return member.members; }

    template <class Stage>
    void traced(const Stage& stage) {
        if (member.thread > 0 || !trace.on()) return stage();
        trace.timed_waiting(stage);
    }
};
