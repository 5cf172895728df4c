// The case that a program of generated cases is running. It is printed if a sanitizer or a guard page ends the
// program.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstring>

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
