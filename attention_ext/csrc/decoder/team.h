// Threads that help with a token's step, which takes some ten microseconds.
//
// A thread pool's parallel loop ends when every thread has joined and finished. A thread that sleeps, or whose
// core is taken, delays that by a turn of the scheduler: the time of hundreds of steps. Here the caller never
// waits for a helper that has not taken a piece of the work. A late helper finds the work done.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

class Team {
  public:
    // Who takes part in a turn: 0 is the caller.
    struct Member {
        Team& team;
        uint64_t turn;
        int thread;

        // piece(i) for each i of 0 .. pieces - 1, shared with the other members; then waits until all are done,
        // unless the turn is over. Each stage of a turn may be run once.
        template <class Piece>
        void run(int64_t stage, int64_t pieces, const Piece& piece) {
            Stage& s = team.stages[stage];
            uint64_t taken = s.taken.load(std::memory_order_acquire);
            while (taken >> 32 == turn && (taken & 0xffffffff) < static_cast<uint64_t>(pieces)) {
                if (!s.taken.compare_exchange_weak(taken, taken + 1, std::memory_order_acq_rel)) continue;
                piece(static_cast<int64_t>(taken & 0xffffffff));
                s.done.fetch_add(1, std::memory_order_release);
                taken = s.taken.load(std::memory_order_acquire);
            }
            for (int spins = 0; s.done.load(std::memory_order_acquire) < pieces; spins++) {
                if (s.taken.load(std::memory_order_relaxed) >> 32 != turn) return;
                if (spins > 2000) std::this_thread::yield();  // about a stage's time: a member lost its core
            }
        }
    };
    using Work = std::function<void(Member&)>;

    // Has fewer helpers where the system refuses to start more. The caller alone can do all work.
    Team(int64_t stages, int threads) : stages(stages) {
        helpers.reserve(threads);
        for (int thread = 1; thread < threads; thread++) {
            try {
                helpers.emplace_back([this, thread] { help(thread); });
            } catch (const std::system_error&) {
                return;
            }
        }
    }

    // Does not delete a team in a forked process, which has the team's memory but not its threads.
    struct Delete {
        void operator()(Team* team) const {
            if (team->ours()) delete team;
        }
    };

    // Whether this is the process of the helpers. In a fork no other function may be called.
    bool ours() const { return getpid() == process; }

    ~Team() {
        {
            const std::lock_guard<std::mutex> held(mutex);
            turn = OVER;
        }
        called.notify_all();
        for (std::thread& helper : helpers) helper.join();
    }

    // Runs work(member) here and on those helpers that join in time. What `work` reads outside of its pieces
    // must outlive the call, because a late helper reads it too.
    void take_turn(const Work& work) {
        uint64_t now;
        bool wake;
        {
            const std::lock_guard<std::mutex> held(mutex);
            now = turn.load(std::memory_order_relaxed) + 1;
            if (now == OVER) now = 1;
            for (Stage& s : stages) {
                s.done.store(0, std::memory_order_relaxed);
                s.taken.store(now << 32, std::memory_order_release);
            }
            current = work;
            turn.store(now, std::memory_order_release);
            wake = sleeping > 0;
        }
        if (wake) called.notify_all();
        Member caller{*this, now, 0};
        work(caller);
    }

  private:
    static constexpr uint64_t OVER = 0xffffffff;
    static constexpr auto AWAKE = std::chrono::microseconds(200);  // how long a helper spins before it sleeps

    // taken: the turn in the upper 32 bits, the number of pieces taken in the lower.
    struct alignas(64) Stage {
        std::atomic<uint64_t> taken{0};
        std::atomic<int64_t> done{0};
    };

    void help(int thread) {
        uint64_t seen = 0;
        for (;;) {
            const auto start = std::chrono::steady_clock::now();
            for (int spins = 1; turn.load(std::memory_order_acquire) == seen; spins++) {
                if (spins % 64) continue;
                std::this_thread::yield();
                if (std::chrono::steady_clock::now() - start > AWAKE) break;
            }
            Work work;
            {
                std::unique_lock<std::mutex> held(mutex);
                sleeping++;
                called.wait(held, [&] { return turn.load(std::memory_order_relaxed) != seen; });
                sleeping--;
                seen = turn.load(std::memory_order_relaxed);
                if (seen == OVER) return;
                work = current;
            }
            Member member{*this, seen, thread};
            work(member);
        }
    }

    const pid_t process = getpid();
    std::vector<Stage> stages;
    std::mutex mutex;
    std::condition_variable called;
    std::atomic<uint64_t> turn{0};
    int sleeping = 0;
    Work current;
    std::vector<std::thread> helpers;
};

// A team of one.
struct Alone {
    template <class Piece>
    void run(int64_t, int64_t pieces, const Piece& piece) {
        for (int64_t i = 0; i < pieces; i++) piece(i);
    }
};

// Decides whether the team shares a step. The caller waits for a helper that loses its core in the middle of a
// piece. So after a turn that took much longer than the same work alone, the caller works alone for as long as
// the turn took, and four times as long each time that this happens again within a second.
class Pace {
  public:
    using Clock = std::chrono::steady_clock;

    bool together(int64_t rows, Clock::time_point now) const { return rows == measured && now >= alone_until; }

    void took(int64_t rows, bool together, Clock::time_point start) {
        const Clock::time_point now = Clock::now();
        const Clock::duration elapsed = now - start;
        if (!together) {
            if (rows != measured || elapsed < alone) alone = elapsed;
            measured = rows;
        } else if (elapsed > 3 * alone) {
            patience = now < lost + std::chrono::seconds(1) ? std::min(4 * patience, 64) : 1;
            alone_until = now + patience * elapsed;
            lost = now;
            measured = 0;  // measure the work alone again: contexts grow
        }
    }

  private:
    int64_t measured = 0;  // rows of the fastest work alone, `alone`
    Clock::duration alone{};
    Clock::time_point lost{}, alone_until{};
    int patience = 1;
};
