// A step: one token for each of several texts.
//
//   x <- wte[token] + wpe[position]
//   for each layer:
//       q, k, v <- LN(x) Wqkv^T;   K, V <- K, V with k, v appended
//       x <- x + attention(q, K, V) Wproj^T
//       x <- x + gelu(LN(x) Wfc^T) Wout^T
//   logits <- LN(x) wte^T
//
// Threads: the texts of a large batch are divided between them. Few texts go in stages, each of which the
// threads share by heads and panels. Results do not depend on the number of texts or threads.
#include <algorithm>

#include "denormals.h"
#include "scratch.h"
#include "state.h"

constexpr int RARELY = 200;                     // at most 0.5 % of the time is spent packing for another team
constexpr double MOST_PACKED_TWICE = 64 << 20;  // bytes of the matrices

// One head of one text: q attends to the cache, whose last token is at slot.length.
inline void Decoder::State::attend(const Slot& slot, int64_t layer, int64_t head, const float* q, float* to,
                                   int64_t thread) const {
    float* own = scratch + thread * scratch_floats;
    Attention a = attention(1, 1, slot.length + 1);
    a.q = {q, 0, 0, d, 1};
    a.out = to;
    if (widened_floats > 0) {
        float *K = own, *V = own + capacity * d;
        slot.cache.widen(layer, head, slot.length + 1, K, V);
        a.k = {K, 0, 0, d, 1}, a.v = {V, 0, 0, d, 1};
    } else if (part.few.queries > 0) {
        const bool pairs = kv == CachePrecision::bf16;
        a.k = {slot.cache.K(layer, head), 0, 0, d, pairs ? panel / 2 : panel};
        a.v = {slot.cache.V(layer, head), 0, 0, slot.cache.row_words(), 1};
        a.Bc = panel, a.kv = kv;
    } else {
        a.k = {slot.cache.K(layer, head), 0, 0, d, 1}, a.v = {slot.cache.V(layer, head), 0, 0, d, 1};
    }
    part.attention(a, own + widened_floats);
}

// Row r of a step, `row + r` of the buffers, is the pending token of slots[which[r]].
template <class Pieces>
void Decoder::State::step(const Weights& model, const int64_t* which, int64_t rows, int64_t row, int64_t thread,
                          Pieces& pieces) {
    const NoDenormals flushed;
    const int64_t C = shape.n_embd, H = shape.n_head, stages = 4 * shape.n_layer + 1;
    float *X = x + row * ldX, *Q = qkv + row * ldQ, *A = attended + row * C, *Y = hidden + row * ldH;
    const int64_t own = thread * static_cast<int64_t>(slots.size()) + row;  // this thread's rows
    float *L = logits + row * ldL, *N = normed + own * C, *O = operands + own * ldO;

    // A stage: body(p, begin, end) for each panel p. The rows are divided too where there are fewer panels than
    // members.
    const auto each = [&](int64_t stage, int64_t panels, const auto& body) {
        const int64_t blocks = std::clamp<int64_t>((pieces.members() + panels - 1) / panels, 1, rows);
        pieces.share(stage, blocks * panels, [&](int64_t i) {
            const int64_t block = i / panels;
            body(i % panels, rows * block / blocks, rows * (block + 1) / blocks);
        });
    };
    // Another thread has just written most of a piece's input, so all of it is prefetched at once.
    const auto fetch = [&](const float* from, int64_t stride, int64_t floats, int64_t begin, int64_t end) {
        for (int64_t r = begin; pieces.members() > 1 && r < end; r++)
            for (int64_t i = 0; i < floats; i += LINE_FLOATS) __builtin_prefetch(from + r * stride + i);
    };
    // The left operand of a stage's products. Each thread makes its own with its first piece.
    simd::ConstMatrix operand{};
    int64_t made_for = -1, made_from = 0;
    const auto once = [&](int64_t stage, int64_t begin, const auto& make) {
        if (made_for == stage && made_from == begin) return;
        make();
        made_for = stage, made_from = begin;
    };
    const auto normalise = [&](int64_t stage, const LayerNorm& norm, const Linear& w, int64_t begin,
                               int64_t end) {
        once(stage, begin, [&] {
            fetch(X, ldX, C, begin, end);
            trace.timed("norm", thread, [&] {
                for (int64_t r = begin; r < end; r++) norm(N + r * C, X + r * ldX);
                operand = w.operand({N + begin * C, C}, end - begin, O + begin * ldO);
            });
        });
    };
    for (int64_t l = 0, stage = 0; stage + 1 < stages; l++) {
        const Layer& w = model.layers[l];
        each(stage, H, [&](int64_t h, int64_t begin, int64_t end) {
            normalise(stage, w.ln_1, w.qkv, begin, end);
            trace.timed("QKV", thread, [&] { w.qkv.set({Q + begin * ldQ, ldQ}, operand, end - begin, h); });
            trace.timed("attention", thread, [&] {
                const float* q = Q + h * w.qkv.width();
                // All are appended before the first attends: a vector load stalls on a number just stored.
                for (int64_t r = begin; r < end; r++) {
                    const Slot& slot = slots[which[r]];
                    slot.cache.append(l, h, slot.length, q + r * ldQ + d, 0, 1);
                }
                for (int64_t r = begin; r < end; r++) {
                    if (r + 1 < end) {
                        const Slot& following = slots[which[r + 1]];
                        following.cache.prefetch(l, h, following.length);
                    }
                    attend(slots[which[r]], l, h, q + r * ldQ, A + r * C + h * d, thread);
                }
            });
        });
        stage++;
        each(stage, w.proj.panels(), [&](int64_t p, int64_t begin, int64_t end) {
            fetch(A, C, C, begin, end);
            trace.timed("projection", thread, [&] {
                once(stage, begin,
                     [&] { operand = w.proj.operand({A + begin * C, C}, end - begin, O + begin * ldO); });
                w.proj.add({X + begin * ldX, ldX}, operand, end - begin, p);
            });
        });
        stage++;
        each(stage, w.fc.panels(), [&](int64_t p, int64_t begin, int64_t end) {
            normalise(stage, w.ln_2, w.fc, begin, end);
            trace.timed("MLP up", thread, [&] { w.fc.set({Y + begin * ldH, ldH}, operand, end - begin, p); });
            trace.timed("MLP GELU", thread, [&] {
                for (int64_t r = begin; r < end; r++)
                    portable::gelu(Y + r * ldH + p * w.fc.width(), w.fc.columns(p));
            });
        });
        stage++;
        each(stage, w.out.panels(), [&](int64_t p, int64_t begin, int64_t end) {
            fetch(Y, ldH, 4 * C, begin, end);
            trace.timed("MLP down", thread, [&] {
                once(stage, begin,
                     [&] { operand = w.out.operand({Y + begin * ldH, ldH}, end - begin, O + begin * ldO); });
                w.out.add({X + begin * ldX, ldX}, operand, end - begin, p);
            });
        });
        stage++;
    }
    each(stages - 1, model.head.panels(), [&](int64_t p, int64_t begin, int64_t end) {
        normalise(stages - 1, model.ln_f, model.head, begin, end);
        trace.timed("head", thread, [&] { model.head.set({L + begin * ldL, ldL}, operand, end - begin, p); });
    });
}

void Decoder::State::embed_rows(const int64_t* which, int64_t rows, int64_t row) {
    for (int64_t r = 0; r < rows; r++) {
        const Slot& slot = slots[which[r]];
        embed(x + (row + r) * ldX, slot.pending, slot.length);
    }
}

void Decoder::State::finish_rows(const int64_t* which, int64_t rows, int64_t row) {
    for (int64_t r = 0; r < rows; r++) {
        Slot& slot = slots[which[r]];
        std::copy_n(logits + (row + r) * ldL, shape.vocab_size, slot.logits.begin());
        slot.length++;
        slot.pending = -1;
    }
}

void Decoder::State::step_in_team(const std::vector<int64_t>& which, int members) {
    const int64_t rows = static_cast<int64_t>(which.size());
    trace.timed("embedding", 0, [&] { embed_rows(which.data(), rows, 0); });
    if (members == 1) {
        Alone alone;
        return step(weights, which.data(), rows, 0, 0, alone);
    }
    team->take_turn(members, [this, texts = which.data(), rows](Member& member) {
        Recorded pieces{trace, member};
        step(shared_by > 1 ? shares : weights, texts, rows, 0, member.thread, pieces);
    });
}

void Decoder::State::pack_for(int members) {
    if (members == 1 || members == shared_by || weights.matrix_bytes > MOST_PACKED_TWICE) return;
    const auto start = Pace::Clock::now();
    team->settle();
    shares = weights.shared_by(members);
    shared_by = members;
    const auto packed = Pace::Clock::now();
    packed_until = packed + RARELY * (packed - start);
}

void Decoder::State::advance(const std::vector<int64_t>& which) {
    const int64_t rows = static_cast<int64_t>(which.size());
    if (rows == 0) return;
    if (threads == 1 || !team->ours()) {
        step_in_team(which, 1);
        return finish_rows(which.data(), rows, 0);
    }
    size_t logarithm = 0;
    while (rows >> (logarithm + 1)) logarithm++;
    TeamSize& size = sizes[logarithm];
    int members = size.next(Pace::Clock::now());
    // Panels packed for another team are correct, only slower.
    if (size.on_trial() || Pace::Clock::now() >= packed_until) pack_for(members);
    const auto start = Pace::Clock::now();
    if (!pace.together(rows, start)) members = 1;
    step_in_team(which, members);
    const auto end = Pace::Clock::now();
    pace.took(rows, members > 1, end - start, end);
    size.took(members, threads, (end - start) / rows, end);
    finish_rows(which.data(), rows, 0);
}

// A token for each of the slots from .. to - 1 of `which`.
void Decoder::State::write_group(const std::vector<int64_t>& which, int64_t from, int64_t to, int64_t thread,
                                 const double* uniforms, int64_t* tokens) {
    std::vector<int64_t> behind;
    for (int64_t s = from; s < to; s++)
        if (slots[which[s]].pending >= 0) behind.push_back(which[s]);
    if (const int64_t rows = static_cast<int64_t>(behind.size())) {
        trace.timed("embedding", thread, [&] { embed_rows(behind.data(), rows, from); });
        Alone alone;
        step(weights, behind.data(), rows, from, thread, alone);
        finish_rows(behind.data(), rows, from);
    }
    trace.timed("sampling", thread, [&] {
        for (int64_t s = from; s < to; s++) tokens[s] = choose(which[s], uniforms[s]);
    });
}

void Decoder::State::write_groups(const std::vector<int64_t>& which,
                                  const std::vector<std::vector<double>>& uniforms, int64_t count,
                                  std::vector<std::vector<int64_t>>& tokens) {
    const int64_t all = static_cast<int64_t>(which.size());
    const std::vector<int64_t> starts = groups(which);
    const int64_t parts = static_cast<int64_t>(starts.size()) - 1;
    const size_t begin = tokens.size(), end = static_cast<size_t>(count);
    if (begin == end) return;
    tokens.resize(end, std::vector<int64_t>(all));
    Attempts attempts;
    Pace::Clock::duration longest{};
    const auto write = [&](int64_t g, int64_t thread) {
        const auto start = Pace::Clock::now();
        attempts.attempt(
            [&] {
                for (size_t i = begin; i < end; i++)
                    write_group(which, starts[g], starts[g + 1], thread, uniforms[i].data(), tokens[i].data());
            },
            [&] { longest = std::max(longest, Pace::Clock::now() - start); });
    };
    if (threads == 1 || !team->ours()) {
        for (int64_t g = 0; g < parts; g++) write(g, 0);
    } else {
        team->take_turn(threads, [this, parts, &write](Member& member) {
            Recorded{trace, member}.run(0, parts, [&](int64_t g) { write(g, member.thread); });
        });
    }
    attempts.rethrow();
    group_seconds = std::chrono::duration<double>(longest).count() / static_cast<double>(end - begin);
}
