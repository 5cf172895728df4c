// How code without Python rejects an argument.
#pragma once

#include <stdexcept>

#if defined(__wasm__)
// WebAssembly has no exceptions: the page throws one of its own and drops this instance.
__attribute__((import_module("page"), import_name("refuse"))) extern "C" [[noreturn]] void refuse(const char*);
#else
[[noreturn]] inline void refuse(const char* why) { throw std::invalid_argument(why); }
#endif
