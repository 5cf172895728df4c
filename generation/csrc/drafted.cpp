// Writing with drafts: the pending token of each text and the guesses after it are the rows of one step.
//
//   for each text: guess tokens as long as one more row is likely to save time
//   step: the keys and values of all rows go into the caches, behind the texts
//   for each text, row by row: choose the next token by the row's logits and its own number;
//       stop at the first one that is no guess; the rows behind it are forgotten
#include <algorithm>
#include <chrono>
#include <utility>

#include "decoder.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// A text in such a step.
struct Growing {
    int64_t slot;
    std::vector<int64_t> written{};
    std::vector<Guess> guesses{};  // the rows after the pending token
    Guess next{};                  // the one that would follow them
    double probability = 0;        // that all guesses hit, and the next one
    Tail tail{};                   // with the guesses
};

}  // namespace

std::vector<std::vector<int64_t>> Decoder::write_drafted(const std::vector<int64_t>& which,
                                                         const std::vector<std::vector<double>>& uniforms,
                                                         int64_t most, double patience) {
    const auto start = Clock::now();
    std::vector<Growing> texts;
    for (const int64_t slot : which) texts.push_back({slot});
    const auto number = [&](size_t s, size_t ahead) { return uniforms[texts[s].written.size() + ahead][s]; };
    const auto choose_next = [&](size_t s) {
        const int64_t token = choose(texts[s].slot, number(s, 0));
        texts[s].written.push_back(token);
        return token;
    };
    trace.timed("sampling", 0, [&] {
        for (size_t s = 0; s < texts.size(); s++)
            if (slots[texts[s].slot].pending < 0) choose_next(s);
    });
    // Sets the guess after those that a text has; its number must be there, and its row must fit.
    const auto look_ahead = [&](size_t s, double before) {
        Growing& text = texts[s];
        const Slot& slot = slots[text.slot];
        const size_t ahead = text.guesses.size();
        text.next = {}, text.probability = 0;
        if (text.written.size() + ahead + 1 >= static_cast<size_t>(most)) return;
        text.next = draft->guess(text.tail, number(s, ahead), slot.text, slot.sampling);
        if (text.next.token >= 0) text.probability = before * slot.confidence.of(text.next);
    };
    std::vector<Token> tokens;
    std::vector<size_t> active;
    while (true) {
        size_t longest = 0;
        for (const Growing& text : texts) longest = std::max(longest, text.written.size());
        if (longest > 0 && seconds_since(start) > patience) most = static_cast<int64_t>(longest);
        active.clear();
        for (size_t s = 0; s < texts.size(); s++)
            if (texts[s].written.size() < static_cast<size_t>(most)) active.push_back(s);
        if (active.empty()) break;

        const auto began = Clock::now();
        int64_t rows = static_cast<int64_t>(active.size());
        trace.timed("draft", 0, [&] {
            for (const size_t s : active) {
                texts[s].guesses.clear();
                texts[s].tail = slots[texts[s].slot].tail;
                look_ahead(s, 1);
            }
            while (true) {
                const size_t s = *std::max_element(active.begin(), active.end(), [&](size_t a, size_t b) {
                    return texts[a].probability < texts[b].probability;
                });
                Growing& text = texts[s];
                if (text.probability == 0 || !draft_pace.pays(rows, text.probability)) break;
                rows++;
                text.guesses.push_back(text.next);
                text.tail.push(text.next.token);
                look_ahead(s, text.probability);
            }
        });
        const double guessed = seconds_since(began);
        tokens.clear();
        for (const size_t s : active) {
            const Slot& slot = slots[texts[s].slot];
            tokens.push_back({texts[s].slot, slot.pending, slot.length});
            for (const Guess& guess : texts[s].guesses)
                tokens.push_back({texts[s].slot, guess.token, tokens.back().position + 1});
        }
        pass(tokens);
        int64_t given = 0;
        trace.timed("sampling", 0, [&] {
            int64_t row = 0;
            for (const size_t s : active) {
                Growing& text = texts[s];
                Slot& slot = slots[text.slot];
                const int64_t end = row + 1 + static_cast<int64_t>(text.guesses.size());
                for (size_t i = 0;; i++, row++) {
                    finish_row(tokens[row], row);
                    const int64_t token = choose_next(s);
                    const bool is_next = i == text.guesses.size();
                    const Guess& guess = is_next ? text.next : text.guesses[i];
                    const bool hit = guess.token == token;
                    if (guess.token >= 0)
                        slot.confidence.learn(guess, hit), counts.guesses++, counts.hits += hit;
                    given++;
                    if (is_next || !hit) break;
                    counts.accepted++;
                }
                row = end;
            }
        });
        const double elapsed = seconds_since(began);
        draft_pace.took(rows, elapsed, given);
        counts.steps++, counts.tokens += given, counts.drafted += rows - static_cast<int64_t>(active.size());
        counts.guessing += guessed;
        if (rows > static_cast<int64_t>(active.size())) {
            counts.verifying += elapsed - guessed;
            counts.wasted += std::max(0.0, draft_pace.cost(rows) - draft_pace.cost(given));
        }
    }
    std::vector<std::vector<int64_t>> made(static_cast<size_t>(most), std::vector<int64_t>(texts.size()));
    for (size_t s = 0; s < texts.size(); s++)
        for (size_t i = 0; i < made.size(); i++) made[i][s] = texts[s].written[i];
    return made;
}

void Decoder::set_draft(std::shared_ptr<const Draft> made) { draft = std::move(made); }

DraftCounts Decoder::draft_counts() { return std::exchange(counts, {}); }
