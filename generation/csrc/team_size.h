// Finds the team that takes a step fastest. Teams of 1, 2, 4 ... are tried on steps that are to be done anyway.
// The best size depends on the time that a cache line takes between cores. It differs by a factor of 10 between
// machines and, on a virtual one, between seconds.
#pragma once

#include <algorithm>
#include <chrono>

class TeamSize {
  public:
    using Clock = std::chrono::steady_clock;

    bool on_trial() const { return trial > 0; }

    // The members for the next step.
    int next(Clock::time_point now) {
        if (!on_trial() && now >= until) {
            first = now;
            try_out(1, now);
        }
        return on_trial() ? trial : best;
    }

    // Records that a step took `elapsed` with `members` of at most `most` members. They may be more or fewer
    // than next().
    void took(int members, int most, Clock::duration elapsed, Clock::time_point now) {
        if (members != trial) return;
        least = std::min(least, elapsed);
        tries++;
        if (tries < LEAST_TRIES || (trial > 1 && now < began + LEAST_TIME)) return;
        if (trial == 1 || least < GAIN * shortest) best = trial, shortest = least;
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
        trial = members, tries = 0, least = Clock::duration::max(), began = now;
    }

    int best = 1, trial = 0, tries = 0;  // trial: 0 if none is tried
    int rarity = 5;                      // a choice holds for this many times the time that it took
    Clock::duration least{}, shortest{};
    Clock::time_point first{}, began{}, until{};
};
