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
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include "job.h"
#include "member.h"

class Team {
  public:
    // Has fewer helpers where the system refuses to start more. The caller alone can do all work.
    Team(int64_t stages, int threads) : stages(stages), seats(threads) {
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
            over.store(true);
        }
        woken.notify_all();
        for (std::thread& helper : helpers) helper.join();
    }

    // Runs work(member) here and on those of members - 1 helpers that join in time. A late helper runs it too:
    // what `work` reads outside of its pieces, other than its own members, must outlive the call.
    template <class Work>
    void take_turn(int members, const Work& work) {
        members = std::min(members, 1 + static_cast<int>(helpers.size()));
        turn++;
        job.write(turn, members, work);
        for (int m = 1; m < members; m++) seats[m].called.store(turn, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        bool wake = false;
        for (int m = 1; m < members; m++) wake |= seats[m].asleep.load(std::memory_order_relaxed);
        if (wake) {
            {
                const std::lock_guard<std::mutex> held(mutex);
            }
            woken.notify_all();
        }
        Member caller(stages.data(), seats.data(), turn, 0, members);
        work(caller);
    }

    // Waits until late helpers have left the turns that they were called for.
    void settle() const {
        for (const Seat& seat : seats)
            while (seat.left.load(std::memory_order_acquire) != seat.called.load(std::memory_order_relaxed))
                std::this_thread::yield();
    }

  private:
    static constexpr auto AWAKE = std::chrono::microseconds(200);  // how long a helper spins before it sleeps

    void help(int thread) {
        Seat& seat = seats[thread];
        for (uint32_t seen = 0;; seat.left.store(seen, std::memory_order_release)) {
            const auto start = std::chrono::steady_clock::now();
            const auto idle = [&] {
                return seat.called.load(std::memory_order_acquire) == seen &&
                       !over.load(std::memory_order_relaxed);
            };
            for (int spins = 1; idle(); spins++) {
                if (spins % 64) continue;
                std::this_thread::yield();
                if (std::chrono::steady_clock::now() - start < AWAKE) continue;
                std::unique_lock<std::mutex> held(mutex);
                seat.asleep.store(true, std::memory_order_relaxed);
                std::atomic_thread_fence(std::memory_order_seq_cst);
                woken.wait(held, [&] { return !idle(); });
                seat.asleep.store(false, std::memory_order_relaxed);
            }
            if (over.load(std::memory_order_relaxed)) return;
            seen = seat.called.load(std::memory_order_acquire);
            Job::Copy copy;
            if (!job.read(seen, copy)) continue;
            Member member(stages.data(), seats.data(), seen, thread, copy.members);
            copy.call(copy.work, member);
        }
    }

    const pid_t process = getpid();
    std::vector<Stage> stages;
    std::vector<Seat> seats;
    Job job;
    std::mutex mutex;
    std::condition_variable woken;
    std::atomic<bool> over{false};
    uint32_t turn = 0;
    std::vector<std::thread> helpers;
};
