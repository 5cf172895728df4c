// The pool that the kernels share their work over.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

#include "denormals.h"

// Runs body(thread) for thread = 0 .. threads - 1, concurrently where the pool allows it. Each program that
// links the kernels defines it; bindings/operators.cpp does with PyTorch's pool.
void on_threads(int threads, const std::function<void(int)>& body);

// body(item, thread) for each item of 0 .. items - 1, handed out in order to whichever thread is free.
template <class Body>
void for_each_item(int64_t items, int threads, const Body& body) {
    if (items == 1 || threads == 1) {
        const NoDenormals flushed;
        for (int64_t item = 0; item < items; item++) body(item, 0);
        return;
    }
    std::atomic<int64_t> next{0};
    on_threads(static_cast<int>(std::min<int64_t>(items, threads)), [&](int thread) {
        const NoDenormals flushed;
        for (int64_t item = next++; item < items; item = next++) body(item, thread);
    });
}
