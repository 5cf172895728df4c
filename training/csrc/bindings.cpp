// The training step as a Python class. It checks the arrays, admits one call at a time, and releases the GIL
// during the call. Only this file includes Python's headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/pool.h"
#include "buffer.h"
#include "training_step.h"

namespace py = pybind11;

namespace {

[[noreturn]] void refuse(const std::string& what, int64_t value, const std::string& must) {
    throw py::value_error(what + " is " + std::to_string(value) + "; it must be " + must);
}

// The numbers of an array of `count` ones. The array must outlive the pointer.
template <class Number>
Number* numbers(const py::buffer& array, const std::string& name, int64_t count) {
    const py::buffer_info view = array.request(!std::is_const_v<Number>);  // writable, or an error
    if (!view.item_type_is_equivalent_to<std::remove_const_t<Number>>())
        throw py::value_error(name + " has another type");
    if (view.size != count) refuse("the size of " + name, view.size, std::to_string(count));
    int64_t contiguous = sizeof(Number);
    for (int64_t i = view.ndim - 1; i >= 0; contiguous *= view.shape[i--])
        if (view.shape[i] != 1 && view.strides[i] != contiguous)
            throw py::value_error(name + " has gaps; it must be contiguous");
    return static_cast<Number*>(view.ptr);
}

// A parameter's arrays by name: value, gradient, average, and the state of its optimizer.
using Arrays = std::map<std::string, py::buffer>;

class TrainingStep {
  public:
    TrainingStep(std::vector<Arrays> arrays, int64_t batch, int64_t block_size, int64_t vocab_size,
                 int64_t n_layer, int64_t n_head, int64_t n_embd, int64_t br, int64_t bc, int threads,
                 double clip, double muon_rate, double adam_rate, double position_rate, double weight_decay,
                 double momentum, std::pair<double, double> betas, double epsilon)
        : kept(std::move(arrays)) {
        const std::pair<const char*, int64_t> sizes[] = {{"batch", batch},
                                                         {"block_size", block_size},
                                                         {"vocab_size", vocab_size},
                                                         {"n_layer", n_layer},
                                                         {"n_head", n_head},
                                                         {"n_embd", n_embd},
                                                         {"br", br},
                                                         {"bc", bc},
                                                         {"threads", threads}};
        for (const auto& [name, size] : sizes)
            if (size < 1) refuse(name, size, "at least 1");
        if (n_embd % n_head) refuse("n_embd", n_embd, "a multiple of n_head=" + std::to_string(n_head));
        step.sizes = {batch, block_size, vocab_size, n_embd, n_head, n_layer, br, bc, threads};
        step.settings = {clip,     muon_rate,   adam_rate,    position_rate, weight_decay,
                         momentum, betas.first, betas.second, epsilon};
        const std::vector<training::Shape> shapes = training::shapes(step.sizes);
        if (kept.size() != shapes.size())
            refuse("the number of parameters", static_cast<int64_t>(kept.size()),
                   std::to_string(shapes.size()));
        for (size_t i = 0; i < shapes.size(); i++) step.parameters.push_back(parameter(i, shapes[i]));
        scratch = Buffer(training::scratch_floats(step.sizes));
        step.scratch = scratch;
    }

    std::pair<float, float> gradients(const py::buffer& array) {
        const training::Sizes& s = step.sizes;
        const int64_t count = s.B * (s.T + 1);
        const int64_t* const tokens = numbers<const int64_t>(array, "tokens", count);
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        for (int64_t i = 0; i < count; i++)
            if (tokens[i] < 0 || tokens[i] >= s.V)
                refuse("a token", tokens[i], "from 0 to " + std::to_string(s.V - 1));
        const training::Result result = step.gradients(tokens);
        return {result.loss, result.norm};
    }

    void update(double fraction, double average) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        step.update(fraction, average);
    }

    py::dict take_seconds() {
        std::array<double, training::KINDS> seconds{};
        {
            const py::gil_scoped_release unlocked;
            const std::lock_guard<std::mutex> one(mutex);
            std::swap_ranges(seconds.begin(), seconds.end(), step.seconds);
        }
        py::dict taken;
        for (int kind = 0; kind < training::KINDS; kind++) taken[training::KIND_NAMES[kind]] = seconds[kind];
        return taken;
    }

  private:
    training::Parameter parameter(size_t i, const training::Shape& shape) const {
        const auto take = [&](const char* name, int64_t count) {
            const auto found = kept[i].find(name);
            const std::string which = std::string(name) + " of parameter " + std::to_string(i);
            if (found == kept[i].end()) throw py::value_error("there is no " + which);
            return numbers<float>(found->second, which, count);
        };
        const int64_t n = shape.count;
        training::Parameter p{shape,   take("value", n), take("gradient", n), take("average", n), nullptr,
                              nullptr, nullptr};
        if (shape.rows > 0) {
            p.first = take("momentum", n);
        } else {
            p.first = take("exp_avg", n), p.second = take("exp_avg_sq", n), p.updates = take("step", 1);
        }
        return p;
    }

    std::vector<Arrays> kept;
    training::TrainingStep step{};
    Buffer scratch;
    std::mutex mutex;
};

}  // namespace

PYBIND11_MODULE(training_step, m) {
    using py::arg;
    py::class_<TrainingStep>(m, "TrainingStep", py::module_local())
        .def(py::init<std::vector<Arrays>, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                      int64_t, int, double, double, double, double, double, double, std::pair<double, double>,
                      double>(),
             arg("parameters"), py::kw_only(), arg("batch"), arg("block_size"), arg("vocab_size"),
             arg("n_layer"), arg("n_head"), arg("n_embd"), arg("br"), arg("bc"), arg("threads"), arg("clip"),
             arg("muon_rate"), arg("adam_rate"), arg("position_rate"), arg("weight_decay"), arg("momentum"),
             arg("betas"), arg("epsilon"))
        .def("gradients", &TrainingStep::gradients, arg("tokens"),
             "Write the clipped gradients for tokens (B, T + 1); returns the loss and the norm.")
        .def("update", &TrainingStep::update, arg("fraction"), arg("average"),
             "Step both optimizers by this fraction of the learning rates, and the averages.")
        .def("take_seconds", &TrainingStep::take_seconds,
             "Each kind's seconds of all threads since the last call.");
}
