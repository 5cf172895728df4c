// What a program of generated cases is at, printed when it ends badly: by a sanitizer, or by a page that nobody
// may touch.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstring>

#ifdef __linux__  // elsewhere a sanitizer's end is silent about the case
extern "C" void __sanitizer_set_death_callback(void (*)()) __attribute__((weak));
#endif

inline char running[512] = "nothing yet\n";

inline void print_running() {
    if (write(STDERR_FILENO, running, std::strlen(running)) < 0) _exit(3);
}

// Prints, then lets the access fail again, under the handler that was there before.
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
