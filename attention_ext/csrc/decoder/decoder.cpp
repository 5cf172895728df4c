// The public class, and how its texts take turns.
#include "decoder/decoder.h"

#include <algorithm>
#include <chrono>

#include "decoder/state.h"
#include "round_up.h"

namespace {

constexpr int64_t MAX_PANEL_KEYS = 128;        // of a transposed panel of the cache
constexpr int64_t NEAR_CACHE_BYTES = 4 << 20;  // what weights, or K and V, may take of a shared cache level

}  // namespace

Decoder::State::State(const ModelShape& s, const Tensors& tensors, Precision precision, const Part& part,
                      int64_t br, int64_t bc, int64_t slot_count, int64_t capacity, int threads)
    : shape(s),
      part(part),
      d(s.n_embd / s.n_head),
      br(br),
      bc(bc),
      capacity(capacity),
      panel(round_up(std::min({bc, capacity, MAX_PANEL_KEYS}), simd::lanes())),
      threads(threads),
      weights(s, tensors, precision, threads),
      slots(slot_count),
      trace(threads),
      team(new Team(4 * s.n_layer + 1, threads)) {
    for (Slot& slot : slots) {
        slot.cache = Cache({s.n_layer, s.n_head, d, capacity, part.transposed > 0, panel});
        slot.logits.resize(s.vocab_size);
        slot.seen.resize(s.vocab_size);
    }
    ldX = weights.layers[0].proj.columns();  // at least n_embd
    ldN = s.n_embd;
    x = Buffer(slot_count * ldX);
    qkv = Buffer(slot_count * weights.layers[0].qkv.columns());
    attended = Buffer(slot_count * s.n_embd);
    hidden = Buffer(slot_count * weights.layers[0].fc.columns());
    logits = Buffer(slot_count * weights.head.columns());
    normed = Buffer(threads * slot_count * ldN);
    Attention one = attention(1, 1, capacity);
    one.Bc = std::max(one.Bc, panel);
    scratch_floats = round_up(part.scratch(one), 16);
    scratch = Buffer(threads * scratch_floats);
}

void Decoder::State::embed(float* to, int64_t token, int64_t position) const {
    const int64_t C = shape.n_embd;
    for (int64_t i = 0; i < C; i++) to[i] = weights.wte[token * C + i] + weights.wpe[position * C + i];
}

std::vector<int64_t> Decoder::State::next(const std::vector<int64_t>& which, const double* uniforms) {
    std::vector<int64_t> behind, tokens;
    for (const int64_t slot : which)
        if (slots[slot].pending >= 0) behind.push_back(slot);
    advance(behind);
    for (size_t i = 0; i < which.size(); i++) {
        Slot& slot = slots[which[i]];
        trace.timed("sampling", 0,
                    [&] { slot.pending = sample(slot.logits.data(), slot.seen, uniforms[i], slot.sampling); });
        slot.seen[slot.pending] = 1;
        tokens.push_back(slot.pending);
    }
    return tokens;
}

// Weights that stay in a near cache anyway leave room there for the K and V of a group: as many slots as fit,
// at least one for each thread, and no more than the products take at a time. Other weights come from far away,
// and all slots share a pass over them.
int64_t Decoder::State::group_size(const std::vector<int64_t>& which) const {
    if (weights.matrix_bytes > NEAR_CACHE_BYTES) return std::max<int64_t>(1, which.size());
    int64_t longest = 1;
    for (const int64_t slot : which) longest = std::max(longest, length(slot));
    const int64_t bytes = 2 * shape.n_layer * shape.n_embd * longest * sizeof(float);
    return std::clamp(NEAR_CACHE_BYTES / bytes, threads, simd::rows() * threads);
}

Decoder::Decoder(const ModelShape& shape, const Tensors& tensors, Precision precision, const Part& part,
                 int64_t br, int64_t bc, int64_t slots, int64_t capacity, int threads)
    : state(std::make_unique<State>(shape, tensors, precision, part, br, bc, slots, capacity, threads)) {}

Decoder::~Decoder() = default;

void Decoder::prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues) {
    Slot& s = state->slots[slot];
    if (!continues) std::fill(s.seen.begin(), s.seen.end(), 0);
    for (const int64_t id : ids) s.seen[id] = 1;
    state->prefill(s, ids);
}

std::vector<std::vector<int64_t>> Decoder::write(const std::vector<int64_t>& slots,
                                                 const std::vector<std::vector<double>>& uniforms,
                                                 double patience) {
    using Clock = std::chrono::steady_clock;
    int64_t room = capacity();
    for (const int64_t slot : slots) room = std::min(room, capacity() + 1 - length(slot));
    const int64_t all = static_cast<int64_t>(slots.size()), most = static_cast<int64_t>(uniforms.size());
    const int64_t size = most > 1 ? state->group_size(slots) : all;
    const int64_t groups = all > size ? (all + size - 1) / size : 1;
    std::vector<std::vector<int64_t>> rows;
    const auto start = Clock::now();
    for (int64_t g = 0; g < groups; g++) {
        const int64_t from = all * g / groups, to = all * (g + 1) / groups;
        const std::vector<int64_t> group(slots.begin() + from, slots.begin() + to);
        for (int64_t i = 0; i < most; i++) {
            if (g > 0 && i == static_cast<int64_t>(rows.size())) break;  // as many as the first group
            if (g == 0) {
                const std::chrono::duration<double> spent = Clock::now() - start;
                if (i > 0 && (i >= room || spent.count() > patience)) break;
                rows.emplace_back(all);
            }
            const std::vector<int64_t> tokens = state->next(group, uniforms[i].data() + from);
            std::copy(tokens.begin(), tokens.end(), rows[i].begin() + from);
        }
    }
    return rows;
}

void Decoder::copy(int64_t from, int64_t to) {
    const Slot& a = state->slots[from];
    Slot& b = state->slots[to];
    b.cache.copy(a.cache, a.length);
    b.length = a.length, b.pending = a.pending, b.logits = a.logits, b.seen = a.seen;
}

void Decoder::push(int64_t slot, int64_t token) {
    Slot& s = state->slots[slot];
    if (s.pending >= 0) state->advance({slot});
    s.pending = token;
    s.seen[token] = 1;
    state->advance({slot});
}

const std::vector<float>& Decoder::logits(int64_t slot) const { return state->slots[slot].logits; }
void Decoder::set_sampling(int64_t slot, const Sampling& sampling) { state->slots[slot].sampling = sampling; }

void Decoder::record(bool on) { state->trace.record(on); }
std::vector<Span> Decoder::spans() { return state->trace.take(); }

const ModelShape& Decoder::shape() const { return state->shape; }
int64_t Decoder::slots() const { return static_cast<int64_t>(state->slots.size()); }
int64_t Decoder::capacity() const { return state->capacity; }
int64_t Decoder::length(int64_t slot) const { return state->length(slot); }
