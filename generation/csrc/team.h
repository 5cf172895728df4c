// The decoder's threads, which share a token's step of some ten microseconds.
//
// The caller never waits for a helper that has taken no work, unlike in a thread pool: a late helper finds
// the work done. What different members write lies in cache lines of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__wasm__)
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#endif

#include "threads.h"

// A thread's work of one kind, in nanoseconds of the steady clock. Only thread 0, the caller, has `waiting`.
struct Span {
    const char* kind;
    int thread;
    int64_t begin, end;
};

// Records spans while it is switched on; it is off at first.
class Trace {
  public:
    explicit Trace(int threads) : tracks(threads) {}

    void record(bool on) {
        for (Track& track : tracks) track.spans.reserve(on ? EXPECTED_SPANS : 0);
        recording = on;
    }

    // The spans since the last call, thread by thread, each in order. No thread may be adding one.
    std::vector<Span> take() {
        std::vector<Span> all;
        for (Track& track : tracks) {
            all.insert(all.end(), track.spans.begin(), track.spans.end());
            track.spans.clear();
        }
        return all;
    }

    // The time; 0 unless recording.
    int64_t now() const {
        if (!recording) return 0;
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    }

    // Adds a span from `begin`, a now(), if recording. Helpers do inside a piece only, before the caller reads.
    void add(const char* kind, int64_t thread, int64_t begin) {
        if (recording) tracks[thread].spans.push_back({kind, static_cast<int>(thread), begin, now()});
    }

    // Adds the caller's wait in a stage that began then: from its last piece on. A helper's may outlast the
    // call.
    void add_wait(int thread, int64_t begin) {
        if (thread > 0) return;
        const std::vector<Span>& spans = tracks[0].spans;
        add("waiting", 0, spans.empty() ? begin : std::max(begin, spans.back().end));
    }

  private:
    static constexpr int EXPECTED_SPANS = 1 << 16;

    struct alignas(64) Track {  // a cache line each: threads write at the same time
        std::vector<Span> spans;
    };
    bool recording = false;
    std::vector<Track> tracks;
};

// A span from here to the end of the scope.
class Timed {
  public:
    Timed(Trace& trace, const char* kind, int64_t thread)
        : trace(trace), kind(kind), thread(thread), begin(trace.now()) {}
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;
    ~Timed() { trace.add(kind, thread, begin); }

  private:
    Trace& trace;
    const char* kind;
    int64_t thread, begin;
};

constexpr size_t APART = 128;

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

// The pieces of a stage that members take one by one.
struct alignas(APART) Pieces {
    std::atomic<int64_t> next{0};
};

// A member's place in a team.
struct Seat {
    alignas(APART) std::atomic<uint64_t> done{0};  // stages; the others wait for it
    alignas(APART) std::atomic<uint64_t> taken{0};
    alignas(APART) std::atomic<uint32_t> called{0};  // the last turn that it was called for
    std::atomic<uint32_t> late{0};                   // the last turn in which another took its share
    std::atomic<bool> asleep{false};
    alignas(APART) std::atomic<uint32_t> left{0};  // the last turn that it has left
};

// The first error of run()'s pieces. In another thread it would end the program, so the caller throws it.
struct Failure {
#if defined(__wasm__)
    template <class Body> void keep(const Body& body) { body(); }
#else
    std::exception_ptr error;
    std::mutex mutex;

    template <class Body> void keep(const Body& body) {
        try {
            body();
        } catch (...) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (!error) error = std::current_exception();
        }
    }
#endif
};

// What the members of a turn share.
struct Turn {
    uint32_t number;
    Seat* seats;
    Failure* failure;
};

// A member in a turn; 0 is the caller. All members run the same stages, each once, in order.
class Member {
  public:
    const int thread, members;

    Member(Trace& trace, int thread, int members = 1, const Turn& turn = {})
        : thread(thread), members(members), trace(trace), turn(turn) {}

    // A span of this kind to the end of the scope.
    Timed timed(const char* kind) const { return {trace, kind, thread}; }

    // A stage: piece(i) for each i of 0 .. pieces - 1. A member's share is the same in every turn, for its
    // caches; a late member's is taken by another. Waits until all are done, unless the turn is over.
    template <class Piece> void share(int64_t pieces, const Piece& piece) {
        for (int64_t i = 0; members == 1 && i < pieces; i++) piece(i);
        if (members == 1) return;
        const int64_t begin = thread > 0 ? 0 : trace.now();  // a helper may outlast the call that reads it
        take_shares(pieces, piece);
        trace.add_wait(thread, begin);
        stage++;
    }

    // The same by whichever member is free. `left` lives for the turn; the caller throws what a piece throws.
    template <class Piece> void run(int64_t pieces, Pieces* left, const Piece& piece) {
        if (members == 1) return share(pieces, piece);
        share(members, [&](int64_t) {
            for (int64_t i = left->next++; i < pieces; i = left->next++) turn.failure->keep([&] { piece(i); });
        });
    }

  private:
    static constexpr int SPINS = 2000;  // about a stage's time; a member that takes longer lost its core

    template <class Piece> void take_shares(int64_t pieces, const Piece& piece) {
        take_share(thread, pieces, piece);
        for (int i = 0; i < members; i++) {
            const int other = (thread + i) % members;  // its own share too may have gone to another
            const Seat& seat = turn.seats[other];
            for (int spins = 0;; spins++) {
                const Count done = seat.done.load(std::memory_order_acquire);
                if (done.turns_after(turn.number) > 0) return;
                if (done.in(turn.number) > stage) break;
                if (spins >= SPINS) {
                    if (spins > SPINS) yield();
                    take_share(other, pieces, piece);
                } else if (seat.late.load(std::memory_order_relaxed) == turn.number) {
                    spins = SPINS - 1;
                }
            }
        }
    }

    // The share of member m, unless it is taken.
    template <class Piece> void take_share(int m, int64_t pieces, const Piece& piece) {
        Seat& seat = turn.seats[m];
        Count taken = seat.taken.load(std::memory_order_acquire);
        if (taken.turns_after(turn.number) > 0 || taken.in(turn.number) != stage) return;
        if (!seat.taken.compare_exchange_strong(taken.bits, Count(turn.number, stage + 1).bits,
                                                std::memory_order_acq_rel))
            return;
        if (m != thread) seat.late.store(turn.number, std::memory_order_relaxed);
        for (int64_t p = pieces * m / members; p < pieces * (m + 1) / members; p++) piece(p);
        seat.done.store(Count(turn.number, stage + 1).bits, std::memory_order_release);
    }

    Trace& trace;
    const Turn turn;
    int64_t stage = 0;
};

#if defined(__wasm__)

// No threads.
class Team {
  public:
    Team(int, Trace& trace) : trace(trace) {}
    struct Delete {
        void operator()(Team* team) const { delete team; }
    };
    bool helps() const { return false; }
    void settle() const {}
    template <class Work> void run(int, const Work& work) {
        Member caller(trace, 0);
        work(caller);
    }

  private:
    Trace& trace;
};

#else

// A team's latest work, copied by helpers; a copy made during a write is dropped (a sequence lock: Boehm
// 2012, 'Can seqlocks get along with programming language memory models?').
class alignas(APART) Job {
    static constexpr int WORDS = 8;

  public:
    struct Copy {
        alignas(16) uint64_t work[WORDS];
        void (*call)(const void* work, Member&);
        int members;
    };

    // Only the caller writes.
    template <class Work> void write(uint32_t turn, int members_of_turn, const Work& work) {
        static_assert(std::is_trivially_copyable_v<Work> && sizeof(Work) <= sizeof(uint64_t[WORDS]));
        begun.store(turn, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        uint64_t copy[WORDS] = {};
        std::memcpy(copy, static_cast<const void*>(&work), sizeof work);
        members.store(members_of_turn, std::memory_order_relaxed);
        call.store([](const void* data, Member& member) { (*static_cast<const Work*>(data))(member); },
                   std::memory_order_relaxed);
        for (int i = 0; i < WORDS; i++) words[i].store(copy[i], std::memory_order_relaxed);
    }

    // Whether `copy` is the work of this turn. If not, a later turn has begun.
    bool read(uint32_t turn, Copy& copy) const {
        copy.members = members.load(std::memory_order_relaxed);
        copy.call = call.load(std::memory_order_relaxed);
        for (int i = 0; i < WORDS; i++) copy.work[i] = words[i].load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        return begun.load(std::memory_order_relaxed) == turn;
    }

  private:
    std::atomic<uint32_t> begun{0};
    std::atomic<int> members{0};
    std::atomic<void (*)(const void*, Member&)> call{nullptr};
    std::atomic<uint64_t> words[WORDS]{};
};

class Team {
  public:
    // Has fewer helpers where the system refuses to start more. The caller alone can do all work.
    Team(int threads, Trace& trace) : trace(trace), seats(threads) {
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
            if (getpid() == team->process) delete team;
        }
    };

    // Whether there are helpers, and this is their process. If not, all work is done alone.
    bool helps() const { return !helpers.empty() && getpid() == process; }

    ~Team() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            over.store(true);
        }
        woken.notify_all();
        for (std::thread& helper : helpers) helper.join();
    }

    // Runs work(member) here and on those of members - 1 helpers that join in time. A late helper runs it too:
    // what `work` reads outside of its pieces, other than its own members, must outlive the call.
    template <class Work> void run(int members, const Work& work) {
        members = helps() ? std::min(members, 1 + static_cast<int>(helpers.size())) : 1;
        if (members == 1) {
            Member caller(trace, 0);
            return work(caller);
        }
        turn++;
        job.write(turn, members, work);
        for (int m = 1; m < members; m++) seats[m].called.store(turn, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        bool wake = false;
        for (int m = 1; m < members; m++) wake |= seats[m].asleep.load(std::memory_order_relaxed);
        if (wake) {
            {
                const std::lock_guard<std::mutex> lock(mutex);
            }
            woken.notify_all();
        }
        Member caller(trace, 0, members, {turn, seats.data(), &failure});
        work(caller);
        if (failure.error) std::rethrow_exception(std::exchange(failure.error, nullptr));
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
                std::unique_lock<std::mutex> lock(mutex);
                seat.asleep.store(true, std::memory_order_relaxed);
                std::atomic_thread_fence(std::memory_order_seq_cst);
                woken.wait(lock, [&] { return !idle(); });
                seat.asleep.store(false, std::memory_order_relaxed);
            }
            if (over.load(std::memory_order_relaxed)) return;
            seen = seat.called.load(std::memory_order_acquire);
            Job::Copy copy;
            if (!job.read(seen, copy)) continue;
            Member member(trace, thread, copy.members, {seen, seats.data(), &failure});
            copy.call(copy.work, member);
        }
    }

    const pid_t process = getpid();
    Trace& trace;
    std::vector<Seat> seats;
    Job job;
    Failure failure;
    std::mutex mutex;
    std::condition_variable woken;
    std::atomic<bool> over{false};
    uint32_t turn = 0;
    std::vector<std::thread> helpers;
};

#endif
