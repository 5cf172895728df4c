// The public class, and how its texts take turns.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "state.h"

namespace {

// From this many texts per thread on, threads are fastest with separate texts (Zen 5 and Intel Xeon).
constexpr int64_t LEAST_APART = 2;

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
                 int64_t cache_bytes)
    : state(std::make_unique<State>(shape, tensors, precision, kv, part, br, bc, slots, capacity, threads,
                                    cache_bytes)) {}

Decoder::~Decoder() = default;

void Decoder::prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top) {
    prefill_begin(slot, ids, continues, top);
    prefill_some(slot, std::numeric_limits<double>::infinity());
}

void Decoder::prefill_begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top) {
    Slot& s = state->slots[slot];
    if (!continues) {
        std::fill(s.text.seen.begin(), s.text.seen.end(), 0);
        std::fill(s.text.written.begin(), s.text.written.end(), 0);
        s.logprobs.clear();
    }
    for (const int64_t id : ids) s.text.seen[id] = 1;
    state->begin_prompt(s, ids, top);
}

bool Decoder::prefill_some(int64_t slot, double seconds) {
    return state->read_prompt(state->slots[slot], seconds);
}

void Decoder::prefill_drop(int64_t slot) { state->slots[slot].prompt.reset(); }
bool Decoder::reading(int64_t slot) const { return state->slots[slot].prompt != nullptr; }

std::vector<std::vector<int64_t>> Decoder::write(const std::vector<int64_t>& slots,
                                                 const std::vector<std::vector<double>>& uniforms,
                                                 double patience) {
    using Clock = std::chrono::steady_clock;
    int64_t room = capacity();
    for (const int64_t slot : slots) room = std::min(room, capacity() + 1 - length(slot));
    const int64_t all = static_cast<int64_t>(slots.size()), most = static_cast<int64_t>(uniforms.size());
    std::vector<std::vector<int64_t>> rows;
    if (most > 1 && all >= LEAST_APART * state->threads) {
        // Earlier rows tell how many more fit; the first one is tried alone.
        const int64_t limit = std::min(most, room);
        int64_t fit = 1;
        if (state->group_seconds == 0) state->write_groups(slots, uniforms, fit, rows);
        fit = static_cast<int64_t>(std::clamp<double>(patience / state->group_seconds, fit, limit));
        state->write_groups(slots, uniforms, fit, rows);
        return rows;
    }
    const auto start = Clock::now();
    for (int64_t i = 0; i < most; i++) {
        const std::chrono::duration<double> spent = Clock::now() - start;
        if (i > 0 && (i >= room || spent.count() > patience)) break;
        state->advance(slots);
        std::vector<int64_t>& row = rows.emplace_back();
        state->trace.timed("sampling", 0, [&] {
            for (int64_t s = 0; s < all; s++) row.push_back(state->choose(slots[s], uniforms[i][s]));
        });
    }
    return rows;
}

void Decoder::copy(int64_t from, int64_t to) {
    const Slot& a = state->slots[from];
    Slot& b = state->slots[to];
    b.cache.copy(a.cache, a.length);
    b.length = a.length, b.pending = a.pending, b.logits = a.logits, b.text = a.text;
    b.prompt.reset();
}

void Decoder::push(int64_t slot, int64_t token) {
    Slot& s = state->slots[slot];
    state->advance({slot});
    s.pending = token;
    s.text.seen[token] = 1;
    s.text.written[token]++;
    state->advance({slot});
}

const std::vector<float>& Decoder::logits(int64_t slot) const { return state->slots[slot].logits; }
void Decoder::set_sampling(int64_t slot, const Sampling& sampling) { state->slots[slot].sampling = sampling; }

void Decoder::set_logprobs(int64_t slot, int64_t top) {
    state->slots[slot].top = top;
    state->slots[slot].logprobs.clear();
}

std::vector<TokenLogprob> Decoder::take_logprobs(int64_t slot) {
    return std::exchange(state->slots[slot].logprobs, {});
}

void Decoder::record(bool on) { state->trace.record(on); }
std::vector<Span> Decoder::spans() { return state->trace.take(); }

const ModelShape& Decoder::shape() const { return state->shape; }
int64_t Decoder::slots() const { return static_cast<int64_t>(state->slots.size()); }
int64_t Decoder::capacity() const { return state->capacity; }
int64_t Decoder::length(int64_t slot) const { return state->length(slot); }
