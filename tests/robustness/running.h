// The generated case that a program is running. It is printed if a sanitizer or a guard page ends the program.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>

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
