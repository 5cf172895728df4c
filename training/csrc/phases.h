// Parallel phases with a barrier after each, in a single call of the thread pool.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "threads.h"

namespace training {

struct Phase {
    alignas(128) std::atomic<int64_t> next{0};
    alignas(128) std::atomic<int64_t> done{0};
};

// One thread's part. All threads run the same phases in the same order.
class Worker {
  public:
    const int thread;

    Worker(std::vector<Phase>& phases, int thread) : thread(thread), phases(phases) {}

    // Runs piece(i) for each i of 0 .. pieces - 1, in order, on whichever thread is free; then waits for all. A
    // thread that comes late finds no piece left, so the pool need not run the threads at once.
    template <class Piece> void run(int64_t pieces, const Piece& piece) {
        Phase& p = phases[phase++];
        for (int64_t i = p.next.fetch_add(1, std::memory_order_relaxed); i < pieces;
             i = p.next.fetch_add(1, std::memory_order_relaxed)) {
            piece(i);
            p.done.fetch_add(1, std::memory_order_acq_rel);
        }
        for (int spins = 0; p.done.load(std::memory_order_acquire) < pieces; spins++)
            if (spins > SPINS) yield();
        lap("waiting");
    }

    // Adds the time since the last lap to that of a kind of work.
    void lap(const char* kind) {
#if !defined(__wasm__)  // the page has a slow clock
        const auto now = std::chrono::steady_clock::now();
        spent[kind] += now - last;
        last = now;
#endif
    }

    void add_to(std::map<std::string, double>& seconds) const {
        for (const auto& [kind, time] : spent) seconds[kind] += std::chrono::duration<double>(time).count();
    }

  private:
    static constexpr int SPINS = 2000;
    std::vector<Phase>& phases;
    size_t phase = 0;
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
    std::map<const char*, std::chrono::steady_clock::duration> spent;
};

// Runs work(worker) on each of `threads` threads of a pool, with at most `most` phases. No pool: on this
// thread.
template <class Work>
void run_phases(int64_t most, int threads, Pool* pool, std::map<std::string, double>& seconds,
                const Work& work) {
    std::vector<Phase> phases(most);
    std::vector<std::map<std::string, double>> spent(threads);
    const auto body = [&](int thread) {
        const NoDenormals flushed;
        Worker worker(phases, thread);
        work(worker);
        worker.add_to(spent[thread]);
    };
    pool ? pool(threads, body) : body(0);
    for (const auto& own : spent)
        for (const auto& [kind, time] : own) seconds[kind] += time;
}

}  // namespace training
