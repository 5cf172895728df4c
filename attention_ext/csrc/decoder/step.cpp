// A step: one token for each of several texts.
//
//   x <- wte[token] + wpe[position]
//   for each layer:
//       q, k, v <- LN(x) Wqkv^T;   K, V <- K, V with k, v appended
//       x <- x + attention(q, K, V) Wproj^T
//       x <- x + gelu(LN(x) Wfc^T) Wout^T
//   logits <- LN(x) wte^T
//
// Threads: a batch is divided between them. A single text, or a few, go in stages, whose pieces (heads, panels)
// are taken by whichever thread is free. Results do not depend on the number of texts or threads.
#include <algorithm>

#include "decoder/state.h"
#include "denormals.h"

// One head of one text: q attends to the cache, whose last token is at slot.length.
inline void Decoder::State::attend(const Slot& slot, int64_t layer, int64_t head, const float* q, float* to,
                                   int64_t thread) const {
    const bool transposed = part.transposed > 0;
    Attention a = attention(1, 1, slot.length + 1);
    a.q = {q, 0, 0, d, 1};
    a.k = {slot.cache.K(layer, head), 0, 0, d, transposed ? panel : 1};
    if (transposed) a.Bc = panel;
    a.v = {slot.cache.V(layer, head), 0, 0, d, 1};
    a.out = to;
    part.kernel(a, scratch + thread * scratch_floats);
}

// The rows begin .. end - 1 of a step; row r is the pending token of slots[which[r]].
template <class Pieces>
void Decoder::State::step(const std::vector<int64_t>& which, int64_t begin, int64_t end, int64_t thread,
                          Pieces& pieces) {
    const NoDenormals flushed;
    const int64_t rows = end - begin, C = shape.n_embd, H = shape.n_head, stages = 4 * shape.n_layer + 1;
    const Linear& head = weights.head;
    const int64_t ldQ = weights.layers[0].qkv.columns(), ldH = weights.layers[0].fc.columns(),
                  ldL = head.columns();
    float *X = x + begin * ldX, *Q = qkv + begin * ldQ, *A = attended + begin * C, *Y = hidden + begin * ldH;
    float *L = logits + begin * ldL, *N = normed + (thread * static_cast<int64_t>(slots.size()) + begin) * ldN;

    // Each thread normalises for itself, when it gets a piece that needs it.
    int64_t normed_for = -1;
    const auto normalise = [&](int64_t stage, const LayerNorm& norm) {
        if (normed_for == stage) return;
        trace.timed("norm", thread, [&] {
            for (int64_t r = 0; r < rows; r++) norm(N + r * ldN, X + r * ldX);
        });
        normed_for = stage;
    };
    for (int64_t l = 0, stage = 0; stage + 1 < stages; l++) {
        const Layer& w = weights.layers[l];
        pieces.run(stage, H, [&](int64_t h) {
            normalise(stage, w.ln_1);
            trace.timed("QKV", thread, [&] { w.qkv.set({Q, ldQ}, {N, ldN}, rows, h); });
            trace.timed("attention", thread, [&] {
                for (int64_t r = 0; r < rows; r++) {
                    const Slot& slot = slots[which[begin + r]];
                    const float* q = Q + r * ldQ + h * w.qkv.width();
                    slot.cache.append(l, h, slot.length, q + d, 0, 1);
                    if (r + 1 < rows) {
                        // The caches of a batch lie far apart, and the processor prefetches only inside of one:
                        // 8 % of a step of 32.
                        const Slot& following = slots[which[begin + r + 1]];
                        following.cache.prefetch_values(l, h, following.length);
                    }
                    attend(slot, l, h, q, A + r * C + h * d, thread);
                }
            });
        });
        stage++;
        pieces.run(stage++, w.proj.panels(), [&](int64_t p) {
            trace.timed("projection", thread, [&] { w.proj.add({X, ldX}, {A, C}, rows, p); });
        });
        pieces.run(stage, w.fc.panels(), [&](int64_t p) {
            normalise(stage, w.ln_2);
            trace.timed("MLP up", thread, [&] { w.fc.set({Y, ldH}, {N, ldN}, rows, p); });
            trace.timed("MLP GELU", thread, [&] {
                for (int64_t r = 0; r < rows; r++) simd::gelu(Y + r * ldH + p * w.fc.width(), w.fc.width());
            });
        });
        stage++;
        pieces.run(stage++, w.out.panels(), [&](int64_t p) {
            trace.timed("MLP down", thread, [&] { w.out.add({X, ldX}, {Y, ldH}, rows, p); });
        });
    }
    pieces.run(stages - 1, head.panels(), [&](int64_t p) {
        normalise(stages - 1, weights.ln_f);
        trace.timed("head", thread, [&] { head.set({L, ldL}, {N, ldN}, rows, p); });
    });
}

void Decoder::State::advance(const std::vector<int64_t>& which) {
    const int64_t rows = static_cast<int64_t>(which.size());
    if (rows == 0) return;
    trace.timed("embedding", 0, [&] {
        for (int64_t r = 0; r < rows; r++) {
            const Slot& slot = slots[which[r]];
            embed(x + r * ldX, slot.pending, slot.length);
        }
    });
    const auto start = Pace::Clock::now();
    const bool together = threads > 1 && team->ours() && pace.together(rows, start);
    if (!together) {
        Alone alone;
        step(which, 0, rows, 0, alone);
    } else {
        team->take_turn([this, &which, rows](Team::Member& member) {
            Recorded pieces{trace, member};
            if (rows < threads) return step(which, 0, rows, member.thread, pieces);
            pieces.run(0, threads, [&](int64_t i) {
                Alone alone;
                step(which, rows * i / threads, rows * (i + 1) / threads, member.thread, alone);
            });
        });
    }
    if (threads > 1) pace.took(rows, together, start);
    for (int64_t r = 0; r < rows; r++) {
        Slot& slot = slots[which[r]];
        std::copy_n(logits + r * weights.head.columns(), shape.vocab_size, slot.logits.begin());
        slot.length++;
        slot.pending = -1;
    }
}
