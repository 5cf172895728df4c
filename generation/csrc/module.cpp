// The decoder as a Python class. It checks arguments, admits one call at a time, and releases the GIL during
// the call. Only this file includes Python's headers.
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

[[noreturn]] void refuse(const std::string& what, int64_t value, const std::string& must) {
    throw py::value_error(what + " is " + std::to_string(value) + "; it must be " + must);
}

void check(const std::string& what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(what, value, "from " + std::to_string(low) + " to " + std::to_string(high));
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

constexpr int64_t MAX_SIZE = int64_t{1} << 31;
constexpr int64_t MAX_TOP = 5;  // alternatives of a token

class SafeDecoder {
  public:
    SafeDecoder(std::map<std::string, py::buffer> tensors, int64_t block_size, int64_t vocab_size,
                int64_t n_layer, int64_t n_head, int64_t n_embd, const std::string& precision,
                const std::string& kv_cache, const std::string& part, int64_t br, int64_t bc, int64_t slots,
                int64_t capacity, int threads, int64_t cache_bytes) {
        check("block_size", block_size, 1, MAX_SIZE);
        check("vocab_size", vocab_size, 1, MAX_SIZE);
        check("n_layer", n_layer, 1, MAX_SIZE);
        check("n_head", n_head, 1, MAX_SIZE);
        check("n_embd", n_embd, 1, MAX_SIZE);
        if (n_embd % n_head) refuse("n_embd", n_embd, "a multiple of n_head=" + std::to_string(n_head));
        const PrecisionRow& weights = find("precision", precision, PRECISIONS);
        const CachePrecisionRow& cache = find("kv_cache", kv_cache, CACHE_PRECISIONS);
        const Part* kernel = find_part(part);
        if (!kernel) throw py::value_error("part is " + part + "; it must be a part's operator");
        check("br", br, 1, INT64_MAX);
        check("bc", bc, 1, INT64_MAX);
        check("slots", slots, 1, MAX_SIZE);
        check("capacity", capacity, 1, block_size);
        check("threads", threads, 1, 1024);
        check("cache_bytes", cache_bytes, 1, INT64_MAX);

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
            if (view.size != floats) refuse("the size of " + name, view.size, std::to_string(floats));
            return static_cast<const float*>(view.ptr);
        };
        decoder = std::make_unique<Decoder>(ModelShape{block_size, vocab_size, n_layer, n_head, n_embd}, lookup,
                                            weights.precision, cache.precision, *kernel, br, bc, slots,
                                            capacity, threads, cache_bytes);
    }

    void prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check_prompt(slot, ids, top);
        decoder->prefill(slot, ids, continues, top);
    }

    void prefill_begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check_prompt(slot, ids, top);
        decoder->prefill_begin(slot, ids, continues, top);
    }

    bool prefill_some(int64_t slot, double seconds) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("slot", slot, 0, decoder->slots() - 1);
        if (!decoder->reading(slot)) refuse("slot", slot, "given a prompt by prefill_begin()");
        if (!(seconds >= 0)) throw py::value_error("seconds must be at least 0");
        return decoder->prefill_some(slot, seconds);
    }

    void prefill_drop(int64_t slot) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("slot", slot, 0, decoder->slots() - 1);
        decoder->prefill_drop(slot);
    }

    std::vector<std::vector<int64_t>> write(const std::vector<int64_t>& slots,
                                            const std::vector<std::vector<double>>& uniforms, double patience) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        for (const std::vector<double>& row : uniforms) {
            if (row.size() != slots.size())
                refuse("the number of uniforms", static_cast<int64_t>(row.size()),
                       "the number of slots, " + std::to_string(slots.size()));
            for (const double u : row)
                if (!(u >= 0 && u < 1)) throw py::value_error("a uniform is outside [0, 1)");
        }
        std::vector<char> taken(decoder->slots());
        for (const int64_t slot : slots) {
            check_room(slot, decoder->capacity());
            if (taken[slot]++) refuse("slot", slot, "named once");
        }
        return decoder->write(slots, uniforms, patience);
    }

    void copy(int64_t from, int64_t to) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("from", from, 0, decoder->slots() - 1);
        check("to", to, 0, decoder->slots() - 1);
        if (from != to) decoder->copy(from, to);
    }

    void push(int64_t slot, int64_t token) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check_room(slot, decoder->capacity() - 1);
        check("token", token, 0, decoder->shape().vocab_size - 1);
        decoder->push(slot, token);
    }

    std::vector<float> logits(int64_t slot) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("slot", slot, 0, decoder->slots() - 1);
        return decoder->logits(slot);
    }

    void set_sampling(int64_t slot, const py::object& given) {
        Sampling sampling;
        sampling.each([&](const char* name, double& number) {
            const py::object value = given.attr(name);
            if (!value.is_none()) number = value.cast<double>();
        });
        sampling.logit_bias = given.attr("logit_bias").cast<std::vector<std::pair<int64_t, double>>>();
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("slot", slot, 0, decoder->slots() - 1);
        for (const auto& [token, bias] : sampling.logit_bias)
            check("a token of logit_bias", token, 0, decoder->shape().vocab_size - 1);
        decoder->set_sampling(slot, sampling);
    }

    void set_logprobs(int64_t slot, int64_t top) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("slot", slot, 0, decoder->slots() - 1);
        check("top", top, -1, MAX_TOP);
        decoder->set_logprobs(slot, top);
    }

    using Logprob = std::tuple<int64_t, double, std::vector<std::pair<int64_t, double>>>;

    std::vector<Logprob> take_logprobs(int64_t slot) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        check("slot", slot, 0, decoder->slots() - 1);
        std::vector<Logprob> made;
        for (TokenLogprob& each : decoder->take_logprobs(slot))
            made.emplace_back(each.token, each.logprob, std::move(each.top));
        return made;
    }

    void record(bool on) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        decoder->record(on);
    }

    std::vector<std::tuple<const char*, int, int64_t, int64_t>> spans() {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        std::vector<std::tuple<const char*, int, int64_t, int64_t>> made;
        for (const Span& s : decoder->spans()) made.emplace_back(s.kind, s.thread, s.begin, s.end);
        return made;
    }

  private:
    void check_prompt(int64_t slot, const std::vector<int64_t>& ids, int64_t top) const {
        check("slot", slot, 0, decoder->slots() - 1);
        check("the number of ids", static_cast<int64_t>(ids.size()), 1, decoder->capacity());
        for (const int64_t id : ids) check("an id", id, 0, decoder->shape().vocab_size - 1);
        check("top", top, -1, MAX_TOP);
    }

    void check_room(int64_t slot, int64_t most) const {
        check("slot", slot, 0, decoder->slots() - 1);
        const int64_t length = decoder->length(slot);
        if (length == 0) refuse("slot", slot, "prefilled first");
        if (length > most) refuse("slot", slot, "prefilled again: it is full");
    }

    std::unique_ptr<Decoder> decoder;
    std::mutex mutex;
};

}  // namespace

PYBIND11_MODULE(decoder, m) {
    using py::arg;
    py::class_<SafeDecoder>(m, "Decoder", py::module_local())
        .def(
            py::init<std::map<std::string, py::buffer>, int64_t, int64_t, int64_t, int64_t, int64_t,
                     std::string, std::string, std::string, int64_t, int64_t, int64_t, int64_t, int, int64_t>(),
            arg("tensors"), py::kw_only(), arg("block_size"), arg("vocab_size"), arg("n_layer"), arg("n_head"),
            arg("n_embd"), arg("precision"), arg("kv_cache"), arg("part"), arg("br"), arg("bc"), arg("slots"),
            arg("capacity"), arg("threads"), arg("cache_bytes"))
        .def_static(
            "group_size",
            [](int64_t texts, double weight_bytes, double text_bytes, double cache_bytes, int64_t threads,
               int64_t rows) {
                return group_size({weight_bytes, text_bytes, cache_bytes, threads}, texts, rows);
            },
            arg("texts"), py::kw_only(), arg("weight_bytes"), arg("text_bytes"), arg("cache_bytes"),
            arg("threads"), arg("rows"))
        .def("prefill", &SafeDecoder::prefill, arg("slot"), arg("ids"), arg("continues") = false,
             arg("top") = -1)
        .def("prefill_begin", &SafeDecoder::prefill_begin, arg("slot"), arg("ids"), arg("continues") = false,
             arg("top") = -1)
        .def("prefill_some", &SafeDecoder::prefill_some, arg("slot"), arg("seconds"))
        .def("prefill_drop", &SafeDecoder::prefill_drop, arg("slot"))
        .def("write", &SafeDecoder::write, arg("slots"), arg("uniforms"), arg("patience"))
        .def("copy", &SafeDecoder::copy, arg("from"), arg("to"))
        .def("push", &SafeDecoder::push, arg("slot"), arg("token"))
        .def("logits", &SafeDecoder::logits, arg("slot"))
        .def("set_sampling", &SafeDecoder::set_sampling, arg("slot"), arg("sampling"))
        .def("set_logprobs", &SafeDecoder::set_logprobs, arg("slot"), arg("top"))
        .def("take_logprobs", &SafeDecoder::take_logprobs, arg("slot"))
        .def("record", &SafeDecoder::record, arg("on"))
        .def("spans", &SafeDecoder::spans);
}
