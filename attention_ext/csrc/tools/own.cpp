// The C interface of a library that holds a user's kernel, for own/kernel.py, which fills in an Attention.
#include "tools/own.h"

#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The floats of scratch that a call needs.
EXPORTED int64_t own_scratch_of(const Attention* call) { return own_scratch(*call); }

// Runs it. Returns what it threw, valid until the next call, or null.
EXPORTED const char* own_call(const Attention* call, float* floats) {
    static std::string why;
    const NoDenormals flushed;
    try {
        own_attention(*call, floats);
        return nullptr;
    } catch (const std::exception& error) {
        why = error.what();
    } catch (...) {
        why = "an exception";
    }
    return why.c_str();
}
