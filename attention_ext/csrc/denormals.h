// Arithmetic without denormal numbers: a multiply-add with one takes over a hundred cycles on many processors.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// While an instance exists, this thread's arithmetic treats denormal inputs and results as 0, where the
// processor can. A softmax's small weights can be denormal, and so can sums that begin with them.
class NoDenormals {
  public:
#if defined(__SSE__)
    // Setting costs 8 ns (AMD Zen 5), so it is done only where it changes something.
    NoDenormals() : before(_mm_getcsr()) {
        if (flushed() != before) _mm_setcsr(flushed());
    }
    ~NoDenormals() {
        if (flushed() != before) _mm_setcsr(before);
    }
#elif defined(__aarch64__)
    NoDenormals() : before(get()) { set(before | FLUSH); }
    ~NoDenormals() { set(before); }
#else
    NoDenormals() = default;
    ~NoDenormals() {}
#endif
    NoDenormals(const NoDenormals&) = delete;
    NoDenormals& operator=(const NoDenormals&) = delete;

  private:
#if defined(__SSE__)
    static constexpr unsigned FLUSH_RESULTS = 0x8000, FLUSH_INPUTS = 0x0040;  // bits of MXCSR
    unsigned before;

    unsigned flushed() const { return before | FLUSH_RESULTS | FLUSH_INPUTS; }
#elif defined(__aarch64__)
    static constexpr uint64_t FLUSH = uint64_t{1} << 24;  // a bit of FPCR
    uint64_t before;

    static uint64_t get() {
        uint64_t value;
        asm volatile("mrs %0, fpcr" : "=r"(value));
        return value;
    }
    static void set(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#endif
};
