// REQUIRE throws inside this library, and BOX reports to PyTorch. No exception reaches libtorch: with another
// C++ runtime there (zig's libc++, a second libstdc++) it would end the process.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "threads.h"

inline std::string text_of(const std::string& text) { return text; }
inline std::string text_of(const char* text) { return text; }
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
std::string text_of(Number number) {
    return std::to_string(number);
}

// Like STD_TORCH_CHECK, without its std::ostringstream: two copies of libstdc++ disagree about its locale.
#define REQUIRE(condition, ...)                                             \
    do {                                                                    \
        if (!(condition)) throw std::invalid_argument(joined(__VA_ARGS__)); \
    } while (false)

template <class... Parts> std::string joined(const Parts&... parts) {
    return (std::string() + ... + text_of(parts));
}

using Boxed = void(StableIValue*, uint64_t, uint64_t);

// Why the kernel failed, valid until this thread's next error, or nullptr.
inline const char* error_of(Boxed* kernel, StableIValue* stack, uint64_t inputs, uint64_t outputs) noexcept {
    static thread_local std::string why;
    try {
        kernel(stack, inputs, outputs);
        return nullptr;
    } catch (const std::bad_alloc&) {
        return "there is not enough memory";
    } catch (const std::exception& error) {
        why = error.what();
        return why.c_str();
    } catch (...) {
        return "an operator failed";
    }
}

// libtorch throws the error itself, through this frame. The frame has nothing to destroy, so no code of this
// library's runtime runs during the unwinding.
template <Boxed* kernel> void guarded(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    if (const char* why = error_of(kernel, stack, inputs, outputs)) aoti_torch_check(false, "", "", 0, why);
}

// Like TORCH_BOX, for m.impl().
#define BOX(function) guarded<TORCH_BOX(function)>

constexpr int64_t ANY = -1;  // in a shape: any size from 1 on

inline bool has_shape(const torch::stable::Tensor& t, std::initializer_list<int64_t> shape) {
    const auto sizes = t.sizes();
    const auto fits = [](int64_t is, int64_t must) { return must == ANY ? is >= 1 : is == must; };
    return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(), fits);
}

// An uninitialised contiguous tensor on the device of another, or the CPU; faster than torch::stable::empty.
template <size_t n>
torch::stable::Tensor new_tensor(const int64_t (&size)[n], torch::headeronly::ScalarType type,
                                 const torch::stable::Tensor* beside = nullptr) {
    using torch::headeronly::ScalarType;
    int64_t stride[n];
    stride[n - 1] = 1;
    for (size_t i = n - 1; i > 0; i--) stride[i - 1] = stride[i] * size[i];
    const int32_t dtype = type == ScalarType::Float      ? aoti_torch_dtype_float32()
                          : type == ScalarType::BFloat16 ? aoti_torch_dtype_bfloat16()
                                                         : aoti_torch_dtype_float16();
    const bool on_cpu = !beside || beside->is_cpu();
    AtenTensorHandle handle = nullptr;
    const AOTITorchError error = aoti_torch_empty_strided(
        n, size, stride, dtype, on_cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(),
        on_cpu ? 0 : beside->get_device_index(), &handle);
    REQUIRE(error == AOTI_TORCH_SUCCESS,
            on_cpu ? "" : "CUDA out of memory: ", "there is not enough memory for ", size[0] * stride[0],
            " numbers");
    return torch::stable::Tensor(handle);
}

// PyTorch's pool, which must not see an exception either.
inline void on_pytorch_threads(int threads, const std::function<void(int)>& body) {
    std::exception_ptr failed;
    std::mutex mutex;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        try {
            for (int64_t thread = begin; thread < end; thread++) body(static_cast<int>(thread));
        } catch (...) {
            const std::lock_guard<std::mutex> held(mutex);
            failed = std::current_exception();
        }
    });
    if (failed) std::rethrow_exception(failed);
}
