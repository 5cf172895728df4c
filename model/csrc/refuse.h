// How code without Python rejects an argument.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(__wasm__)
// WebAssembly has no exceptions: the page throws one of its own and drops this instance.
__attribute__((import_module("page"), import_name("refuse"))) extern "C" [[noreturn]] void refuse(const char*);
#else
[[noreturn]] inline void refuse(const char* why) { throw std::invalid_argument(why); }
#endif

[[noreturn]]
__attribute__((noinline)) inline void refuse(const char* what, int64_t value, const std::string& must) {
    refuse((std::string(what) + " is " + std::to_string(value) + "; it must be " + must).c_str());
}

__attribute__((noinline)) inline void check(const char* what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(what, value, "from " + std::to_string(low) + " to " + std::to_string(high));
}
