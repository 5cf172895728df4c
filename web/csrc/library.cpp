// The part of the C++ library that the kernels call and no header holds, but for two files of zig's
// (web/build.py). To compile that library as a whole takes zig longer than the kernels.
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <new>

namespace {

void* checked(void* memory) {
    if (!memory) std::abort();  // the page says that the kernels stopped
    return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return checked(std::malloc(bytes)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    const auto boundary = static_cast<std::size_t>(alignment);
    return checked(std::aligned_alloc(boundary, (bytes + boundary - 1) / boundary * boundary));
}
// std::stable_sort() does without this memory, if need be.
const std::nothrow_t std::nothrow{};
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

// libc++'s, for what must not happen, such as a vector that is longer than memory.
void std::__libcpp_verbose_abort(const char*, ...) noexcept { std::abort(); }

std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time_point(std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec));
}
