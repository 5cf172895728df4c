// Writing with drafts: the pending token of each text and the guesses after it are the rows of one step.
//
//   for each text: guess tokens as long as one more row is likely to save time
//   step: the keys and values of all rows go into the caches, behind the texts
//   for each text, row by row: choose the next token by the row's logits and its own number;
//       stop at the first one that is no guess; the rows behind it are forgotten
#include <algorithm>

#include "decoder.h"

namespace {

// A text in such a step. column: of its uniform numbers.
struct Growing {
    int64_t slot;
    size_t column;
    std::vector<int64_t> written{};
    std::vector<Guess> guesses{};  // the rows after the pending token
    Guess next{};                  // the one that would follow them
    double probability = 0;        // that all guesses hit, and the next one
    Tail tail{};                   // with the guesses
};

}  // namespace

class Decoder::Drafting {
  public:
    Drafting(Decoder& decoder, const std::vector<int64_t>& batch, const UniformRows& uniforms, int64_t most)
        : most(most), decoder(decoder), uniforms(uniforms) {
        for (const int64_t slot : batch) texts.push_back({slot, texts.size()});
        const Timed timed(decoder.trace, "sampling", 0);
        for (Growing& text : texts)
            if (slot_of(text).pending < 0) choose_next(text);
    }

    size_t most;  // rows of tokens

    size_t longest() const {
        size_t length = 0;
        for (const Growing& text : texts) length = std::max(length, text.written.size());
        return length;
    }

    // A step of the texts that lack tokens; false if none does.
    bool step() {
        active.clear();
        for (Growing& text : texts)
            if (text.written.size() < most) active.push_back(&text);
        if (active.empty()) return false;
        const auto start = Clock::now();
        const int64_t texts_of_step = active.size();
        const int64_t rows = texts_of_step + guess(texts_of_step);
        const std::vector<Token> tokens = tokens_of_step();
        decoder.pass(tokens);
        const int64_t chosen = accept(tokens);
        decoder.draft_pace.took(rows, seconds_since(start), chosen);
        return true;
    }

    TokenRows result() const {
        TokenRows rows(most, std::vector<int64_t>(texts.size()));
        for (const Growing& text : texts)
            for (size_t i = 0; i < most; i++) rows[i][text.column] = text.written[i];
        return rows;
    }

  private:
    Slot& slot_of(const Growing& text) const { return decoder.slots[text.slot]; }

    double number(const Growing& text, size_t ahead) const {
        return uniforms[text.written.size() + ahead][text.column];
    }

    int64_t choose_next(Growing& text) {
        const int64_t token = decoder.choose(text.slot, number(text, 0));
        text.written.push_back(token);
        return token;
    }

    // Sets the guess after those that a text has, if its number is there and its row fits.
    void look_ahead(Growing& text, double before) {
        const Slot& slot = slot_of(text);
        const size_t ahead = text.guesses.size();
        text.next = {};
        text.probability = 0;
        if (text.written.size() + ahead + 1 >= most) return;
        if (slot.length + 1 + static_cast<int64_t>(ahead) >= decoder.cache_shape.capacity) return;
        text.next = decoder.draft->guess(text.tail, number(text, ahead), slot.occurrences, slot.sampling);
        if (text.next.token >= 0) text.probability = before * slot.confidence.probability(text.next);
    }

    // Adds guesses to a step of `rows` rows while they pay, the likeliest first; returns how many.
    int64_t guess(int64_t rows) {
        const Timed timed(decoder.trace, "draft", 0);
        for (Growing* text : active) {
            text->guesses.clear();
            Slot& slot = slot_of(*text);
            slot.length -= slot.cache.make_room(slot.length, decoder.shape.window);
            text->tail = slot.tail;
            look_ahead(*text, 1);
        }
        for (int64_t guesses = 0;; guesses++) {
            Growing& text = **std::max_element(active.begin(), active.end(), [](Growing* a, Growing* b) {
                return a->probability < b->probability;
            });
            if (text.probability == 0 || !decoder.draft_pace.pays(rows + guesses, text.probability))
                return guesses;
            text.guesses.push_back(text.next);
            text.tail.push(text.next.token);
            look_ahead(text, text.probability);
        }
    }

    std::vector<Token> tokens_of_step() const {
        std::vector<Token> tokens;
        for (const Growing* text : active) {
            const Slot& slot = slot_of(*text);
            tokens.push_back({text->slot, slot.pending, slot.length});
            for (const Guess& guess : text->guesses)
                tokens.push_back({text->slot, guess.token, tokens.back().position + 1});
        }
        return tokens;
    }

    // Chooses the tokens after these rows; returns how many.
    int64_t accept(const std::vector<Token>& tokens) {
        const Timed timed(decoder.trace, "sampling", 0);
        int64_t first = 0, chosen = 0;
        for (Growing* text : active) {
            const size_t guesses = text->guesses.size();
            for (size_t i = 0;; i++) {
                const int64_t row = first + static_cast<int64_t>(i);
                decoder.finish_row(tokens[row], row);
                const int64_t token = choose_next(*text);
                const Guess& guess = i == guesses ? text->next : text->guesses[i];
                const bool hit = guess.token == token;
                if (guess.token >= 0) slot_of(*text).confidence.learn(guess, hit);
                chosen++;
                if (i == guesses || !hit) break;
            }
            first += 1 + static_cast<int64_t>(guesses);
        }
        return chosen;
    }

    Decoder& decoder;
    const UniformRows& uniforms;
    std::vector<Growing> texts;
    std::vector<Growing*> active;
};

TokenRows Decoder::write_drafted(const std::vector<int64_t>& batch, const UniformRows& uniforms, int64_t most,
                                 double patience) {
    const auto start = Clock::now();
    Drafting drafting(*this, batch, uniforms, most);
    do {
        const size_t longest = drafting.longest();
        if (longest > 0 && seconds_since(start) > patience) drafting.most = longest;
    } while (drafting.step());
    return drafting.result();
}
