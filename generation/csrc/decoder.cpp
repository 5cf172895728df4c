// The public class, and how its texts take turns.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/csrc/refuse.h"
#include "simd/portable.h"
#include "simd/simd.h"

namespace {

// From this many texts per thread on, threads are fastest with separate texts (Zen 5 and Intel Xeon), but for
// weights that come from memory: a team reads them once.
constexpr int64_t LEAST_APART = 2;
constexpr int64_t MAX_PANEL_KEYS = 128;  // in a transposed panel of the cache
constexpr int64_t MAX_SLOTS = 1 << 16;
// After these a call begins no further row, so that Ctrl-C takes effect soon.
constexpr double ONE_TEXT_SECONDS = 2e-3, BATCH_SECONDS = 8e-3;

// The shape, if it and the sizes are in range.
const ModelShape& checked(const ModelShape& shape, const DecoderSizes& s) {
    shape.check();
    check("br", s.br, 1, INT64_MAX);
    check("bc", s.bc, 1, INT64_MAX);
    check("slots", s.slots, 1, MAX_SLOTS);
    check("capacity", s.capacity, 1, shape.window > 0 ? INT64_MAX : shape.block_size);
    check("threads", s.threads, 1, MOST_THREADS);
    check("cache_bytes", s.cache_bytes, 1, INT64_MAX);
    return shape;
}

CacheShape cache_of(const ModelShape& s, const DecoderSizes& sizes, CachePrecision kv, bool transposed) {
    // Keys of a transposed panel: whole vectors. A window's first one is read whole: it should be short.
    const int64_t most = s.window > 0 ? std::max<int64_t>(1, s.window / 8) : sizes.capacity;
    const int64_t panel = round_up(std::min({sizes.bc, most, MAX_PANEL_KEYS}),
                                   kv == CachePrecision::bf16 ? 2 * portable::lanes() : simd::lanes());
    // An endless text has two windows, so that the last one moves to the front once in a window's tokens.
    const int64_t keys = s.window > 0 ? 2 * round_up(s.window, panel) + panel : sizes.capacity;
    return {s.n_layer, s.n_head, s.n_embd / s.n_head, keys, transposed, panel, kv};
}

}  // namespace

int64_t Decoder::choose(int64_t number, double uniform) {
    Slot& slot = slots[number];
    slot.pending = draw(weigh(slot.logits.data(), slot.occurrences, slot.sampling), uniform);
    slot.occurrences.seen[slot.pending] = 1;
    slot.occurrences.written[slot.pending]++;
    slot.tail.push(slot.pending);
    if (slot.top >= 0)
        slot.logprobs.push_back(token_logprob(slot.logits.data(), shape.vocab_size, slot.pending, slot.top));
    return slot.pending;
}

Decoder::Decoder(const ModelShape& s, const Tensors& tensors, Precision precision, CachePrecision kv,
                 const Part& part, const DecoderSizes& sizes)
    : shape(checked(s, sizes)),
      part(part),
      cache_bytes(sizes.cache_bytes),
      br(sizes.br),
      bc(sizes.bc),
      capacity(sizes.capacity),
      d(s.n_embd / s.n_head),
      threads(static_cast<int>(sizes.threads)),
      cache_shape(cache_of(s, sizes, kv, part.few.queries > 0)),
      scale(static_cast<float>(1 / std::sqrt(static_cast<double>(d)))),
      endless(s.n_head, s.window),
      caches(product(sizes.slots, cache_shape.words())),
      slots(sizes.slots),
      trace(threads),
      team(new Team(threads, trace)) {
    weights = Weights(s, tensors, precision, threads, [&](int64_t pieces, const auto& piece) {
        Pieces left;
        team->run(threads, [pieces, &left, &piece](Member& member) { member.run(pieces, &left, piece); });
    });
    for (int64_t i = 0; i < sizes.slots; i++) {
        Slot& slot = slots[i];
        slot.cache = Cache(cache_shape, caches + i * cache_shape.words());
        slot.logits.resize(s.vocab_size);
        slot.occurrences.seen.resize(s.vocab_size);
        slot.occurrences.written.resize(s.vocab_size);
    }
    Attention one = attention(1, cache_shape.capacity, 0);
    if (cache_shape.transposed) {
        one.Bc = cache_shape.panel;
        one.kv = kv;
    }
    int64_t attended = part.scratch(one);
    if (cache_shape.transposed)
        attended = std::max(attended, MOST_STEP_ROWS * d + part.few.together.scratch(one));
    const Layer& w = weights.layers[0];
    const int64_t most = std::max(sizes.slots, MOST_STEP_ROWS);
    const auto lay_out = [&](Scratch at) {
        Rows shared{most};
        shared.X = at.matrix(most, w.proj.columns());
        shared.Q = at.matrix(most, w.qkv.columns());
        shared.A = at.matrix(most, s.n_embd);
        shared.Y = at.matrix(most, w.fc.columns());
        shared.L = at.matrix(most, weights.head.columns());
        rows.clear();
        scratch.clear();
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
    check(name, slot, 0, slots.size() - 1);
    return slots[slot];
}

void Decoder::set_sampling(int64_t slot, const Sampling& sampling, int64_t logprobs) {
    Slot& s = slot_of("slot", slot);
    for (const auto& [token, bias] : sampling.logit_bias)
        check("a token of logit_bias", token, 0, shape.vocab_size - 1);
    s.sampling = sampling;
    s.top = logprobs;
    s.logprobs.clear();
}

std::vector<TokenLogprob> Decoder::take_logprobs(int64_t slot) {
    return std::exchange(slot_of("slot", slot).logprobs, {});
}

void Decoder::drop(int64_t slot) { slot_of("slot", slot).prompt.reset(); }

TokenRows Decoder::write(const std::vector<int64_t>& batch, const UniformRows& uniforms,
                         std::optional<double> seconds) {
    const int64_t all = batch.size(), most = uniforms.size();
    if (seconds && !(*seconds >= 0)) refuse("seconds must be at least 0");
    for (const std::vector<double>& row : uniforms) {
        if (row.size() != batch.size())
            refuse("the number of uniforms", row.size(), "the number of slots, " + std::to_string(all));
        for (const double u : row)
            if (!(u >= 0 && u < 1)) refuse("a uniform is outside [0, 1)");
    }
    std::vector<char> taken(slots.size());
    int64_t room = capacity;
    for (const int64_t slot : batch) {
        slot_of("slot", slot);
        const int64_t length = this->length(slot);
        if (length == 0) refuse("slot", slot, "read first");
        if (length > capacity) refuse("slot", slot, "read again: it is full");
        if (taken[slot]++) refuse("slot", slot, "named once");
        room = std::min(room, capacity + 1 - length);
    }
    const double patience = seconds.value_or(all == 1 ? ONE_TEXT_SECONDS : BATCH_SECONDS);
    TokenRows rows;
    const int64_t limit = std::min(most, room);
    const bool apart = all >= LEAST_APART * threads && weights.fit_twice();
    if (draft && limit > 0 && all > 0 && all <= MOST_DRAFTED_TEXTS && (threads == 1 || !apart))
        return write_drafted(batch, uniforms, limit, patience);
    if (most > 1 && apart) {
        // Earlier rows tell how many more fit; the first one is tried alone.
        int64_t fit = 1;
        if (group_seconds == 0) write_groups(batch, uniforms, fit, rows);
        fit = static_cast<int64_t>(std::clamp<double>(patience / group_seconds, fit, limit));
        write_groups(batch, uniforms, fit, rows);
        return rows;
    }
    const auto start = Clock::now();
    for (int64_t i = 0; i < most; i++) {
        if (i > 0 && (i >= room || seconds_since(start) > patience)) break;
        const std::vector<Token> tokens = behind(batch.data(), batch.data() + all);
        if (!tokens.empty()) pass(tokens);
        for (size_t r = 0; r < tokens.size(); r++) finish_row(tokens[r], static_cast<int64_t>(r));
        std::vector<int64_t>& row = rows.emplace_back();
        const Timed timed(trace, "sampling", 0);
        for (int64_t s = 0; s < all; s++) row.push_back(choose(batch[s], uniforms[i][s]));
    }
    return rows;
}

void Decoder::copy(int64_t from, int64_t to) {
    const Slot& a = slot_of("from", from);
    Slot& b = slot_of("to", to);
    if (from == to) return;
    b.cache.copy(a.cache, a.length);
    b.length = a.length;
    b.pending = a.pending;
    b.logits = a.logits;
    b.occurrences = a.occurrences;
    b.tail = a.tail;
    b.prompt.reset();
}

int64_t Decoder::length(int64_t slot) const { return slots[slot].length + (slots[slot].pending >= 0); }
