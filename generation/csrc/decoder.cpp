// The public class, and how its texts take turns.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "refuse.h"
#include "state.h"

namespace {

// From this many texts per thread on, threads are fastest with separate texts (Zen 5 and Intel Xeon).
constexpr int64_t LEAST_APART = 2;
constexpr int64_t MAX_SIZE = int64_t{1} << 31, MAX_THREADS = 1024;
// After these a call begins no further row, so that Ctrl-C takes effect soon.
constexpr double ONE_TEXT_SECONDS = 2e-3, BATCH_SECONDS = 8e-3;

[[noreturn]] void refuse(const std::string& what, int64_t value, const std::string& must) {
    ::refuse((what + " is " + std::to_string(value) + "; it must be " + must).c_str());
}

void check(const std::string& what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(what, value, "from " + std::to_string(low) + " to " + std::to_string(high));
}

}  // namespace

int64_t Decoder::State::choose(int64_t which, double uniform) {
    Slot& slot = slots[which];
    slot.pending = sample(slot.logits.data(), slot.text, uniform, slot.sampling);
    slot.text.seen[slot.pending] = 1;
    slot.text.written[slot.pending]++;
    if (slot.top >= 0)
        slot.logprobs.push_back(token_logprob(slot.logits.data(), shape.vocab_size, slot.pending, slot.top));
    return slot.pending;
}

Decoder::Decoder(const ModelShape& shape, const Tensors& tensors, Precision precision, CachePrecision kv,
                 const Part& part, int64_t br, int64_t bc, int64_t slots, int64_t capacity, int threads,
                 int64_t cache_bytes) {
    check("block_size", shape.block_size, 1, MAX_SIZE);
    check("vocab_size", shape.vocab_size, 1, MAX_SIZE);
    check("n_layer", shape.n_layer, 1, MAX_SIZE);
    check("n_head", shape.n_head, 1, MAX_SIZE);
    check("n_embd", shape.n_embd, 1, MAX_SIZE);
    if (shape.n_embd % shape.n_head)
        refuse("n_embd", shape.n_embd, "a multiple of n_head=" + std::to_string(shape.n_head));
    check("br", br, 1, INT64_MAX);
    check("bc", bc, 1, INT64_MAX);
    check("slots", slots, 1, MAX_SIZE);
    check("capacity", capacity, 1, shape.block_size);
    check("threads", threads, 1, MAX_THREADS);
    check("cache_bytes", cache_bytes, 1, INT64_MAX);
    state = std::make_unique<State>(shape, tensors, precision, kv, part, br, bc, slots, capacity, threads,
                                    cache_bytes);
}

Decoder::~Decoder() = default;

Slot& Decoder::slot_of(const char* name, int64_t slot) {
    check(name, slot, 0, slots() - 1);
    return state->slots[slot];
}

void Decoder::set_sampling(int64_t slot, const Sampling& sampling, std::optional<int64_t> logprobs) {
    Slot& s = slot_of("slot", slot);
    for (const auto& [token, bias] : sampling.logit_bias)
        check("a token of logit_bias", token, 0, state->shape.vocab_size - 1);
    if (logprobs) check("logprobs", *logprobs, 0, MAX_TOP);
    s.sampling = sampling;
    s.top = logprobs.value_or(-1);
    s.logprobs.clear();
}

std::vector<TokenLogprob> Decoder::take_logprobs(int64_t slot) {
    return std::exchange(slot_of("slot", slot).logprobs, {});
}

void Decoder::begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, std::optional<int64_t> top) {
    Slot& s = slot_of("slot", slot);
    check("the number of ids", static_cast<int64_t>(ids.size()), 1, capacity());
    for (const int64_t id : ids) check("an id", id, 0, state->shape.vocab_size - 1);
    if (top) check("top", *top, 0, MAX_TOP);
    if (!continues) {
        std::fill(s.text.seen.begin(), s.text.seen.end(), 0);
        std::fill(s.text.written.begin(), s.text.written.end(), 0);
        s.logprobs.clear();
    }
    for (const int64_t id : ids) s.text.seen[id] = 1;
    state->begin_prompt(s, ids, top.value_or(-1));
}

bool Decoder::read(int64_t slot, double seconds) {
    Slot& s = slot_of("slot", slot);
    if (!s.prompt) refuse("slot", slot, "given ids by begin() first");
    if (!(seconds >= 0)) ::refuse("seconds must be at least 0");
    return state->read_prompt(s, seconds);
}

void Decoder::drop(int64_t slot) { slot_of("slot", slot).prompt.reset(); }

std::vector<std::vector<int64_t>> Decoder::write(const std::vector<int64_t>& which,
                                                 const std::vector<std::vector<double>>& uniforms,
                                                 std::optional<double> seconds) {
    const int64_t all = static_cast<int64_t>(which.size()), most = static_cast<int64_t>(uniforms.size());
    for (const std::vector<double>& row : uniforms) {
        if (row.size() != which.size())
            refuse("the number of uniforms", static_cast<int64_t>(row.size()),
                   "the number of slots, " + std::to_string(all));
        for (const double u : row)
            if (!(u >= 0 && u < 1)) ::refuse("a uniform is outside [0, 1)");
    }
    std::vector<char> taken(slots());
    int64_t room = capacity();
    for (const int64_t slot : which) {
        slot_of("slot", slot);
        const int64_t length = this->length(slot);
        if (length == 0) refuse("slot", slot, "read first");
        if (length > capacity()) refuse("slot", slot, "read again: it is full");
        if (taken[slot]++) refuse("slot", slot, "named once");
        room = std::min(room, capacity() + 1 - length);
    }
    const double patience = seconds.value_or(all == 1 ? ONE_TEXT_SECONDS : BATCH_SECONDS);
    std::vector<std::vector<int64_t>> rows;
    if (most > 1 && all >= LEAST_APART * state->threads) {
        // Earlier rows tell how many more fit; the first one is tried alone.
        const int64_t limit = std::min(most, room);
        int64_t fit = 1;
        if (state->group_seconds == 0) state->write_groups(which, uniforms, fit, rows);
        fit = static_cast<int64_t>(std::clamp<double>(patience / state->group_seconds, fit, limit));
        state->write_groups(which, uniforms, fit, rows);
        return rows;
    }
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    for (int64_t i = 0; i < most; i++) {
        const std::chrono::duration<double> spent = Clock::now() - start;
        if (i > 0 && (i >= room || spent.count() > patience)) break;
        state->advance(which);
        std::vector<int64_t>& row = rows.emplace_back();
        state->trace.timed("sampling", 0, [&] {
            for (int64_t s = 0; s < all; s++) row.push_back(state->choose(which[s], uniforms[i][s]));
        });
    }
    return rows;
}

void Decoder::copy(int64_t from, int64_t to) {
    const Slot& a = slot_of("from", from);
    Slot& b = slot_of("to", to);
    if (from == to) return;
    b.cache.copy(a.cache, a.length);
    b.length = a.length, b.pending = a.pending, b.logits = a.logits, b.text = a.text;
    b.prompt.reset();
}

std::vector<float> Decoder::logits(int64_t slot) { return slot_of("slot", slot).logits; }

void Decoder::record(bool on) { state->trace.record(on); }
std::vector<Span> Decoder::spans() { return state->trace.take(); }

int64_t Decoder::slots() const { return static_cast<int64_t>(state->slots.size()); }
int64_t Decoder::capacity() const { return state->capacity; }
int64_t Decoder::length(int64_t slot) const { return state->length(slot); }
