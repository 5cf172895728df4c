// The public class, and how its texts take turns.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "model/csrc/refuse.h"
#include "simd/portable.h"
#include "simd/simd.h"

namespace {

// From this many texts per thread on, threads are fastest with separate texts (Zen 5 and Intel Xeon).
constexpr int64_t LEAST_APART = 2;
constexpr int64_t MAX_PANEL_KEYS = 128;  // in a transposed panel of the cache
constexpr int64_t MAX_SLOTS = int64_t{1} << 31, MAX_THREADS = 1024;
// After these a call begins no further row, so that Ctrl-C takes effect soon.
constexpr double ONE_TEXT_SECONDS = 2e-3, BATCH_SECONDS = 8e-3;

// The shape, if it and the other arguments are in range.
const ModelShape& checked(const ModelShape& shape, int64_t br, int64_t bc, int64_t slots, int64_t capacity,
                          int threads, int64_t cache_bytes) {
    shape.check();
    check("br", br, 1, INT64_MAX);
    check("bc", bc, 1, INT64_MAX);
    check("slots", slots, 1, MAX_SLOTS);
    check("capacity", capacity, 1, shape.block_size);
    check("threads", threads, 1, MAX_THREADS);
    check("cache_bytes", cache_bytes, 1, INT64_MAX);
    return shape;
}

}  // namespace

int64_t Decoder::choose(int64_t which, double uniform) {
    Slot& slot = slots[which];
    slot.pending = sample(slot.logits.data(), slot.text, uniform, slot.sampling);
    slot.text.seen[slot.pending] = 1;
    slot.text.written[slot.pending]++;
    slot.tail.push(slot.pending);
    if (slot.top >= 0)
        slot.logprobs.push_back(token_logprob(slot.logits.data(), shape.vocab_size, slot.pending, slot.top));
    return slot.pending;
}

Decoder::Decoder(const ModelShape& s, const Tensors& tensors, Precision precision, CachePrecision kv,
                 const Part& part, int64_t br, int64_t bc, int64_t slot_count, int64_t capacity, int threads,
                 int64_t cache_bytes)
    : shape(checked(s, br, bc, slot_count, capacity, threads, cache_bytes)),
      part(part),
      cache_bytes(cache_bytes),
      br(br),
      bc(bc),
      capacity(capacity),
      d(s.n_embd / s.n_head),
      cache_shape{s.n_layer,
                  s.n_head,
                  d,
                  capacity,
                  part.few.queries > 0,
                  round_up(std::min({bc, capacity, MAX_PANEL_KEYS}),
                           kv == CachePrecision::bf16 ? 2 * portable::lanes() : simd::lanes()),
                  kv},
      scale(static_cast<float>(1 / std::sqrt(static_cast<double>(d)))),
      threads(threads),
      weights(s, tensors, precision),
      caches(slot_count * cache_shape.words()),
      slots(slot_count),
      trace(threads),
      team(new Team(4 * s.n_layer + 1, threads, trace)) {
    for (int64_t i = 0; i < slot_count; i++) {
        Slot& slot = slots[i];
        slot.cache = Cache(cache_shape, caches + i * cache_shape.words());
        slot.logits.resize(s.vocab_size);
        slot.text.seen.resize(s.vocab_size);
        slot.text.written.resize(s.vocab_size);
    }
    Attention one = attention(1, capacity);
    if (cache_shape.transposed) one.Bc = cache_shape.panel, one.kv = kv;
    if (cache_shape.pairs() && !cache_shape.transposed) widened_floats = 2 * capacity * d;
    int64_t attended = widened_floats + part.scratch(one);
    if (cache_shape.transposed) attended = std::max(attended, MOST_ROWS * d + part.few.together.scratch(one));
    const Layer& w = weights.layers[0];
    const int64_t most = std::max(slot_count, MOST_ROWS);
    const auto lay_out = [&](Scratch at) {
        Rows shared{most,
                    at.matrix(most, w.proj.columns()),
                    at.matrix(most, w.qkv.columns()),
                    at.matrix(most, s.n_embd),
                    at.matrix(most, w.fc.columns()),
                    at.matrix(most, weights.head.columns()),
                    {},
                    {}};
        rows.clear(), scratch.clear();
        for (int thread = 0; thread < threads; thread++) {
            shared.N = at.matrix(most, s.n_embd);
            shared.O = at.matrix(most, w.out.operand_words());  // the longest row
            rows.push_back(shared);
            scratch.push_back(at.take(attended));
        }
        return at.taken();
    };
    memory = Buffer(lay_out(Scratch()));
    lay_out(Scratch(memory));
}

Decoder::~Decoder() = default;

Slot& Decoder::slot_of(const char* name, int64_t slot) {
    check(name, slot, 0, static_cast<int64_t>(slots.size()) - 1);
    return slots[slot];
}

void Decoder::set_sampling(int64_t slot, const Sampling& sampling, std::optional<int64_t> logprobs) {
    Slot& s = slot_of("slot", slot);
    for (const auto& [token, bias] : sampling.logit_bias)
        check("a token of logit_bias", token, 0, shape.vocab_size - 1);
    if (logprobs) check("logprobs", *logprobs, 0, MAX_TOP);
    s.sampling = sampling;
    s.top = logprobs.value_or(-1);
    s.logprobs.clear();
}

std::vector<TokenLogprob> Decoder::take_logprobs(int64_t slot) {
    return std::exchange(slot_of("slot", slot).logprobs, {});
}

void Decoder::drop(int64_t slot) { slot_of("slot", slot).prompt.reset(); }

std::vector<std::vector<int64_t>> Decoder::write(const std::vector<int64_t>& which,
                                                 const std::vector<std::vector<double>>& uniforms,
                                                 std::optional<double> seconds) {
    const int64_t all = static_cast<int64_t>(which.size()), most = static_cast<int64_t>(uniforms.size());
    if (seconds && !(*seconds >= 0)) refuse("seconds must be at least 0");
    for (const std::vector<double>& row : uniforms) {
        if (row.size() != which.size())
            refuse("the number of uniforms", static_cast<int64_t>(row.size()),
                   "the number of slots, " + std::to_string(all));
        for (const double u : row)
            if (!(u >= 0 && u < 1)) refuse("a uniform is outside [0, 1)");
    }
    std::vector<char> taken(slots.size());
    int64_t room = capacity;
    for (const int64_t slot : which) {
        slot_of("slot", slot);
        const int64_t length = this->length(slot);
        if (length == 0) refuse("slot", slot, "read first");
        if (length > capacity) refuse("slot", slot, "read again: it is full");
        if (taken[slot]++) refuse("slot", slot, "named once");
        room = std::min(room, capacity + 1 - length);
    }
    const double patience = seconds.value_or(all == 1 ? ONE_TEXT_SECONDS : BATCH_SECONDS);
    std::vector<std::vector<int64_t>> rows;
    const int64_t limit = std::min(most, room);
    const bool apart = all >= LEAST_APART * threads;
    if (draft && limit > 0 && all > 0 && all <= MOST_DRAFTED_TEXTS && (threads == 1 || !apart))
        return write_drafted(which, uniforms, limit, patience);
    if (most > 1 && apart) {
        // Earlier rows tell how many more fit; the first one is tried alone.
        int64_t fit = 1;
        if (group_seconds == 0) write_groups(which, uniforms, fit, rows);
        fit = static_cast<int64_t>(std::clamp<double>(patience / group_seconds, fit, limit));
        write_groups(which, uniforms, fit, rows);
        return rows;
    }
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    for (int64_t i = 0; i < most; i++) {
        const std::chrono::duration<double> spent = Clock::now() - start;
        if (i > 0 && (i >= room || spent.count() > patience)) break;
        const std::vector<Token> tokens = behind(which.data(), which.data() + all);
        if (!tokens.empty()) pass(tokens);
        for (size_t r = 0; r < tokens.size(); r++) finish_row(tokens[r], static_cast<int64_t>(r));
        std::vector<int64_t>& row = rows.emplace_back();
        trace.timed("sampling", 0, [&] {
            for (int64_t s = 0; s < all; s++) row.push_back(choose(which[s], uniforms[i][s]));
        });
    }
    return rows;
}

void Decoder::copy(int64_t from, int64_t to) {
    const Slot& a = slot_of("from", from);
    Slot& b = slot_of("to", to);
    if (from == to) return;
    b.cache.copy(a.cache, a.length);
    b.length = a.length, b.pending = a.pending, b.logits = a.logits, b.text = a.text, b.tail = a.tail;
    b.prompt.reset();
}

std::vector<float> Decoder::logits(int64_t slot) { return slot_of("slot", slot).logits; }

void Decoder::record(bool on) { trace.record(on); }
std::vector<Span> Decoder::spans() { return trace.take(); }

int64_t Decoder::length(int64_t slot) const { return slots[slot].length + (slots[slot].pending >= 0); }
