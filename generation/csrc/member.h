// A member's part of a turn: the stages of the work, whose pieces the members of a team share.
//
// What the members write while they wait for each other lies in a cache line of each member's own. A line that
// several write moves between their cores, one after the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

// Bytes between what different members write: two cache lines, because processors fetch them in pairs.
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

// Counts of the pieces of a stage in Member::run().
struct alignas(APART) Stage {
    std::atomic<uint64_t> taken{0}, done{0};
};

// A member's place in a team.
struct Seat {
    alignas(APART) std::atomic<uint64_t> done{0};  // stages of Member::share(); the others wait for it
    alignas(APART) std::atomic<uint64_t> taken{0};
    alignas(APART) std::atomic<uint32_t> called{0};  // the last turn that it was called for
    std::atomic<uint32_t> late{0};                   // the last turn in which another took its share
    std::atomic<bool> asleep{false};
    alignas(APART) std::atomic<uint32_t> left{0};  // the last turn that it has left
};

// A member in a turn; 0 is the caller. All members run the same stages, each once, in order.
class Member {
  public:
    const int thread, members;

    Member(Stage* stages, Seat* seats, uint32_t turn, int thread, int members)
        : thread(thread), members(members), stages(stages), seats(seats), turn(turn) {}

    // piece(i) for each i of 0 .. pieces - 1, by whichever member is free; then waits until all are done,
    // unless the turn is over.
    template <class Piece>
    void run(int64_t stage, int64_t pieces, const Piece& piece) {
        Stage& s = stages[stage];
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

    // The same, but each member has a fixed share of the pieces, the same in every turn: what its pieces read
    // stays in the caches of its core. Another member takes the share of one that is late.
    template <class Piece>
    void share(int64_t stage, int64_t pieces, const Piece& piece) {
        take_share(thread, stage, pieces, piece);
        for (int i = 0; i < members; i++) {
            const int other = (thread + i) % members;  // its own share too may have gone to another
            const Seat& seat = seats[other];
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
    static constexpr int SPINS = 2000;  // about a stage's time; a member that takes longer lost its core

    // The share of member m, unless it is taken.
    template <class Piece>
    void take_share(int m, int64_t stage, int64_t pieces, const Piece& piece) {
        Seat& seat = seats[m];
        Count taken = seat.taken.load(std::memory_order_acquire);
        if (taken.turns_after(turn) > 0 || taken.in(turn) != stage) return;
        if (!seat.taken.compare_exchange_strong(taken.bits, Count(turn, stage + 1).bits,
                                                std::memory_order_acq_rel))
            return;
        if (m != thread) seat.late.store(turn, std::memory_order_relaxed);
        for (int64_t p = pieces * m / members; p < pieces * (m + 1) / members; p++) piece(p);
        seat.done.store(Count(turn, stage + 1).bits, std::memory_order_release);
    }

    Stage* const stages;
    Seat* const seats;
    const uint32_t turn;
};
