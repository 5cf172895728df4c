// The decoder as a Python class: one call at a time, during which the GIL is released. Only this file includes
// Python's headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "decoder.h"
#include "pace.h"
#include "threads.h"

namespace py = pybind11;

// The decoder has its own threads, and its calls of a kernel have one.
void on_threads(int threads, const std::function<void(int)>& body) {
    for (int thread = 0; thread < threads; thread++) body(thread);
}

namespace {

struct Shared : Decoder {
    using Decoder::Decoder;
    std::mutex mutex;
};

// A method as Python calls it.
template <class Result, class... Arguments>
auto alone(Result (Decoder::*method)(Arguments...)) {
    return [method](Shared& decoder, Arguments... arguments) -> Result {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(decoder.mutex);
        return (decoder.*method)(std::forward<Arguments>(arguments)...);
    };
}

// The row of this name in a table of precisions.
template <class Row, size_t N>
const Row& find(const std::string& what, const std::string& name, const Row (&table)[N]) {
    std::string names;
    for (const Row& row : table) {
        if (name == row.name) return row;
        names += (names.empty() ? "" : ", ") + std::string(row.name);
    }
    throw py::value_error(what + " is '" + name + "'; it must be one of " + names);
}

std::unique_ptr<Shared> open(const std::map<std::string, py::buffer>& tensors, int64_t block_size,
                             int64_t vocab_size, int64_t n_layer, int64_t n_head, int64_t n_embd,
                             const std::string& precision, const std::string& kv_cache, const std::string& part,
                             int64_t br, int64_t bc, int64_t slots, int64_t capacity, int threads,
                             int64_t cache_bytes) {
    const PrecisionRow& weights = find("precision", precision, PRECISIONS);
    const CachePrecisionRow& cache = find("kv_cache", kv_cache, CACHE_PRECISIONS);
    const Part* kernel = find_part(part);
    if (!kernel) throw py::value_error("part is " + part + "; it must be a part's operator");
    std::map<std::string, py::buffer_info> views;
    for (const auto& [name, tensor] : tensors) views.emplace(name, tensor.request());
    const py::gil_scoped_release unlocked;
    const Tensors lookup = [&](const std::string& name, int64_t floats) -> const float* {
        const auto found = views.find(name);
        if (found == views.end()) {
            if (name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0) return nullptr;
            throw py::value_error("tensors has no " + name);
        }
        const py::buffer_info& view = found->second;
        if (view.format != py::format_descriptor<float>::format())
            throw py::value_error(name + " has another type; it must be float32");
        int64_t contiguous = sizeof(float);
        for (int64_t i = view.ndim - 1; i >= 0; contiguous *= view.shape[i--])
            if (view.shape[i] != 1 && view.strides[i] != contiguous)
                throw py::value_error(name + " has gaps; it must be contiguous");
        if (view.size != floats)
            throw py::value_error("the size of " + name + " is " + std::to_string(view.size) + "; it must be " +
                                  std::to_string(floats));
        return static_cast<const float*>(view.ptr);
    };
    return std::make_unique<Shared>(ModelShape{block_size, vocab_size, n_layer, n_head, n_embd}, lookup,
                                    weights.precision, cache.precision, *kernel, br, bc, slots, capacity,
                                    threads, cache_bytes);
}

// sampling: a generation.sampling.Sampling.
void set_sampling(Shared& decoder, int64_t slot, const py::object& sampling, std::optional<int64_t> logprobs) {
    Sampling made;
    made.each([&](const char* name, double& number) {
        const py::object value = sampling.attr(name);
        if (!value.is_none()) number = value.cast<double>();
    });
    made.logit_bias = sampling.attr("logit_bias").cast<std::vector<std::pair<int64_t, double>>>();
    alone (&Decoder::set_sampling)(decoder, slot, made, logprobs);
}

py::list take_logprobs(Shared& decoder, int64_t slot) {
    py::list made;
    for (const TokenLogprob& each : alone (&Decoder::take_logprobs)(decoder, slot))
        made.append(py::make_tuple(each.token, each.logprob, each.top));
    return made;
}

py::list spans(Shared& decoder) {
    py::list made;
    for (const Span& s : alone (&Decoder::spans)(decoder))
        made.append(py::make_tuple(s.kind, s.thread, s.begin, s.end));
    return made;
}

}  // namespace

PYBIND11_MODULE(decoder, m) {
    using py::arg;
    py::class_<Shared>(m, "Decoder", py::module_local(), py::dynamic_attr())
        .def(py::init(&open), arg("tensors"), py::kw_only(), arg("block_size"), arg("vocab_size"),
             arg("n_layer"), arg("n_head"), arg("n_embd"), arg("precision"), arg("kv_cache"), arg("part"),
             arg("br"), arg("bc"), arg("slots"), arg("capacity"), arg("threads"), arg("cache_bytes"))
        .def_static(
            "group_size",
            [](int64_t texts, double weight_bytes, double text_bytes, double cache_bytes, int64_t threads,
               int64_t rows) {
                return group_size({weight_bytes, text_bytes, cache_bytes, threads}, texts, rows);
            },
            arg("texts"), py::kw_only(), arg("weight_bytes"), arg("text_bytes"), arg("cache_bytes"),
            arg("threads"), arg("rows"))
        .def("set_sampling", &set_sampling, arg("slot"), arg("sampling"), arg("logprobs") = py::none())
        .def("take_logprobs", &take_logprobs, arg("slot"))
        .def("begin", alone(&Decoder::begin), arg("slot"), arg("ids"), arg("continues") = false,
             arg("top") = py::none())
        .def("read", alone(&Decoder::read), arg("slot"),
             arg("seconds") = std::numeric_limits<double>::infinity())
        .def("drop", alone(&Decoder::drop), arg("slot"))
        .def("write", alone(&Decoder::write), arg("slots"), arg("uniforms"), arg("seconds") = py::none())
        .def("copy", alone(&Decoder::copy), arg("source"), arg("target"))
        .def("logits", alone(&Decoder::logits), arg("slot"))
        .def("record", alone(&Decoder::record), arg("on"))
        .def("spans", &spans);
}
