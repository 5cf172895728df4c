// Parallel phases with a barrier after each, in a single call of the thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "denormals.h"
#include "threads.h"
#include "training_step.h"

namespace training {

// Adds the time since its last lap to one of KINDS.
class Clock {
  public:
    void lap(Kind kind) {
        const auto now = std::chrono::steady_clock::now();
        spent[kind] += now - last;
        last = now;
    }
    void add_to(double* seconds) const {
        for (int k = 0; k < KINDS; k++) seconds[k] += std::chrono::duration<double>(spent[k]).count();
    }

  private:
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
    std::chrono::steady_clock::duration spent[KINDS] = {};
};

class Phases {
    struct Stage {
        alignas(128) std::atomic<int64_t> next{0};
        alignas(128) std::atomic<int64_t> done{0};
    };

  public:
    // One thread's part. All threads run the same phases in the same order.
    class Member {
      public:
        const int thread;
        Clock clock;

        Member(std::vector<Stage>& stages, int thread) : thread(thread), stages(stages) {}

        // Runs piece(i) for each i of 0 .. pieces - 1, in order, on whichever thread is free; then waits for
        // all. A thread that comes late finds no piece left, so the pool need not run the threads at once.
        template <class Piece>
        void run(int64_t pieces, const Piece& piece) {
            Stage& s = stages[static_cast<size_t>(phase++)];
            for (int64_t i = s.next.fetch_add(1, std::memory_order_relaxed); i < pieces;
                 i = s.next.fetch_add(1, std::memory_order_relaxed)) {
                piece(i);
                s.done.fetch_add(1, std::memory_order_acq_rel);
            }
            for (int spins = 0; s.done.load(std::memory_order_acquire) < pieces; spins++)
                if (spins > SPINS) std::this_thread::yield();
            clock.lap(WAITING);
        }

      private:
        static constexpr int SPINS = 2000;
        std::vector<Stage>& stages;
        int64_t phase = 0;
    };

    // Runs work(member) on each of `threads` threads, with at most `most` phases.
    template <class Work>
    static void run(int64_t most, int threads, double* seconds, const Work& work) {
        std::vector<Stage> stages(static_cast<size_t>(most));
        std::vector<Clock> clocks(static_cast<size_t>(threads));
        on_threads(threads, [&](int thread) {
            const NoDenormals flushed;
            Member member(stages, thread);
            work(member);
            clocks[static_cast<size_t>(thread)] = member.clock;
        });
        for (const Clock& clock : clocks) clock.add_to(seconds);
    }
};

}  // namespace training
