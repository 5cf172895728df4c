// Who takes a step: the caller alone or a team, of how many members; and groups of how many texts.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Decides whether the team shares a step. If a lost helper costs more than the team has saved since the last
// time, the caller works alone for as long, and four times as long each time that it recurs within a second.
class Pace {
  public:
    bool together(int64_t rows, Clock::time_point now) const { return rows == measured && now >= alone_until; }

    void took(int64_t rows, bool together, Clock::duration elapsed, Clock::time_point now) {
        if (!together) {
            if (rows != measured || elapsed < alone) alone = elapsed;
            measured = rows;
            return;
        }
        saved += alone - elapsed;
        if (elapsed < 3 * alone) return;
        if (saved < Clock::duration::zero()) {
            patience = now < lost + std::chrono::seconds(1) ? std::min(4 * patience, 64) : 1;
            alone_until = now + patience * elapsed;
            lost = now;
            measured = 0;  // measure the work alone again: contexts grow
        }
        saved = Clock::duration::zero();
    }

  private:
    int64_t measured = 0;  // rows of the fastest work alone, `alone`
    Clock::duration alone{};
    Clock::duration saved{};  // by the team since a turn was last lost
    Clock::time_point lost{}, alone_until{};
    int patience = 1;
};

// Finds the fastest team: 1, 2, 4 ... are tried on real steps, as a cache line's time between cores varies.
class TeamSize {
  public:
    bool on_trial() const { return trial > 0; }

    // The members for the next step.
    int next(Clock::time_point now) {
        if (!on_trial() && now >= until) {
            first = now;
            try_out(1, now);
        }
        return on_trial() ? trial : best;
    }

    // Records that a step took `elapsed` with `members`, not necessarily next(), of at most `most`.
    void took(int members, int most, Clock::duration elapsed, Clock::time_point now) {
        if (members != trial) return;
        least = std::min(least, elapsed);
        tries++;
        if (tries < LEAST_TRIES || (trial > 1 && now < began + LEAST_TIME)) return;
        if (trial == 1 || least < GAIN * shortest) {
            best = trial;
            shortest = least;
        }
        if (trial < most && least < LOSS * shortest) return try_out(std::min(2 * trial, most), now);
        trial = 0;
        rarity = std::min(4 * rarity, RAREST);
        until = now + rarity * (now - first);
    }

  private:
    static constexpr int LEAST_TRIES = 8;
    static constexpr auto LEAST_TIME = std::chrono::milliseconds(2);  // until all helpers are awake
    static constexpr double GAIN = 0.97, LOSS = 1.5;
    static constexpr int RAREST = 200;

    void try_out(int members, Clock::time_point now) {
        trial = members;
        tries = 0;
        least = Clock::duration::max();
        began = now;
    }

    int best = 1, trial = 0, tries = 0;  // trial: 0 if none is tried
    int rarity = 5;                      // a choice holds for this many times the time that it took
    Clock::duration least{}, shortest{};
    Clock::time_point first{}, began{}, until{};
};

// The bytes read in a step. A larger group shares the weights, but keeps less of its K and V in the cache.
struct Traffic {
    double weights;      // of the matrices, which all threads share
    double text;         // of a text's K and V
    double cache_bytes;  // the size of the last-level cache
    int64_t threads;     // each has a group

    // Time per text in a group of `texts`, in bytes read from the cache; the hit rate is the share that fits.
    double cost(int64_t texts) const {
        const double again = weights + static_cast<double>(threads * texts) * text;
        const double missed = 1 - std::min(1.0, USABLE * cache_bytes / again);
        return (weights / static_cast<double>(texts) + text) * (1 + (MEMORY_COST - 1) * missed);
    }

  private:
    // Fitted on a Zen 5 for 1 to 32 texts of 25 to 1,900 tokens.
    static constexpr double USABLE = 1.0 / 3;
    static constexpr double MEMORY_COST = 2.3;  // a byte from memory, in bytes from the cache
};

// The best size for a thread with this many texts, preferably a multiple of the register blocks' `rows`.
inline int64_t group_size(const Traffic& traffic, int64_t texts, int64_t rows) {
    int64_t best = texts;
    for (int64_t size = 1; size < texts; size += std::min(size, rows)) {
        if (traffic.cost(size) < traffic.cost(best)) best = size;
    }
    return best;
}
