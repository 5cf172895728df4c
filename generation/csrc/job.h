// The work of a team's latest turn, which its helpers copy.
//
// A helper may copy it while the caller writes the next one, and then drops the copy (a sequence lock: Boehm
// 2012, 'Can seqlocks get along with programming language memory models?').
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "member.h"

class alignas(APART) Job {
    static constexpr int WORDS = 8;

  public:
    struct Copy {
        alignas(16) uint64_t work[WORDS];
        void (*call)(const void* work, Member&);
        int members;
    };

    // Only the caller writes.
    template <class Work>
    void write(uint32_t turn, int members_of_turn, const Work& work) {
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
