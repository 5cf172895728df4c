// What the programs of generated cases share: random numbers, memory between guard pages, threads, and the case
// that is running. It is printed if a sanitizer or a guard page ends the program.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

// New threads for each call: they share only what the kernels pass to them. The decoder has a team of its own.
inline void on_new_threads(int threads, const std::function<void(int)>& body) {
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(body, thread);
    body(0);
    for (std::thread& other : others) other.join();
}

// Sizes of vectors, panels, strips and tiles.
inline constexpr int64_t EDGES[] = {1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};
inline constexpr int64_t MOST = 300;

class Random {  // splitmix64: the same numbers with every compiler and library
  public:
    explicit Random(uint64_t seed) : state(seed) {}

    uint64_t bits() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int64_t from(int64_t least, int64_t most) {
        return least + static_cast<int64_t>(bits() % static_cast<uint64_t>(most - least + 1));
    }
    bool one_in(int64_t n) { return from(1, n) == 1; }
    template <class T, size_t N> const T& any(const T (&of)[N]) { return of[bits() % N]; }
    template <class T> T any(std::initializer_list<T> of) { return of.begin()[bits() % of.size()]; }
    double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    float normal() {
        double sum = -6;
        for (int i = 0; i < 12; i++) sum += uniform();
        return static_cast<float>(sum);
    }
    // One of EDGES, a neighbour of one, or any size.
    int64_t size(int64_t most) {
        const int64_t n = one_in(4) ? from(1, most) : any(EDGES) + from(-1, 1);
        return std::min(std::max<int64_t>(n, 1), most);
    }

  private:
    uint64_t state;
};

// n floats between two guard pages: directly after the first page, directly before the second, or some floats
// after the first. The floats and the gaps beside them are filled with a NaN of fixed bits.
class Guarded {
  public:
    Guarded(int64_t n, Random& random) : n(n) {
        const int64_t page = sysconf(_SC_PAGESIZE), floats = page / static_cast<int64_t>(sizeof(float));
        const int64_t at = random.from(0, 2), shift = at == 2 ? random.from(1, 17) : 0;
        inner = (n + shift + floats - 1) / floats * floats;
        bytes = static_cast<size_t>(inner * static_cast<int64_t>(sizeof(float)) + 2 * page);
        base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (base == MAP_FAILED) {
            std::perror("mmap");
            std::exit(3);
        }
        first = reinterpret_cast<float*>(static_cast<char*>(base) + page);
        for (int64_t i = 0; i < inner; i++) std::memcpy(first + i, &OURS, sizeof OURS);
        data = at == 0 ? first + inner - n : first + shift;
        protect(base, page, PROT_NONE), protect(first + inner, page, PROT_NONE);
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(base, bytes); }

    float* data;
    const int64_t n;

    void let(int access) { protect(first, inner * static_cast<int64_t>(sizeof(float)), access); }

    // Whether the gaps beside the floats are unchanged.
    bool whole() const {
        for (int64_t i = 0; i < inner; i++)
            if ((first + i < data || first + i >= data + n) && std::memcmp(first + i, &OURS, sizeof OURS) != 0)
                return false;
        return true;
    }

  private:
    static constexpr uint32_t OURS = 0x7fc5a5a5;
    void* base;
    float* first;
    int64_t inner;
    size_t bytes;

    static void protect(void* at, int64_t length, int access) {
        if (mprotect(at, static_cast<size_t>(length), access) == 0) return;
        std::perror("mprotect");
        std::exit(3);
    }
};

inline bool same(float a, float b) {
    return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (!same(a[i], b[i])) return false;
    return true;
}

#ifdef __linux__  // elsewhere a sanitizer does not print the case
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));
#endif

inline char running[512] = "nothing yet\n";

inline void print_running() {
    if (write(STDERR_FILENO, running, std::strlen(running)) < 0) _exit(3);
}

// Prints, then restores the earlier handler, under which the access fails again.
inline struct sigaction handlers[NSIG];
inline void on_signal(int number) {
    print_running();
    sigaction(number, &handlers[number], nullptr);
}

inline void print_at_the_end() {
#ifdef __linux__
    if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(print_running);
#endif
    struct sigaction action{};
    action.sa_handler = on_signal;
    for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGABRT})
        sigaction(number, &action, &handlers[number]);
}

// Sets `running` to the seed and these words and numbers.
template <class... Words> void set_running(uint64_t seed, const Words&... words) {
    std::ostringstream text;
    text << "seed " << seed << ": ";
    (text << ... << words) << '\n';
    std::snprintf(running, sizeof running, "%s", text.str().c_str());
}

// The program PROGRAM SEED COUNT [THREADS]: runs the cases of the seeds SEED .. SEED + COUNT - 1 with at most
// THREADS threads, by default 1. attempt(seed, threads) says what is wrong, or nothing. Prints the description
// of a case that fails; PROGRAM SEED 1 THREADS repeats it. Returns the exit code.
inline int run_seeds(int argc, char** argv, const std::function<std::string(uint64_t, int)>& attempt) {
    if (argc != 3 && argc != 4) {
        std::fprintf(stderr, "usage: %s SEED COUNT [THREADS]\n", argv[0]);
        return 2;
    }
    const uint64_t seed = std::strtoull(argv[1], nullptr, 10), count = std::strtoull(argv[2], nullptr, 10);
    const int threads = argc == 4 ? std::atoi(argv[3]) : 1;
    print_at_the_end();
    int wrong = 0;
    for (uint64_t n = seed; n < seed + count && wrong < 10; n++) {
        const std::string what = attempt(n, threads);
        if (what.empty()) continue;
        wrong++;
        print_running();
        std::fprintf(stderr, "    %s\n", what.c_str());
    }
    std::printf("%s cases, %d wrong\n", argv[2], wrong);
    return wrong != 0;
}
