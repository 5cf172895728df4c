// Prefill: all tokens of a prompt at once, layer by layer, in pieces that the threads share.
#include <algorithm>

#include "decoder/state.h"
#include "denormals.h"
#include "round_up.h"

namespace {

constexpr int64_t PREFILL_ROWS = 64;  // tokens that pass through a layer together: their MLP stays in L2

}  // namespace

// What a prompt of T tokens needs beside the cache.
struct Decoder::State::Prompt {
    int64_t scratch_floats;
    Buffer X, Q, A;        // (T, ldX), (T, q k v of each head), (H, T, d)
    Buffer rows, scratch;  // for each thread

    static int64_t rows_floats(const State& s) {
        const int64_t C = s.shape.n_embd;
        return PREFILL_ROWS * (/* N, A */ 2 * C + /* Y */ s.weights.layers[0].fc.columns() + /* O */ s.ldO);
    }
};

void Decoder::State::prefill(Slot& slot, const std::vector<int64_t>& ids) {
    const int64_t T = static_cast<int64_t>(ids.size());
    const int64_t chunk = std::min(br, T);  // queries that attend together
    // The last chunk may be of few queries, for which a part that takes K transposed has another algorithm.
    const int64_t few = std::clamp<int64_t>(part.transposed, 1, T);
    const int64_t most = std::max(part.scratch(attention(1, chunk, T)), part.scratch(attention(1, few, T)));
    Prompt prompt{round_up(most, 16), {}, {}, {}, {}, {}};
    prompt.X = Buffer(T * ldX);
    prompt.Q = Buffer(T * weights.layers[0].qkv.columns());
    prompt.A = Buffer(T * shape.n_embd);
    prompt.rows = Buffer(threads * prompt.rows_floats(*this));
    prompt.scratch = Buffer(threads * prompt.scratch_floats);
    trace.timed("embedding", 0, [&] {
        for (int64_t t = 0; t < T; t++) embed(prompt.X + t * ldX, ids[t], t);
    });
    if (threads == 1 || T < PREFILL_ROWS || !team->ours()) {
        Alone alone;
        read(slot, prompt, T, chunk, 0, alone);
    } else {
        team->take_turn(threads, [this, &slot, &prompt, T, chunk](Team::Member& member) {
            Recorded pieces{trace, member};
            read(slot, prompt, T, chunk, member.thread, pieces);
        });
    }
    const Linear& head = weights.head;
    trace.timed("norm", 0, [&] { weights.ln_f(normed, prompt.X + (T - 1) * ldX); });
    trace.timed("head", 0, [&] {
        const simd::ConstMatrix operand = head.operand({normed, 0}, 1, operands);
        for (int64_t p = 0; p < head.panels(); p++) head.set({logits, 0}, operand, 1, p);
    });
    std::copy_n(static_cast<const float*>(logits), shape.vocab_size, slot.logits.begin());
    slot.length = T;
    slot.pending = -1;
}

// A member's share of a prompt: through each layer in three stages. Only pieces may read the prompt, because it
// is gone when a late member comes.
template <class Pieces>
void Decoder::State::read(Slot& slot, Prompt& prompt, int64_t T, int64_t chunk, int64_t thread,
                          Pieces& pieces) {
    const NoDenormals flushed;
    const int64_t C = shape.n_embd, H = shape.n_head, L = shape.n_layer;
    for (int64_t l = 0; l < L; l++) {
        const int64_t from = l + 1 < L ? 0 : T - 1;  // of the last layer only the last token counts
        const int64_t queries = T - from, chunks = (queries + chunk - 1) / chunk;
        pieces.run(3 * l, (T + PREFILL_ROWS - 1) / PREFILL_ROWS, [&](int64_t i) {
            float *N = prompt.rows + thread * prompt.rows_floats(*this), *O = N + PREFILL_ROWS * C;
            const int64_t t0 = i * PREFILL_ROWS, rows = std::min(PREFILL_ROWS, T - t0);
            const Layer& w = weights.layers[l];
            const int64_t ldQ = w.qkv.columns();
            float *X = prompt.X + t0 * ldX, *Q = prompt.Q + t0 * ldQ;
            simd::ConstMatrix operand{};
            trace.timed("norm", thread, [&] {
                for (int64_t r = 0; r < rows; r++) w.ln_1(N + r * C, X + r * ldX);
                operand = w.qkv.operand({N, C}, rows, O);
            });
            const int64_t first = t0 + rows > from ? 0 : d;  // q only where it is needed
            for (int64_t h = 0; h < H; h++) {
                trace.timed("QKV", thread, [&] { w.qkv.set({Q, ldQ}, operand, rows, h, first); });
                trace.timed("attention", thread, [&] {
                    float* k = Q + h * w.qkv.width() + d;
                    slot.cache.round(k, ldQ, rows);  // the prompt attends to what steps will
                    slot.cache.append(l, h, t0, k, ldQ, rows);
                });
            }
        });
        pieces.run(3 * l + 1, H * chunks, [&](int64_t i) {
            const int64_t h = i % H, c = chunks - 1 - i / H;  // the longest first
            const int64_t t0 = from + c * chunk, rows = std::min(chunk, T - t0);
            const Linear& w = weights.layers[l].qkv;
            const int64_t ldQ = w.columns();
            Attention a = attention(1, rows, t0 + rows);
            const float* q = prompt.Q + h * w.width();
            a.q = {q + t0 * ldQ, 0, 0, ldQ, 1};
            a.k = {q + d, 0, 0, ldQ, 1};
            a.v = {q + 2 * d, 0, 0, ldQ, 1};
            a.out = prompt.A + (h * T + t0) * d;
            trace.timed("attention", thread,
                        [&] { part.kernel(a, prompt.scratch + thread * prompt.scratch_floats); });
        });
        pieces.run(3 * l + 2, (queries + PREFILL_ROWS - 1) / PREFILL_ROWS, [&](int64_t i) {
            const Layer& w = weights.layers[l];
            const int64_t t0 = from + i * PREFILL_ROWS, rows = std::min(PREFILL_ROWS, T - t0);
            const int64_t ldY = w.fc.columns();
            float* N = prompt.rows + thread * prompt.rows_floats(*this);
            float *A = N + PREFILL_ROWS * C, *Y = A + PREFILL_ROWS * C, *X = prompt.X + t0 * ldX;
            float* O = Y + PREFILL_ROWS * ldY;
            trace.timed("attention", thread, [&] {
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t h = 0; h < H; h++)
                        std::copy_n(prompt.A + (h * T + t0 + r) * d, d, A + r * C + h * d);
            });
            trace.timed("projection", thread, [&] {
                const simd::ConstMatrix operand = w.proj.operand({A, C}, rows, O);
                for (int64_t p = 0; p < w.proj.panels(); p++) w.proj.add({X, ldX}, operand, rows, p);
            });
            trace.timed("norm", thread, [&] {
                for (int64_t r = 0; r < rows; r++) w.ln_2(N + r * C, X + r * ldX);
            });
            trace.timed("MLP up", thread, [&] {
                const simd::ConstMatrix operand = w.fc.operand({N, C}, rows, O);
                for (int64_t p = 0; p < w.fc.panels(); p++) w.fc.set({Y, ldY}, operand, rows, p);
            });
            trace.timed("MLP GELU", thread, [&] { simd::gelu(Y, rows * ldY); });
            trace.timed("MLP down", thread, [&] {
                const simd::ConstMatrix operand = w.out.operand({Y, ldY}, rows, O);
                for (int64_t p = 0; p < w.out.panels(); p++) w.out.add({X, ldX}, operand, rows, p);
            });
        });
    }
}
