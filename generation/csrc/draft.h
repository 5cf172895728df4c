// Drafts: guesses of a text's next tokens, which the model reads together with the pending token.
//
// A draft draws its guess with the token's own uniform number, so it often agrees with the model, which
// chooses by its own logits. A wrong guess costs time only.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cuda/ngrams_table.h"
#include "sampling.h"

constexpr int64_t MOST_STEP_ROWS = 8;      // of a step with drafts: pending tokens and drafts of all texts
constexpr int64_t MOST_DRAFTED_TEXTS = 4;  // more texts share a step's weights among themselves

// The last tokens of a text, a byte each: only vocabularies of at most 256 tokens have drafts.
class Tail {
  public:
    int size() const { return count; }
    uint64_t recent() const { return bytes; }  // the latest token lowest
    void push(int64_t token) {
        bytes = bytes << 8 | static_cast<uint8_t>(token);
        count = std::min(count + 1, ORDER);
    }
    void clear() { count = 0; }

  private:
    uint64_t bytes = 0;
    int count = 0;
};

// token: -1 for none. margin: the distance from the number to the next boundary between two tokens in the
// draft's distribution, relative to the boundary's likely error.
struct Guess {
    int64_t token = -1;
    double margin = 0;
};

class Draft {
  public:
    virtual ~Draft() = default;

    // The token that follows `tail` in a text with these occurrences and settings, if `uniform` draws it.
    virtual Guess guess(const Tail& tail, double uniform, const Occurrences&, const Sampling&) const = 0;
};

// How often the guesses of a text hit, by their margins.
class Confidence {
  public:
    double probability(const Guess& guess) const { return shares[bin(guess)]; }
    void learn(const Guess& guess, bool hit) {
        double& share = shares[bin(guess)];
        share += RATE * ((hit ? 1.0 : 0.0) - share);
    }

  private:
    // A bin's margins are twice those of the bin before: below 1 / 16, below 1 / 8 ... from 4 on.
    static constexpr int BINS = 8, FIRST = -5;  // FIRST: binary exponent
    static constexpr double RATE = 1.0 / 64;
    static int bin(const Guess& guess) {
        const double margin = std::max(std::ldexp(1.0, FIRST), guess.margin);
        return std::min(std::ilogb(margin) - FIRST, BINS - 1);
    }
    std::array<double, BINS> shares{0.3, 0.42, 0.54, 0.68, 0.81, 0.92, 0.97, 0.99};  // at first shakes256's
};

// Decides how many rows a step has, from the measured times of steps and the tokens that they gave.
class DraftPace {
  public:
    // Whether a row that gives a token with this probability costs less than a later step for it. A step has at
    // most a row more than those before: how much one costs is not known beforehand.
    bool pays(int64_t rows, double probability) const {
        if (rows >= std::min(MOST_STEP_ROWS, most + 1)) return false;
        double price = cost(rows + 1) - cost(rows);
        // The row after it may be so cheap that both pay: products take rows in blocks.
        if (rows + 2 <= most) price = std::min(price, (cost(rows + 2) - cost(rows)) / 2);
        return probability * seconds > price * tokens;
    }

    // The time of a step with so many rows; a guess until there was one.
    double cost(int64_t rows) const {
        int64_t known = std::min(rows, most);
        while (known > 0 && costs[known].trials == 0) known--;
        if (known == 0) {  // several texts had more rows so far
            for (known = rows; known < most && costs[known].trials == 0;) known++;
            return costs[known].now * (1 + FIRST_ROW * static_cast<double>(rows - known));
        }
        const double last = costs[known].now, before = costs[known - 1].now;
        return last + (before > 0 ? last - before : FIRST_ROW * last) * static_cast<double>(rows - known);
    }

    void took(int64_t rows, double elapsed, int64_t chosen) {
        Cost& cost = costs[rows];
        if (cost.trials < TRIALS) {
            cost.now = cost.least = cost.trials++ == 0 ? elapsed : std::min(cost.least, elapsed);
            most = std::max(most, rows);
        } else {
            // Toward a low quartile: other programs only add to a time.
            const double change = elapsed < cost.now / 2 ? elapsed / cost.now
                                  : elapsed < cost.now   ? 1 - RATE
                                                         : 1 + RATE / 3;
            // A longer context, a new text or a slower processor changes the cost of any number of rows.
            cost.now *= std::pow(change, 1 - COMMON);
            for (Cost& each : costs) each.now *= std::pow(change, COMMON);
        }
        // What was not tried for long becomes cheap, and is tried again; soon if it was hardly ever tried.
        for (int64_t other = 2; other <= MOST_STEP_ROWS; other++)
            if (other != rows) costs[other].now *= 1 - (costs[other].trials < TRIALS ? UNSURE : FORGOTTEN);
        const double share = std::max(SHARE, 1.0 / static_cast<double>(++steps));
        seconds += share * (cost.now - seconds);
        tokens += share * (static_cast<double>(chosen) - tokens);
    }

  private:
    static constexpr double FIRST_ROW = 0.1;  // a row's share of a step, before it was measured
    static constexpr double RATE = 1.0 / 32, SHARE = 1.0 / 64, UNSURE = 1.0 / 128, FORGOTTEN = 1.0 / 16384;
    static constexpr double COMMON = 0.75;  // exponent of a change that the costs of all rows share
    static constexpr int TRIALS = 4;        // steps whose least time is a cost to begin with
    struct Cost {
        double now = 0, least = 0;  // seconds; least: of the trials
        int trials = 0;
    };
    int64_t steps = 0, most = 0;                   // most: rows of a step so far
    std::array<Cost, MOST_STEP_ROWS + 1> costs{};  // by the number of rows
    double seconds = 0, tokens = 0;                // of a step, on average
};
