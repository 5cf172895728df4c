// Decides whether the team shares a step. The caller waits for a helper that loses its core in the middle of a
// piece. Such a turn costs the time of many steps, and may still be worth what the team has saved since the
// last one. If it is not, the caller works alone for as long as the turn took, and four times as long each time
// that this happens again within a second.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

class Pace {
  public:
    using Clock = std::chrono::steady_clock;

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
