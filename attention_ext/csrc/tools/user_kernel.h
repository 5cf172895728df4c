// A user's file as a part, in a library (user_kernel.cpp) or a program (alone.cpp).
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "attention.h"

#if defined(USER_KERNEL_ISPC)
#define C_NAME \
    extern "C"  // ISPC's functions take struct Attention of attention.isph, which has the same layout
#else
#define C_NAME
#endif
// Each is null in a file that does not define it.
C_NAME __attribute__((weak)) void attention(const Attention&, float* scratch);
C_NAME __attribute__((weak)) int64_t scratch(const Attention&);
__attribute__((weak)) void attention_backward(const AttentionGradient&, float* scratch);
__attribute__((weak)) int64_t backward_scratch(const AttentionGradient&);

extern "C" __attribute__((weak)) int omp_get_max_threads();
extern "C" __attribute__((weak)) void omp_set_num_threads(int);

// While an instance exists, this thread's OpenMP regions have the threads of a call, if there is OpenMP.
class OpenMPThreads {
  public:
    explicit OpenMPThreads(int threads) : before(omp_get_max_threads ? omp_get_max_threads() : 0) {
        if (before) omp_set_num_threads(threads);
    }
    ~OpenMPThreads() {
        if (before) omp_set_num_threads(before);
    }
    OpenMPThreads(const OpenMPThreads&) = delete;
    OpenMPThreads& operator=(const OpenMPThreads&) = delete;

  private:
    const int before;
};

inline int64_t user_kernel_scratch(const Attention& a) { return scratch ? scratch(a) : 0; }
inline int64_t user_kernel_backward_scratch(const AttentionGradient& a) {
    return backward_scratch ? backward_scratch(a) : 0;
}

// A library of one file has no pool.
void on_threads(int threads, const std::function<void(int)>& body) {
    std::exception_ptr failed;
    std::mutex mutex;
    const auto guarded = [&](int thread) {
        try {
            body(thread);
        } catch (...) {
            const std::lock_guard<std::mutex> held(mutex);
            failed = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(guarded, thread);
    guarded(0);
    for (std::thread& other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}

// A call of the file's attention, or of its backward pass.
template <class Call> void run(void (*kernel)(const Call&, float*), Call call, float* floats) {
    const OpenMPThreads limited(call.threads);
    call.pool = on_threads;
    kernel(call, floats);
}
