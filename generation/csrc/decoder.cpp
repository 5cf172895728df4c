// The public class, and how its texts take turns.
#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "groups.h"
#include "scratch.h"
#include "simd/portable.h"
#include "simd/simd.h"
#include "state.h"

namespace {

constexpr int64_t MAX_PANEL_KEYS = 128;  // in a transposed panel of the cache
// From this many texts per thread on, threads are fastest with separate texts (Zen 5 and Intel Xeon).
constexpr int64_t LEAST_APART = 2;

}  // namespace

Decoder::State::State(const ModelShape& s, const Tensors& tensors, Precision precision, CachePrecision kv,
                      const Part& part, int64_t br, int64_t bc, int64_t slot_count, int64_t capacity,
                      int threads, int64_t cache_bytes)
    : shape(s),
      part(part),
      kv(kv),
      cache_bytes(cache_bytes),
      d(s.n_embd / s.n_head),
      br(br),
      bc(bc),
      capacity(capacity),
      panel(round_up(std::min({bc, capacity, MAX_PANEL_KEYS}),
                     kv == CachePrecision::bf16 ? 2 * portable::lanes() : simd::lanes())),
      cache_shape{s.n_layer, s.n_head, d, capacity, part.few.queries > 0, panel, kv},
      scale(static_cast<float>(1 / std::sqrt(static_cast<double>(d)))),
      threads(threads),
      weights(s, tensors, precision),
      slots(slot_count),
      trace(threads),
      team(new Team(4 * s.n_layer + 1, threads)) {
    caches = Buffer(slot_count * cache_shape.words());
    for (int64_t i = 0; i < slot_count; i++) {
        Slot& slot = slots[i];
        slot.cache = Cache(cache_shape, caches + i * cache_shape.words());
        slot.logits.resize(s.vocab_size);
        slot.text.seen.resize(s.vocab_size);
        slot.text.written.resize(s.vocab_size);
    }
    const Layer& w = weights.layers[0];
    ldX = row_stride(s.n_embd), ldQ = w.qkv.columns();
    ldH = row_stride(w.fc.columns()), ldL = row_stride(weights.head.columns());
    ldO = w.out.operand_words();  // the longest row
    x = Buffer(slot_count * ldX);
    qkv = Buffer(slot_count * ldQ);
    attended = Buffer(slot_count * s.n_embd);
    hidden = Buffer(slot_count * ldH);
    logits = Buffer(slot_count * ldL);
    normed = Buffer(threads * slot_count * s.n_embd);
    operands = Buffer(threads * slot_count * ldO);
    Attention one = attention(1, 1, capacity);
    if (part.few.queries > 0) one.Bc = panel, one.kv = kv;
    widened_floats = kv == CachePrecision::bf16 && !cache_shape.transposed ? round_up(2 * capacity * d, 16) : 0;
    scratch_floats = widened_floats + round_up(part.scratch(one), 16);
    scratch = Buffer(threads * scratch_floats);
}

void Decoder::State::embed(float* to, int64_t token, int64_t position) const {
    const int64_t C = shape.n_embd;
    for (int64_t i = 0; i < C; i++) to[i] = weights.wte[token * C + i] + weights.wpe[position * C + i];
}

int64_t Decoder::State::choose(int64_t which, double uniform) {
    Slot& slot = slots[which];
    slot.pending = sample(slot.logits.data(), slot.text, uniform, slot.sampling);
    slot.text.seen[slot.pending] = 1;
    slot.text.written[slot.pending]++;
    if (slot.top >= 0)
        slot.logprobs.push_back(token_logprob(slot.logits.data(), shape.vocab_size, slot.pending, slot.top));
    return slot.pending;
}

std::vector<int64_t> Decoder::State::next(const std::vector<int64_t>& which, const double* uniforms) {
    std::vector<int64_t> behind, tokens;
    for (const int64_t slot : which)
        if (slots[slot].pending >= 0) behind.push_back(slot);
    advance(behind);
    trace.timed("sampling", 0, [&] {
        for (size_t i = 0; i < which.size(); i++) tokens.push_back(choose(which[i], uniforms[i]));
    });
    return tokens;
}

std::vector<int64_t> Decoder::State::groups(const std::vector<int64_t>& which) const {
    const int64_t all = static_cast<int64_t>(which.size()), share = (all + threads - 1) / threads;
    int64_t longest = 1;
    for (const int64_t slot : which) longest = std::max(longest, length(slot));
    const double text = static_cast<double>(shape.n_layer * shape.n_head) *
                        static_cast<double>(cache_shape.head_words(longest) * sizeof(float));
    const Traffic traffic{weights.matrix_bytes, text, static_cast<double>(cache_bytes), threads};
    const int64_t rows = portable::rows(), size = group_size(traffic, share, rows);
    const int64_t turns = (share + size - 1) / size;  // groups of each thread
    const int64_t parts = std::min(all, turns * threads);
    // Whole register blocks if all threads then get equally many.
    const int64_t unit = size % rows || all % (rows * threads) ? 1 : rows, units = all / unit;
    std::vector<int64_t> starts;
    for (int64_t g = 0; g <= parts; g++) starts.push_back(units * g / parts * unit);
    return starts;
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
        rows.push_back(state->next(slots, uniforms[i].data()));
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
    if (s.pending >= 0) state->advance({slot});
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
