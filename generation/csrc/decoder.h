// The native decoder: nanoGPT's model with its own packed weights and caches, over the SIMD helpers and a
// chosen part, without torch and Python. A text is the same alone, in a batch, and over any number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "draft.h"
#include "model/csrc/block.h"
#include "model/csrc/cache.h"
#include "model/csrc/endless.h"
#include "pace.h"
#include "parts.h"
#include "sampling.h"
#include "team.h"

constexpr int64_t PREFILL_ROWS = 64;  // tokens that pass through a layer together: their MLP stays in L2

// A prompt's stages: for each layer q, k and v of all tokens, attention, and the rest; perhaps
// log-probabilities. Reading can pause after any piece. Small, because every member has a copy.
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
    // last token attends alone: computing the others changes no bit of its output.
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
    int64_t uncached = 0;         // tokens ahead of those that the cache holds

    // The rows of the tokens from t0 on, PREFILL_ROWS of them, at most to `end`.
    Rows rows_of(int64_t t0, int64_t end, int64_t thread) const {
        Rows block = rows[thread];
        block.count = std::min(PREFILL_ROWS, end - t0);
        block.X = X.from(t0);
        block.Q = Q.from(t0);
        return block;
    }
};

struct Slot {
    Cache cache;
    int64_t length = 0;    // tokens in the cache, an endless model's last ones; 0 while a prompt is read
    int64_t pending = -1;  // the token chosen last, if it is not in the cache yet
    std::vector<float> logits;
    Occurrences occurrences;
    Tail tail;
    Sampling sampling;
    Confidence confidence;
    std::unique_ptr<Prompt> prompt;      // the one being read
    int64_t top = -1;                    // alternatives in each log-probability; -1: none are kept
    std::vector<TokenLogprob> logprobs;  // not taken yet
};

// A row of a step: a token of a slot's text, at the position in the cache that its key and value go to.
struct Token {
    int64_t slot, id, position;
};

// br, bc: a tiled part's tile. slots: the number of texts, of up to `capacity` tokens each, or without an end.
// cache_bytes: the size of the processor's last-level cache. Python fills it as an array of numbers.
struct DecoderSizes {
    int64_t br, bc, slots, capacity, threads, cache_bytes;
};

// For each of several tokens a row with a number for each text.
using UniformRows = std::vector<std::vector<double>>;
using TokenRows = std::vector<std::vector<int64_t>>;

// Methods throw std::invalid_argument naming the wrong argument, on the page refuse(), and change nothing
// then. But write() may have stepped texts before it finds logits that are no numbers.
class Decoder {
  public:
    // precision: the matrices'. kv: the cache's.
    Decoder(const ModelShape&, const Tensors&, Precision precision, CachePrecision kv, const Part& part,
            const DecoderSizes&);
    ~Decoder();

    // How a slot's tokens are chosen from now on, and how many alternatives the log-probability of each has, or
    // NO_LOGPROB. Drops those that were not taken.
    void set_sampling(int64_t slot, const Sampling&, int64_t logprobs = NO_LOGPROB);
    std::vector<TokenLogprob> take_logprobs(int64_t slot);  // in the order of the tokens, since the last call

    // Replaces a slot's text by 1 to capacity tokens, which read() reads. `continues`: the penalties still
    // count earlier tokens. top: alternatives in the log-probabilities of ids[1:].
    void begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top = NO_LOGPROB);

    // Reads until the logits after the last token are computed; returns whether they are. Stops when `seconds`
    // are over, between pieces, or between stages with several threads. The bits do not depend on it.
    bool read(int64_t slot, double seconds = std::numeric_limits<double>::infinity());

    void drop(int64_t slot);  // abandons what was begun and frees its memory

    // Chooses a token for each slot from each row of uniforms in [0, 1); returns the rows of tokens. The
    // slots are distinct, read and not full. Stops early, but after the first row, when a slot is full or
    // `seconds` are over, by default so soon that Ctrl-C takes effect. A group of slots goes through several
    // rows before the next group; the seconds hold for each.
    TokenRows write(const std::vector<int64_t>& slots, const UniformRows& uniforms,
                    std::optional<double> seconds = {});

    // Guesses tokens in a write() of at most MOST_DRAFTED_TEXTS texts; null: none. Changes no token.
    void set_draft(std::shared_ptr<const Draft> guesser) { draft = std::move(guesser); }

    // Copies a slot's text to another slot: cache, logits, counts of tokens and pending token, but neither the
    // sampling nor log-probabilities.
    void copy(int64_t from, int64_t to);

    std::vector<float> logits(int64_t slot) { return slot_of("slot", slot).logits; }  // after the last token

    void record(bool on) { trace.record(on); }          // whether threads record their spans; off at first
    std::vector<Span> spans() { return trace.take(); }  // since the last call, thread by thread, in order

    int64_t vocab_size() const { return shape.vocab_size; }
    int64_t length(int64_t slot) const;  // tokens read, and the one chosen last; 0 until all are read

  private:
    ModelShape shape;
    const Part& part;
    int64_t cache_bytes, br, bc, capacity, d;
    int threads;
    CacheShape cache_shape;
    float scale;  // attention's
    Endless endless;
    Weights weights;
    Weights shares;                    // a copy of the matrices in panels for a team of `shared_by`
    int shared_by = 1;                 // `shares` is empty if 1
    Clock::time_point packed_until{};  // no packing before this time
    Buffer caches;
    std::vector<Slot> slots;

    // Each thread's rows of a step, of which N and O are its own, and its scratch for attention.
    Buffer memory;
    std::vector<Rows> rows;
    std::vector<float*> scratch;

    std::shared_ptr<const Draft> draft;
    DraftPace draft_pace;

    Trace trace;
    Pace pace;
    std::array<TeamSize, 32> sizes;            // by the binary logarithm of the rows
    double group_seconds = 0;                  // per row of a group, in the last write_groups()
    std::unique_ptr<Team, Team::Delete> team;  // declared last: its threads read the members above

    Slot& slot_of(const char* name, int64_t slot);  // checked

    // Takes these tokens through the model, with the help of the team. Those of a text follow each other.
    void pass(const std::vector<Token>& tokens);

    // As write() without groups, for `most` rows at most.
    class Drafting;
    TokenRows write_drafted(const std::vector<int64_t>& batch, const UniformRows& uniforms, int64_t most,
                            double patience);

    // Appends rows of tokens for these slots until there are `count`; row i comes from uniforms[i]. The slots
    // are divided into groups, each of which goes through all new rows on one thread.
    void write_groups(const std::vector<int64_t>& batch, const UniformRows& uniforms, int64_t count,
                      TokenRows& tokens);

    int64_t choose(int64_t slot, double uniform);

    // A call of the part for a head, without its tensors. Inlined into a step: one for each head and text.
    Attention attention(int64_t Nq, int64_t Nk, int64_t head) const {
        return {{1, 1, Nq, Nk, d, /* causal */ true, scale, std::min(br, Nq), std::min(bc, Nk),
                 /* threads */ 1, endless.rules(head)}};
    }

    void prompt_piece(Slot& slot, int64_t stage, int64_t i, int64_t thread);
    std::vector<Token> behind(const int64_t* begin, const int64_t* end);
    void embed_rows(const std::vector<Token>& tokens, int64_t row, int64_t thread);
    void finish_row(const Token& token, int64_t row);
    void step(const Weights& model, const Token* tokens, bool apart, const Rows& rows, Member& member);
    void attend(const Token& first, int64_t count, int64_t layer, int64_t head, const float* q, int64_t ldQ,
                float* to, int64_t ld, int64_t thread) const;
    void pack_for(int members);
    // The start of each group of these slots, and the end of the last one.
    std::vector<int64_t> groups(const std::vector<int64_t>& batch) const;
};
