// A step: one token for each of several texts. Threads divide a large batch; of few texts, heads and panels.
#include <algorithm>

#include "buffer.h"
#include "decoder.h"
#include "simd/simd.h"
#include "threads.h"

namespace {

constexpr int RARELY = 200;  // at most 0.5 % of the time is spent packing for another team

}  // namespace

// One head of `count` rows of a text: each q attends up to its own token. ldQ, ld: the strides of q and `to`.
inline void Decoder::attend(const Token& first, int64_t count, int64_t layer, int64_t head, const float* q,
                            int64_t ldQ, float* to, int64_t ld, int64_t thread) const {
    const Cache& cache = slots[first.slot].cache;
    float* const own = scratch[thread];
    if (count > 1 && !cache_shape.transposed) {
        for (int64_t r = 0; r < count; r++)
            attend({first.slot, 0, first.position + r}, 1, layer, head, q + r * ldQ, ldQ, to + r * ld, ld,
                   thread);
        return;
    }
    Attention a = attention(count, first.position + count, head);
    a.q = {q, 0, 0, ldQ, 1};
    a.k = cache.keys(layer, head);
    a.v = cache.values(layer, head);
    a.out = count > 1 ? own : to;
    if (cache_shape.transposed) {
        a.Bc = cache_shape.panel;
        a.kv = cache_shape.precision;
    }
    if (count == 1) return part.attention(a, own);
    part.few.together.attention(a, own + MOST_STEP_ROWS * d);
    for (int64_t r = 0; r < count; r++) std::copy_n(a.out + r * d, d, to + r * ld);
}

// Row r is tokens[r], which only pieces may read: a late member may miss it. apart: one token a text.
void Decoder::step(const Weights& model, const Token* tokens, bool apart, const Rows& rows, Member& member) {
    const NoDenormals flushed;
    Block<Member> block(rows, member);
    for (int64_t l = 0; l < shape.n_layer; l++) {
        const Layer& w = model.layers[l];
        block.qkv(w, 0, apart, [&](int64_t h, int64_t begin, int64_t end) {
            const simd::Matrix q = rows.Q.from(0, h * w.qkv.width());
            // All are appended before the first attends: a vector load stalls on a number just stored.
            for (int64_t r = begin; r < end; r++)
                slots[tokens[r].slot].cache.append(l, h, tokens[r].position, q.row(r) + d, 0, 1);
            for (int64_t r = begin, next = begin; r < end; r = next) {
                while (next < end && tokens[next].slot == tokens[r].slot) next++;
                if (next < end) slots[tokens[next].slot].cache.prefetch(l, h, tokens[next].position);
                attend(tokens[r], next - r, l, h, q.row(r), q.ld, rows.A.row(r) + h * d, rows.A.ld,
                       member.thread);
            }
        });
        block.rest(w);
    }
    block.logits(model);
}

// The pending tokens of these slots.
std::vector<Token> Decoder::behind(const int64_t* begin, const int64_t* end) {
    std::vector<Token> tokens;
    for (const int64_t* at = begin; at < end; at++) {
        Slot& slot = slots[*at];
        if (slot.pending < 0) continue;
        slot.length -= slot.cache.make_room(slot.length, shape.window);
        tokens.push_back({*at, slot.pending, slot.length});
    }
    return tokens;
}

// The rows of these tokens begin at `row`.
void Decoder::embed_rows(const std::vector<Token>& tokens, int64_t row, int64_t thread) {
    const Timed timed(trace, "embedding", thread);
    for (const Token& token : tokens) weights.embed(rows[0].X.row(row++), token.id, token.position);
}

// Lets the text of a row end with its token.
void Decoder::finish_row(const Token& token, int64_t row) {
    Slot& slot = slots[token.slot];
    std::copy_n(rows[0].L.row(row), shape.vocab_size, slot.logits.begin());
    slot.length = token.position + 1;
    slot.pending = -1;
}

void Decoder::pack_for(int members) {
    if (members == 1 || members == shared_by || !weights.fit_twice()) return;
    const auto start = Clock::now();
    team->settle();
    shares = weights.shared_by(members);
    shared_by = members;
    const auto packed = Clock::now();
    packed_until = packed + RARELY * (packed - start);
}

void Decoder::pass(const std::vector<Token>& tokens) {
    const int64_t count = tokens.size();
    bool apart = true;
    for (int64_t r = 1; r < count; r++) apart &= tokens[r].slot != tokens[r - 1].slot;
    size_t logarithm = 0;
    while (count >> (logarithm + 1)) logarithm++;
    TeamSize& size = sizes[logarithm];
    const bool helped = threads > 1 && team->helps();
    int members = helped ? size.next(Clock::now()) : 1;
    // Panels packed for another team are correct, only slower.
    if (helped && (size.on_trial() || Clock::now() >= packed_until)) pack_for(members);
    const auto start = Clock::now();
    if (!pace.together(count, start)) members = 1;
    embed_rows(tokens, 0, 0);
    team->run(members, [this, row_tokens = tokens.data(), count, apart](Member& member) {
        const bool shared = member.members > 1 && shared_by > 1;
        step(shared ? shares : weights, row_tokens, apart, rows[member.thread].from(0, count), member);
    });
    const auto end = Clock::now();
    if (helped) pace.took(count, members > 1, end - start, end);
    if (helped) size.took(members, threads, (end - start) / count, end);
}

std::vector<int64_t> Decoder::groups(const std::vector<int64_t>& batch) const {
    const int64_t all = batch.size(), share = (all + threads - 1) / threads;
    int64_t longest = 1;
    for (const int64_t slot : batch) longest = std::max(longest, length(slot));
    const double text = static_cast<double>(shape.n_layer * shape.n_head) *
                        static_cast<double>(cache_shape.head_words(longest) * sizeof(float));
    const Traffic traffic{weights.matrix_bytes, text, static_cast<double>(cache_bytes), threads};
    const int64_t block = portable::rows(), size = group_size(traffic, share, block);
    const int64_t turns = (share + size - 1) / size;  // groups of each thread
    const int64_t parts = std::min(all, turns * threads);
    // Whole register blocks if all threads then get equally many.
    const int64_t unit = size % block || all % (block * threads) ? 1 : block, units = all / unit;
    std::vector<int64_t> starts;
    for (int64_t g = 0; g <= parts; g++) starts.push_back(units * g / parts * unit);
    return starts;
}

void Decoder::write_groups(const std::vector<int64_t>& batch, const UniformRows& uniforms, int64_t count,
                           TokenRows& tokens) {
    const size_t begin = tokens.size(), end = count;
    if (begin == end) return;
    tokens.resize(end, std::vector<int64_t>(batch.size()));
    const std::vector<int64_t> starts = groups(batch);
    std::vector<Clock::duration> spent(starts.size() - 1);
    // A token for each slot of group g.
    const auto write = [&](int64_t g, int64_t thread, const double* uniform, int64_t* chosen) {
        const std::vector<Token> texts = behind(batch.data() + starts[g], batch.data() + starts[g + 1]);
        const int64_t size = texts.size();
        if (size > 0) {
            embed_rows(texts, starts[g], thread);
            Member alone(trace, static_cast<int>(thread));
            step(weights, texts.data(), true, rows[thread].from(starts[g], size), alone);
            for (int64_t r = 0; r < size; r++) finish_row(texts[r], starts[g] + r);
        }
        const Timed timed(trace, "sampling", thread);
        for (int64_t s = starts[g]; s < starts[g + 1]; s++) chosen[s] = choose(batch[s], uniform[s]);
    };
    const auto write_all = [&](int64_t g, int64_t thread) {
        const auto start = Clock::now();
        for (size_t i = begin; i < end; i++) write(g, thread, uniforms[i].data(), tokens[i].data());
        spent[g] = Clock::now() - start;
    };
    Pieces left;
    team->run(threads, [parts = spent.size(), &left, &write_all](Member& member) {
        member.run(parts, &left, [&](int64_t g) { write_all(g, member.thread); });
    });
    const auto longest = *std::max_element(spent.begin(), spent.end());
    group_seconds = std::chrono::duration<double>(longest).count() / static_cast<double>(end - begin);
}
