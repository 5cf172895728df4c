// The thread pool of the kernels, and arithmetic without denormal numbers.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#if !defined(__wasm__)
#include <thread>
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// While an instance exists, this thread treats denormal numbers as 0, where the processor can: they are slow.
class NoDenormals {
  public:
    // To set is slower than to get, so it is done only where it changes something.
    NoDenormals() : before(get()) {
        if ((before | FLUSH) != before) set(before | FLUSH);
    }
    ~NoDenormals() {
        if ((before | FLUSH) != before) set(before);
    }
    NoDenormals(const NoDenormals&) = delete;
    NoDenormals& operator=(const NoDenormals&) = delete;

  private:
#if defined(__SSE__)
    static constexpr uint64_t FLUSH = 0x8040;  // bits of MXCSR: results and inputs
    static uint64_t get() { return _mm_getcsr(); }
    static void set(uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
    static constexpr uint64_t FLUSH = uint64_t{1} << 24;  // a bit of FPCR
    static uint64_t get() {
        uint64_t bits;
        asm volatile("mrs %0, fpcr" : "=r"(bits));
        return bits;
    }
    static void set(uint64_t bits) { asm volatile("msr fpcr, %0" : : "r"(bits)); }
#else
    static constexpr uint64_t FLUSH = 0;
    static uint64_t get() { return 0; }
    static void set(uint64_t) {}
#endif
    const uint64_t before;
};

// Lets another thread run. WebAssembly has one thread here.
inline void yield() {
#if !defined(__wasm__)
    std::this_thread::yield();
#endif
}

// A pool of threads: runs body(thread) for thread = 0 .. threads - 1, perhaps concurrently.
using Pool = void(int threads, const std::function<void(int)>& body);

// body(head, item, thread) for each of `heads` heads and each item of 0 .. items - 1, a head's in order.
// Threads begin with different heads, so that a head's K and V go to few cores, and then help with the others.
template <class Body>
void for_each_item(int64_t heads, int64_t items, int threads, Pool* pool, const Body& body) {
    const NoDenormals flushed;
    const int64_t all = heads * items;
    if (all == 1 || threads == 1 || !pool) {
        for (int64_t i = 0; i < all; i++) body(i / items, i % items, 0);
        return;
    }
    struct alignas(128) Queue {  // two cache lines, which processors fetch together
        std::atomic<int64_t> next{0};
    };
    const int64_t count = std::min<int64_t>(heads, threads);  // queue q begins with head heads * q / count
    std::vector<Queue> queues(count);
    const int members = static_cast<int>(std::min<int64_t>(all, threads));
    pool(members, [&](int thread) {
        const NoDenormals flushed_here;
        for (int64_t n = 0; n < count; n++) {
            const int64_t q = (count * thread / members + n) % count;
            const int64_t first = heads * q / count, end = (heads * (q + 1) / count - first) * items;
            for (int64_t i = queues[q].next++; i < end; i = queues[q].next++)
                body(first + i / items, i % items, thread);
        }
    });
}

#if defined(USER_KERNEL)  // a user's file has no other pool
Pool on_threads;
template <class Body> void for_each_item(int64_t heads, int64_t items, int threads, const Body& body) {
    for_each_item(heads, items, threads, on_threads, body);
}
#endif
