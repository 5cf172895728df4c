// The C interface of a library that holds a user's kernel, for user_kernel.py, which fills in the structs.
#include "tools/user_kernel.h"

#include <string>

#include "threads.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// Runs it. Returns what it threw, valid until the next call, or null.
template <class Call> const char* caught(void (*kernel)(const Call&, float*), const Call& call, float* floats) {
    static std::string why;
    const NoDenormals flushed;
    try {
        run(kernel, call, floats);
        return nullptr;
    } catch (const std::exception& error) {
        why = error.what();
    } catch (...) {
        why = "an exception";
    }
    return why.c_str();
}

}  // namespace

// Whether the file defines the attention, or the backward pass.
EXPORTED bool user_kernel_defines(bool backward) {
    return backward ? attention_backward != nullptr : attention != nullptr;
}

// The size of their struct, which Python compares.
EXPORTED int user_kernel_bytes(bool backward) {
    return backward ? sizeof(AttentionGradient) : sizeof(Attention);
}

// The floats of scratch that a call needs, and the call.
EXPORTED int64_t user_kernel_scratch_of_call(const Attention* call) { return user_kernel_scratch(*call); }
EXPORTED const char* user_kernel_call(const Attention* call, float* floats) {
    return caught(attention, *call, floats);
}

// The same of a backward pass.
EXPORTED int64_t user_kernel_scratch_of_backward(const AttentionGradient* call) {
    return user_kernel_backward_scratch(*call);
}
EXPORTED const char* user_kernel_backward(const AttentionGradient* call, float* floats) {
    return caught(attention_backward, *call, floats);
}
