// Prefill: all tokens of a prompt at once, layer by layer, in pieces that the threads share.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "denormals.h"
#include "round_up.h"
#include "state.h"

void Decoder::State::begin_prompt(Slot& slot, const std::vector<int64_t>& ids, int64_t top) {
    slot.length = 0, slot.pending = -1;
    slot.prompt.reset();
    const int64_t T = static_cast<int64_t>(ids.size()), C = shape.n_embd;
    const int64_t chunk = std::min(br, T);
    // A smaller last chunk may go through another kernel, which may need more: part 4 divides its keys.
    int64_t most = 0;
    for (const int64_t rows : {chunk, T % chunk, (T - 1) % chunk, int64_t{1}})
        if (rows > 0) most = std::max(most, part.scratch(attention(1, rows, T)));
    auto made = std::make_unique<Prompt>();
    Prompt& prompt = *made;
    prompt.stages = {T, chunk, static_cast<int32_t>(shape.n_layer), top >= 0};
    prompt.ids = ids;
    prompt.top = top;
    prompt.stage = prompt.piece = 0;
    prompt.row_floats =
        PREFILL_ROWS * (/* N, A */ 2 * C + /* Y */ weights.layers[0].fc.columns() + /* O */ ldO);
    prompt.scratch_floats = round_up(most, 16);
    prompt.X = Buffer(T * ldX);
    prompt.Q = Buffer(T * weights.layers[0].qkv.columns());
    prompt.A = Buffer(T * C);
    prompt.rows = Buffer(threads * prompt.row_floats);
    prompt.scratch = Buffer(threads * prompt.scratch_floats);
    if (prompt.stages.scored) {
        prompt.logits = Buffer(threads * PREFILL_ROWS * weights.head.columns());
        prompt.logprobs.resize(T - 1);
    }
    trace.timed("embedding", 0, [&] {
        for (int64_t t = 0; t < T; t++) embed(prompt.X + t * ldX, ids[t], t);
    });
    slot.prompt = std::move(made);
}

bool Decoder::State::read_prompt(Slot& slot, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const auto is_over = [&] { return std::chrono::duration<double>(Clock::now() - start).count() >= seconds; };
    Prompt& prompt = *slot.prompt;
    const PromptStages stages = prompt.stages;
    const int64_t count = stages.count(), H = shape.n_head;
    if (threads == 1 || stages.T < PREFILL_ROWS || !team->ours()) {
        const NoDenormals flushed;
        do {
            prompt_piece(slot, prompt.stage, prompt.piece, 0);
            if (++prompt.piece == stages.pieces(prompt.stage, H)) prompt.stage++, prompt.piece = 0;
        } while (prompt.stage < count && !is_over());
    } else {
        // A turn cannot be interrupted, so it has one stage unless all may be read at once.
        const bool at_once = seconds == std::numeric_limits<double>::infinity();
        do {
            const int64_t begin = prompt.stage, end = at_once ? count : begin + 1;
            // Only pieces may read the prompt: it may be freed before a late member comes.
            team->take_turn(threads, [this, &slot, stages, begin, end](Member& member) {
                const NoDenormals flushed;
                Recorded pieces{trace, member};
                for (int64_t s = begin; s < end; s++)
                    pieces.run(s, stages.pieces(s, shape.n_head),
                               [&](int64_t i) { prompt_piece(slot, s, i, member.thread); });
            });
            prompt.stage = end;
        } while (prompt.stage < count && !is_over());
    }
    if (prompt.stage < count) return false;
    finish_prompt(slot);
    return true;
}

void Decoder::State::finish_prompt(Slot& slot) {
    Prompt& prompt = *slot.prompt;
    const int64_t T = prompt.stages.T;
    const Linear& head = weights.head;
    trace.timed("norm", 0, [&] { weights.ln_f(normed, prompt.X + (T - 1) * ldX); });
    trace.timed("head", 0, [&] {
        const simd::ConstMatrix operand = head.operand({normed, 0}, 1, operands);
        for (int64_t p = 0; p < head.panels(); p++) head.set({logits, 0}, operand, 1, p);
    });
    std::copy_n(static_cast<const float*>(logits), shape.vocab_size, slot.logits.begin());
    std::move(prompt.logprobs.begin(), prompt.logprobs.end(), std::back_inserter(slot.logprobs));
    slot.length = T;
    slot.prompt.reset();
}

void Decoder::State::prompt_piece(Slot& slot, int64_t stage, int64_t i, int64_t thread) {
    Prompt& prompt = *slot.prompt;
    const int64_t layer = stage / 3;
    if (layer == shape.n_layer) return prompt_logprobs(prompt, i, thread);
    if (stage % 3 == 0) return prompt_qkv(slot, layer, i, thread);
    if (stage % 3 == 1) return prompt_attention(prompt, layer, i, thread);
    prompt_rest(prompt, layer, i, thread);
}

// Q <- LN(X) Wqkv^T for PREFILL_ROWS tokens; K, V into the cache.
void Decoder::State::prompt_qkv(Slot& slot, int64_t layer, int64_t i, int64_t thread) {
    Prompt& prompt = *slot.prompt;
    const int64_t C = shape.n_embd, T = prompt.stages.T;
    float *N = prompt.rows + thread * prompt.row_floats, *O = N + PREFILL_ROWS * C;
    const int64_t t0 = i * PREFILL_ROWS, rows = std::min(PREFILL_ROWS, T - t0);
    const Layer& w = weights.layers[layer];
    const int64_t ldQ = w.qkv.columns();
    float *X = prompt.X + t0 * ldX, *Q = prompt.Q + t0 * ldQ;
    simd::ConstMatrix operand{};
    trace.timed("norm", thread, [&] {
        for (int64_t r = 0; r < rows; r++) w.ln_1(N + r * C, X + r * ldX);
        operand = w.qkv.operand({N, C}, rows, O);
    });
    const int64_t first = t0 + rows > prompt.stages.from(layer) ? 0 : d;  // q only where it is needed
    for (int64_t h = 0; h < shape.n_head; h++) {
        trace.timed("QKV", thread, [&] { w.qkv.set({Q, ldQ}, operand, rows, h, first); });
        trace.timed("attention", thread, [&] {
            float* k = Q + h * w.qkv.width() + d;
            slot.cache.round(k, ldQ, rows);  // the prompt attends to the same K and V as steps
            slot.cache.append(layer, h, t0, k, ldQ, rows);
        });
    }
}

// A <- attention of a chunk of tokens in one head.
void Decoder::State::prompt_attention(Prompt& prompt, int64_t layer, int64_t i, int64_t thread) {
    const int64_t H = shape.n_head, T = prompt.stages.T, h = i % H;
    const auto [t0, rows] = prompt.stages.queries(layer, i / H);
    const Linear& w = weights.layers[layer].qkv;
    const int64_t ldQ = w.columns();
    Attention a = attention(1, rows, t0 + rows);
    const float* q = prompt.Q + h * w.width();
    a.q = {q + t0 * ldQ, 0, 0, ldQ, 1};
    a.k = {q + d, 0, 0, ldQ, 1};
    a.v = {q + 2 * d, 0, 0, ldQ, 1};
    a.out = prompt.A + (h * T + t0) * d;
    trace.timed("attention", thread,
                [&] { part.attention(a, prompt.scratch + thread * prompt.scratch_floats); });
}

// X <- X + A Wproj^T;  X <- X + gelu(LN(X) Wfc^T) Wout^T for PREFILL_ROWS tokens.
void Decoder::State::prompt_rest(Prompt& prompt, int64_t layer, int64_t i, int64_t thread) {
    const int64_t C = shape.n_embd, H = shape.n_head, T = prompt.stages.T;
    const Layer& w = weights.layers[layer];
    const int64_t t0 = prompt.stages.from(layer) + i * PREFILL_ROWS, rows = std::min(PREFILL_ROWS, T - t0);
    const int64_t ldY = w.fc.columns();
    float* N = prompt.rows + thread * prompt.row_floats;
    float *A = N + PREFILL_ROWS * C, *Y = A + PREFILL_ROWS * C, *X = prompt.X + t0 * ldX;
    float* O = Y + PREFILL_ROWS * ldY;
    trace.timed("attention", thread, [&] {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < H; h++) std::copy_n(prompt.A + (h * T + t0 + r) * d, d, A + r * C + h * d);
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
    trace.timed("MLP GELU", thread, [&] { portable::gelu(Y, rows * ldY); });
    trace.timed("MLP down", thread, [&] {
        const simd::ConstMatrix operand = w.out.operand({Y, ldY}, rows, O);
        for (int64_t p = 0; p < w.out.panels(); p++) w.out.add({X, ldX}, operand, rows, p);
    });
}

// The log-probability of the token after each of PREFILL_ROWS tokens.
void Decoder::State::prompt_logprobs(Prompt& prompt, int64_t i, int64_t thread) {
    const int64_t C = shape.n_embd, ldY = weights.head.columns();
    const int64_t t0 = i * PREFILL_ROWS, rows = std::min(PREFILL_ROWS, prompt.stages.T - 1 - t0);
    float *N = prompt.rows + thread * prompt.row_floats, *O = N + PREFILL_ROWS * C;
    float *X = prompt.X + t0 * ldX, *Y = prompt.logits + thread * PREFILL_ROWS * ldY;
    trace.timed("norm", thread, [&] {
        for (int64_t r = 0; r < rows; r++) weights.ln_f(N + r * C, X + r * ldX);
    });
    trace.timed("head", thread, [&] {
        const simd::ConstMatrix operand = weights.head.operand({N, C}, rows, O);
        for (int64_t p = 0; p < weights.head.panels(); p++) weights.head.set({Y, ldY}, operand, rows, p);
        for (int64_t r = 0, t = t0; r < rows; r++, t++)
            prompt.logprobs[t] = token_logprob(Y + r * ldY, shape.vocab_size, prompt.ids[t + 1], prompt.top);
    });
}
