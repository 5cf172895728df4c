// on_threads() over PyTorch's pool. A library that uses it includes this once.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <exception>
#include <mutex>

#include "threads.h"

void on_threads(int threads, const std::function<void(int)>& body) {
    std::exception_ptr failed;  // kept: PyTorch's pool must not see it (boundary.h)
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
