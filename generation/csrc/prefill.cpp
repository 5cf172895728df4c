// Prefill: all tokens of a prompt at once, layer by layer, in pieces that the threads share.
#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "decoder.h"
#include "model/csrc/refuse.h"
#include "threads.h"

void Decoder::begin(int64_t number, const std::vector<int64_t>& ids, bool continues, int64_t top) {
    Slot& slot = slot_of("slot", number);
    check("the number of ids", ids.size(), 1, capacity);
    for (const int64_t id : ids) check("an id", id, 0, shape.vocab_size - 1);
    if (!continues) {
        std::fill(slot.occurrences.seen.begin(), slot.occurrences.seen.end(), 0);
        std::fill(slot.occurrences.written.begin(), slot.occurrences.written.end(), 0);
        slot.logprobs.clear();
    }
    slot.tail.clear();
    for (const int64_t id : ids) {
        slot.occurrences.seen[id] = 1;
        slot.tail.push(id);
    }
    slot.length = 0;
    slot.pending = -1;
    slot.prompt.reset();
    // What is far behind decides nothing, unless log-probabilities are wanted; whole tiles of it are left out,
    // so that the others' bits stay.
    const int64_t all = ids.size(), reach = shape.n_layer * (shape.window - 1) + 1;
    const bool needs_all = shape.window == 0 || top >= 0;
    const int64_t T = all - (needs_all ? 0 : std::max<int64_t>(0, all - reach) / br * br);
    const int64_t C = shape.n_embd, chunk = std::min(br, T);
    // A smaller last chunk may go through another kernel, which may need more: part 4 divides its keys.
    int64_t most = 0;
    for (const int64_t count : {chunk, T % chunk, (T - 1) % chunk, int64_t{1}})
        if (count > 0) most = std::max(most, part.scratch(attention(count, T, 0)));
    auto begun = std::make_unique<Prompt>();
    Prompt& prompt = *begun;
    prompt.stages = {T, chunk, static_cast<int32_t>(shape.n_layer), top >= 0};
    prompt.ids.assign(ids.end() - T, ids.end());
    prompt.uncached = shape.window > 0 ? std::max<int64_t>(0, T - shape.window) : 0;
    prompt.top = top;
    if (top >= 0) prompt.logprobs.resize(T - 1);
    const Layer& w = weights.layers[0];
    const auto lay_out = [&](Scratch at) {
        prompt.X = at.matrix(T, w.proj.columns()), prompt.Q = at.matrix(T, w.qkv.columns()),
        prompt.A = at.take(T * C);
        prompt.rows.clear();
        prompt.scratch.clear();
        for (int thread = 0; thread < threads; thread++) {
            Rows& own = prompt.rows.emplace_back(Rows{PREFILL_ROWS});
            own.A = at.matrix(PREFILL_ROWS, C);
            own.Y = at.matrix(PREFILL_ROWS, w.fc.columns());
            if (top >= 0) own.L = at.matrix(PREFILL_ROWS, weights.head.columns());
            own.N = at.matrix(PREFILL_ROWS, C);
            own.O = at.matrix(PREFILL_ROWS, w.out.operand_words());
            prompt.scratch.push_back(at.take(most));
        }
        return at.taken();
    };
    prompt.memory = Buffer(lay_out(Scratch()));
    lay_out(Scratch(prompt.memory));
    slot.prompt = std::move(begun);
    const Timed timed(trace, "embedding", 0);
    for (int64_t t = 0; t < T; t++) weights.embed(prompt.X.row(t), prompt.ids[t], t);
}

bool Decoder::read(int64_t number, double seconds) {
    Slot& slot = slot_of("slot", number);
    if (!slot.prompt) refuse("slot", number, "given ids by begin() first");
    if (!(seconds >= 0)) refuse("seconds must be at least 0");
    const auto start = Clock::now();
    const auto is_over = [&] { return seconds_since(start) >= seconds; };
    Prompt& prompt = *slot.prompt;
    const PromptStages stages = prompt.stages;
    const int64_t count = stages.count(), H = shape.n_head;
    if (threads == 1 || stages.T < PREFILL_ROWS || !team->helps()) {
        const NoDenormals flushed;
        do {
            prompt_piece(slot, prompt.stage, prompt.piece, 0);
            if (++prompt.piece == stages.pieces(prompt.stage, H)) {
                prompt.stage++;
                prompt.piece = 0;
            }
        } while (prompt.stage < count && !is_over());
    } else {
        // A turn cannot be interrupted, so it has one stage unless all may be read at once.
        const bool at_once = seconds == std::numeric_limits<double>::infinity();
        do {
            const int64_t begin = prompt.stage, end = at_once ? count : begin + 1;
            std::vector<Pieces> left(end - begin);
            // Only pieces may read the prompt: it may be freed before a late member comes.
            team->run(threads, [this, &slot, stages, begin, end, left = left.data()](Member& member) {
                const NoDenormals flushed;
                for (int64_t s = begin; s < end; s++)
                    member.run(stages.pieces(s, shape.n_head), left + (s - begin),
                               [&](int64_t i) { prompt_piece(slot, s, i, member.thread); });
            });
            prompt.stage = end;
        } while (prompt.stage < count && !is_over());
    }
    if (prompt.stage < count) return false;
    Rows last = rows[0].from(0, 1);
    last.X = prompt.X.from(stages.T - 1);
    Member caller(trace, 0);
    Block<Member>(last, caller).logits(weights);
    std::copy_n(last.L.data, shape.vocab_size, slot.logits.begin());
    std::move(prompt.logprobs.begin(), prompt.logprobs.end(), std::back_inserter(slot.logprobs));
    slot.length = stages.T - prompt.uncached;
    slot.prompt.reset();
    return true;
}

void Decoder::prompt_piece(Slot& slot, int64_t stage, int64_t i, int64_t thread) {
    Prompt& prompt = *slot.prompt;
    const PromptStages& stages = prompt.stages;
    const int64_t layer = stage / 3, H = shape.n_head, T = stages.T;
    Member alone(trace, static_cast<int>(thread));
    if (layer == shape.n_layer) {  // the log-probability of the token after each
        const int64_t t0 = i * PREFILL_ROWS;
        const Rows rows = prompt.rows_of(t0, T - 1, thread);
        Block<Member>(rows, alone).logits(weights);
        for (int64_t r = 0, t = t0; r < rows.count; r++, t++)
            prompt.logprobs[t] = token_logprob(rows.L.row(r), shape.vocab_size, prompt.ids[t + 1], prompt.top);
        return;
    }
    const Layer& w = weights.layers[layer];
    if (stage % 3 == 0) {  // q, k and v; k and v into the cache
        const int64_t t0 = i * PREFILL_ROWS;
        const Rows rows = prompt.rows_of(t0, T, thread);
        const int64_t skipped = t0 + rows.count > stages.from(layer) ? 0 : d;  // q only where it is needed
        Block<Member>(rows, alone).qkv(w, skipped, true, [&](int64_t h, int64_t, int64_t) {
            float* k = rows.Q.data + h * w.qkv.width() + d;
            slot.cache.round(k, rows.Q.ld, rows.count);  // the prompt attends to the same K and V as steps
            const int64_t skip = std::clamp<int64_t>(prompt.uncached - t0, 0, rows.count);
            slot.cache.append(layer, h, t0 + skip - prompt.uncached, k + skip * rows.Q.ld, rows.Q.ld,
                              rows.count - skip);
        });
    } else if (stage % 3 == 1) {  // attention of a chunk of tokens in one head
        const int64_t h = i % H, ldQ = prompt.Q.ld;
        const auto [t0, count] = stages.queries(layer, i / H);
        Attention a = attention(count, t0 + count, h);
        const float* q = prompt.Q.data + h * w.qkv.width();
        a.q = {q + t0 * ldQ, 0, 0, ldQ, 1};
        a.k = {q + d, 0, 0, ldQ, 1};
        a.v = {q + 2 * d, 0, 0, ldQ, 1};
        a.out = prompt.A + (h * T + t0) * d;
        const Timed timed = alone.timed("attention");
        part.attention(a, prompt.scratch[thread]);
    } else {
        const int64_t t0 = stages.from(layer) + i * PREFILL_ROWS;
        const Rows rows = prompt.rows_of(t0, T, thread);
        {
            const Timed timed = alone.timed("attention");
            for (int64_t r = 0; r < rows.count; r++)
                for (int64_t h = 0; h < H; h++)
                    std::copy_n(prompt.A + (h * T + t0 + r) * d, d, rows.A.row(r) + h * d);
        }
        Block<Member>(rows, alone).rest(w);
    }
}
