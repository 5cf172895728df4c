// The training step as a Python class: it checks the arrays' sizes, admits one call at a time, and releases the
// GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/boundary.h"
#include "buffer.h"
#include "model/csrc/refuse.h"
#include "model/csrc/weights.h"
#include "training_step.h"

namespace py = pybind11;

namespace {

// The numbers of a contiguous array of `count` ones. The array must outlive the pointer.
template <class Number> Number* numbers(const py::buffer_info& view, const std::string& name, int64_t count) {
    const int64_t bytes = view.size * view.itemsize, expected = count * int64_t{sizeof(Number)};
    if (bytes != expected) refuse(("the size of " + name).c_str(), bytes, std::to_string(expected));
    return static_cast<Number*>(view.ptr);
}

// A parameter's arrays by name: value, gradient, average, and the state of its optimizer.
using Arrays = std::map<std::string, py::buffer>;

class TrainingStep {
    // body(), without the GIL, as the only call.
    template <class Body> auto alone(const Body& body) {
        const py::gil_scoped_release unlocked;
        const std::lock_guard<std::mutex> one(mutex);
        return body();
    }

  public:
    // options: the model's shape and sizes by their names, settings as a list in training_step.h's order.
    TrainingStep(std::vector<Arrays> arrays, const py::kwargs& options) : kept(std::move(arrays)) {
        const auto size = [&](const char* name) {
            const int64_t n = options[name].cast<int64_t>();
            check(name, n, 1, INT32_MAX);
            return n;
        };
        const ModelShape s{size("block_size"), size("vocab_size"), size("n_layer"), size("n_head"),
                           size("n_embd")};
        s.check();
        const int64_t B = size("batch"), br = size("br"), bc = size("bc");
        const int threads = static_cast<int>(size("threads"));
        const int64_t window = options["window"].cast<int64_t>();
        step.sizes = {B,  s.block_size, s.vocab_size, s.n_embd, s.n_head,          s.n_layer,
                      br, bc,           threads,      window,   on_pytorch_threads};
        constexpr size_t SETTINGS = sizeof(training::Settings) / sizeof(double);
        const auto settings = options["settings"].cast<std::array<double, SETTINGS>>();
        std::memcpy(&step.settings, settings.data(), sizeof step.settings);
        const std::vector<training::Shape> shapes = training::shapes(step.sizes);
        for (size_t i = 0; i < shapes.size(); i++) step.parameters.push_back(parameter(i, shapes[i]));
        scratch = Buffer(training::scratch_floats(step.sizes));
        step.scratch = scratch;
    }

    std::pair<float, float> gradients(const py::buffer& array) {
        const training::Sizes& s = step.sizes;
        const int64_t count = s.B * (s.T + 1);
        const py::buffer_info view = array.request();
        const int64_t* const tokens = numbers<const int64_t>(view, "tokens", count);
        return alone([&] {
            for (int64_t i = 0; i < count; i++) check("a token", tokens[i], 0, s.V - 1);
            const training::Result result = step.gradients(tokens);
            return std::pair(result.loss, result.norm);
        });
    }

    void update(double fraction, double average) {
        alone([&] { step.update(fraction, average); });
    }

    std::map<std::string, double> take_seconds() {
        return alone([&] { return std::exchange(step.seconds, {}); });
    }

  private:
    training::Parameter parameter(size_t i, const training::Shape& shape) const {
        const auto take = [&](const char* name, int64_t count) {
            return numbers<float>(kept[i].at(name).request(true), name, count);
        };
        const int64_t n = shape.count;
        training::Parameter p{shape,   take("value", n), take("gradient", n), take("average", n), nullptr,
                              nullptr, nullptr};
        if (shape.rows > 0) {
            p.first = take("momentum", n);
        } else {
            p.first = take("exp_avg", n);
            p.second = take("exp_avg_sq", n);
            p.updates = take("step", 1);
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
        .def(py::init<std::vector<Arrays>, py::kwargs>())
        .def("gradients", &TrainingStep::gradients, arg("tokens"),
             "Write the clipped gradients for tokens (B, T + 1); returns the loss and the norm.")
        .def("update", &TrainingStep::update, arg("fraction"), arg("average"),
             "Step both optimizers by this fraction of the learning rates, and the averages.")
        .def("take_seconds", &TrainingStep::take_seconds,
             "Each kind's seconds of all threads since the last call.");
}
