// Threads that help with a token's step, which takes some ten microseconds.
//
// A thread pool's parallel loop ends when every thread has joined and finished. A thread that sleeps, or whose
// core is taken, delays that by a turn of the scheduler: the time of hundreds of steps. Here the caller never
// waits for a helper that has not taken a piece of the work. A late helper finds the work done.
//
// What the members write while they wait for each other lies in a cache line of each member's own. A line that
// several write moves between their cores, one after the other.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#if defined(__wasm__)
#include "decoder/no_threads.h"
#else
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include <unistd.h>

class Team {
    // What different members write is so many bytes apart: two cache lines, because processors fetch them in
    // pairs.
    static constexpr size_t APART = 128;

    // A count that belongs to a turn, which is in the upper 32 bits. Turns wrap around.
    struct Count {
        uint64_t bits;

        Count(uint64_t bits) : bits(bits) {}
        Count(uint32_t turn, int64_t count) : bits(uint64_t{turn} << 32 | static_cast<uint32_t>(count)) {}

        int32_t turns_after(uint32_t turn) const {
            return static_cast<int32_t>(static_cast<uint32_t>(bits >> 32) - turn);
        }
        // The count in this turn; 0 if it is an earlier turn's.
        int64_t in(uint32_t turn) const { return turns_after(turn) < 0 ? 0 : static_cast<uint32_t>(bits); }
    };

  public:
    // Who takes part in a turn: 0 is the caller. All members run the same stages, each once, in order.
    struct Member {
        Team& team;
        uint32_t turn;
        int thread, members;

        // piece(i) for each i of 0 .. pieces - 1, by whichever member is free; then waits until all are done,
        // unless the turn is over.
        template <class Piece>
        void run(int64_t stage, int64_t pieces, const Piece& piece) {
            Stage& s = team.stages[stage];
            Count taken = s.taken.load(std::memory_order_acquire);
            while (taken.turns_after(turn) <= 0 && taken.in(turn) < pieces) {
                const int64_t next = taken.in(turn);
                if (!s.taken.compare_exchange_weak(taken.bits, Count(turn, next + 1).bits,
                                                   std::memory_order_acq_rel))
                    continue;
                piece(next);
                Count done = s.done.load(std::memory_order_relaxed);
                while (!s.done.compare_exchange_weak(done.bits, Count(turn, done.in(turn) + 1).bits,
                                                     std::memory_order_acq_rel)) {
                }
                taken = s.taken.load(std::memory_order_acquire);
            }
            for (int spins = 0;; spins++) {
                const Count done = s.done.load(std::memory_order_acquire);
                if (done.turns_after(turn) > 0 || done.in(turn) >= pieces) return;
                if (Count(s.taken.load(std::memory_order_relaxed)).turns_after(turn) > 0) return;
                if (spins > SPINS) std::this_thread::yield();
            }
        }

        // The same, but each member has a fixed share of the pieces, the same in every turn: what its pieces
        // read stays in the caches of its core. The share of a member that is late goes to another.
        template <class Piece>
        void share(int64_t stage, int64_t pieces, const Piece& piece) {
            take_share(thread, stage, pieces, piece);
            for (int i = 0; i < members; i++) {
                const int other = (thread + i) % members;  // its own share too may have gone to another
                const Seat& seat = team.seats[other];
                for (int spins = 0;; spins++) {
                    const Count done = seat.done.load(std::memory_order_acquire);
                    if (done.turns_after(turn) > 0) return;
                    if (done.in(turn) > stage) break;
                    if (spins >= SPINS) {
                        if (spins > SPINS) std::this_thread::yield();
                        take_share(other, stage, pieces, piece);
                    } else if (seat.late.load(std::memory_order_relaxed) == turn) {
                        spins = SPINS - 1;
                    }
                }
            }
        }

      private:
        // The share of member m, unless it is taken.
        template <class Piece>
        void take_share(int m, int64_t stage, int64_t pieces, const Piece& piece) {
            Seat& seat = team.seats[m];
            Count taken = seat.taken.load(std::memory_order_acquire);
            if (taken.turns_after(turn) > 0 || taken.in(turn) != stage) return;
            if (!seat.taken.compare_exchange_strong(taken.bits, Count(turn, stage + 1).bits,
                                                    std::memory_order_acq_rel))
                return;
            if (m != thread) seat.late.store(turn, std::memory_order_relaxed);
            for (int64_t p = pieces * m / members; p < pieces * (m + 1) / members; p++) piece(p);
            seat.done.store(Count(turn, stage + 1).bits, std::memory_order_release);
        }
    };

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

    // Runs work(member) here and on those of members - 1 helpers that join in time. What `work` reads outside
    // of its pieces, other than its own members, must outlive the call, because a late helper reads it too.
    template <class Work>
    void take_turn(int members, const Work& work) {
        static_assert(std::is_trivially_copyable_v<Work> && sizeof(Work) <= sizeof(uint64_t[Job::WORDS]));
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
        Member caller{*this, turn, 0, members};
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
    static constexpr int SPINS = 2000;  // about a stage's time; a member that takes longer lost its core

    struct alignas(APART) Stage {  // of run(): pieces
        std::atomic<uint64_t> taken{0}, done{0};
    };

    struct Seat {
        alignas(APART) std::atomic<uint64_t> done{0};  // stages of share(); the others wait for it
        alignas(APART) std::atomic<uint64_t> taken{0};
        alignas(APART) std::atomic<uint32_t> called{0};  // the last turn that it was called for
        std::atomic<uint32_t> late{0};                   // the last turn in which another took its share
        std::atomic<bool> asleep{false};
        alignas(APART) std::atomic<uint32_t> left{0};  // the last turn that it has left
    };

    // The work of the latest turn. A helper may read it while the caller writes the next one, and then drops
    // it (Boehm 2012, 'Can seqlocks get along with programming language memory models?').
    struct alignas(APART) Job {
        static constexpr int WORDS = 8;
        std::atomic<uint32_t> begun{0};
        std::atomic<int> members{0};
        std::atomic<void (*)(const void*, Member&)> call{nullptr};
        std::atomic<uint64_t> words[WORDS]{};

        template <class Work>
        void write(uint32_t turn, int of, const Work& work) {
            begun.store(turn, std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_release);
            uint64_t copy[WORDS] = {};
            std::memcpy(copy, static_cast<const void*>(&work), sizeof work);
            members.store(of, std::memory_order_relaxed);
            call.store([](const void* data, Member& member) { (*static_cast<const Work*>(data))(member); },
                       std::memory_order_relaxed);
            for (int i = 0; i < WORDS; i++) words[i].store(copy[i], std::memory_order_relaxed);
        }
    };

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
            alignas(16) uint64_t work[Job::WORDS];
            Member member{*this, seen, thread, job.members.load(std::memory_order_relaxed)};
            const auto call = job.call.load(std::memory_order_relaxed);
            for (int i = 0; i < Job::WORDS; i++) work[i] = job.words[i].load(std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_acquire);
            if (job.begun.load(std::memory_order_relaxed) == seen) call(work, member);
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

// Attempts of several threads. An exception would end the program in another thread, so it is kept.
class Attempts {
  public:
    // body(), then then(), by one thread at a time.
    template <class Body, class Then>
    void attempt(const Body& body, const Then& then) {
        std::exception_ptr error;
        try {
            body();
        } catch (...) {
            error = std::current_exception();
        }
        const std::lock_guard<std::mutex> held(mutex);
        then();
        if (error) failed = error;
    }

    // Throws what an attempt has thrown, if any has.
    void rethrow() const {
        if (failed) std::rethrow_exception(failed);
    }

  private:
    std::exception_ptr failed;
    std::mutex mutex;
};
#endif

// A team of one.
struct Alone {
    template <class Piece>
    void run(int64_t, int64_t pieces, const Piece& piece) {
        for (int64_t i = 0; i < pieces; i++) piece(i);
    }
    template <class Piece>
    void share(int64_t stage, int64_t pieces, const Piece& piece) {
        run(stage, pieces, piece);
    }
    int members() const { return 1; }
};

// Decides whether the team shares a step. The caller waits for a helper that loses its core in the middle of a
// piece. Such a turn costs the time of many steps, and may still be worth what the team has saved since the
// last one. If it is not, the caller works alone for as long as the turn took, and four times as long each time
// that this happens again within a second.
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

// Finds the team that takes a step fastest. Teams of 1, 2, 4 ... are tried on steps that are to be done anyway.
// Which one is best depends on the time of a cache line between cores. It differs by a factor of 10 between
// machines and, on a virtual one, between seconds.
class TeamSize {
  public:
    using Clock = Pace::Clock;

    bool on_trial() const { return trial > 0; }

    // The members for the next step.
    int next(Clock::time_point now) {
        if (!on_trial() && now >= until) {
            first = now;
            try_out(1, now);
        }
        return on_trial() ? trial : best;
    }

    // A step has taken `elapsed` with so many of at most `most` members, which may be another number than
    // next().
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
    int rarity = 5;                      // the last choice holds for so many times as long as it took
    Clock::duration least{}, shortest{};
    Clock::time_point first{}, began{}, until{};
};
