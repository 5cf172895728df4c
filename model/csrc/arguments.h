// What Python gives to the decoder and to the training step. Only the files that bind those include this one.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>
#include <string>
#include <type_traits>

#include "refuse.h"
#include "weights.h"

namespace py = pybind11;

// body(), without the GIL, as the only call that holds `mutex`.
template <class Body>
auto alone(std::mutex& mutex, const Body& body) {
    const py::gil_scoped_release unlocked;
    const std::lock_guard<std::mutex> one(mutex);
    return body();
}

inline ModelShape shape_of(const py::kwargs& options) {
    const auto size = [&](const char* name) { return options[name].cast<int64_t>(); };
    return {size("block_size"), size("vocab_size"), size("n_layer"), size("n_head"), size("n_embd")};
}

// The numbers of an array of `count` ones. The array must outlive the pointer.
template <class Number>
Number* numbers(const py::buffer_info& view, const std::string& name, int64_t count) {
    if (!view.item_type_is_equivalent_to<std::remove_const_t<Number>>())
        refuse((name + " has another type").c_str());
    if (view.size != count) refuse(("the size of " + name).c_str(), view.size, std::to_string(count));
    int64_t contiguous = sizeof(Number);
    for (int64_t i = view.ndim - 1; i >= 0; contiguous *= view.shape[i--])
        if (view.shape[i] != 1 && view.strides[i] != contiguous)
            refuse((name + " has gaps; it must be contiguous").c_str());
    return static_cast<Number*>(view.ptr);
}
