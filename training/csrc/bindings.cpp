// The operators of training: argument checks and registration, as operators.cpp does it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/boundary.h"
#include "model.h"
#include "update.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

using Tensors = std::vector<Tensor>;

constexpr int64_t MOST_THREADS = 1024;
constexpr size_t OF_LAYER = 6, OF_MODEL = 3;  // parameters: wte and wpe, the layers', ln_f

int threads() { return static_cast<int>(std::min<int64_t>(torch::stable::get_num_threads(), MOST_THREADS)); }

void checked(const Tensor& t, const std::string& name, ScalarType type, const char* what) {
    REQUIRE(t.is_cpu() && t.scalar_type() == type && t.is_contiguous(), name, " must be ", what,
            ", contiguous and on the CPU");
}

float* floats(const Tensor& t, const std::string& name) {
    checked(t, name, ScalarType::Float, "float32");
    return static_cast<float*>(t.mutable_data_ptr());
}

double* doubles(const Tensor& t, const std::string& name, int64_t count) {
    checked(t, name, ScalarType::Double, "float64");
    REQUIRE(t.numel() == count, name, " has ", t.numel(), " numbers; it must have ", count);
    return static_cast<double*>(t.mutable_data_ptr());
}

const int64_t* tokens(const Tensor& t, const std::string& name, int64_t count, int64_t V) {
    checked(t, name, ScalarType::Long, "int64");
    REQUIRE(t.numel() == count, name, " has ", t.numel(), " numbers; it must have ", count);
    const int64_t* const ids = static_cast<const int64_t*>(t.const_data_ptr());
    for (int64_t i = 0; i < count; i++)
        REQUIRE(ids[i] >= 0 && ids[i] < V, name, " has ", ids[i], "; each must be from 0 to ", V - 1);
    return ids;
}

// Scratch of at least this size, on huge pages where Linux has them and the memory is not in use yet: the rows
// of an activation lie on many pages, and page walks take 2 % of a step.
float* scratch_of(const Tensor& t, int64_t least) {
    REQUIRE(t.numel() >= least, "scratch has ", t.numel(), " numbers; it must have ", least);
    float* const data = floats(t, "scratch");
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + sizeof(float) * t.numel();
    const uintptr_t first = (begin + PAGE - 1) / PAGE * PAGE, last = end / PAGE * PAGE;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
    return data;
}

training::Sizes sizes_of(const Tensor& ids, const Tensors& parameters, int64_t heads) {
    REQUIRE(ids.dim() == 2 && ids.numel() > 0, "ids must have the shape (B, T), none of them 0");
    REQUIRE(parameters.size() >= OF_MODEL + OF_LAYER && (parameters.size() - OF_MODEL) % OF_LAYER == 0,
            "parameters has ", parameters.size(), " tensors; it must have 3, and 6 for each layer");
    const Tensor &wte = parameters[0], &wpe = parameters[1];
    REQUIRE(wte.dim() == 2 && wte.numel() > 0, "wte must have the shape (V, C)");
    training::Sizes s{};
    s.B = ids.size(0), s.T = ids.size(1), s.V = wte.size(0), s.C = wte.size(1), s.H = heads;
    s.L = static_cast<int64_t>((parameters.size() - OF_MODEL) / OF_LAYER);
    s.threads = threads();
    REQUIRE(heads >= 1 && s.C % heads == 0, "heads is ", heads, "; it must divide the width, ", s.C);
    REQUIRE(wpe.dim() == 2 && wpe.size(0) == s.T && wpe.size(1) == s.C, "ids has rows of ", s.T,
            " tokens; it must have as many as wpe has rows");
    return s;
}

template <class Float>
training::ModelOf<Float> model_of(const training::Sizes& s, const Tensors& tensors, const std::string& what) {
    const int64_t C = s.C;
    const int64_t counts[OF_LAYER] = {C, 3 * C * C, C * C, C, 4 * C * C, 4 * C * C};
    size_t next = 0;
    const auto take = [&](int64_t count) -> Float* {
        const Tensor& t = tensors[next++];
        REQUIRE(t.numel() == count, what, " ", next - 1, " has ", t.numel(), " numbers; it must have ", count);
        return floats(t, what);
    };
    training::ModelOf<Float> model{};
    model.wte = take(s.V * C), model.wpe = take(s.T * C);
    for (int64_t l = 0; l < s.L; l++) {
        Float* each[OF_LAYER];
        for (size_t i = 0; i < OF_LAYER; i++) each[i] = take(counts[i]);
        model.layers.push_back({each[0], each[1], each[2], each[3], each[4], each[5]});
    }
    model.ln_f = take(C);
    return model;
}

int64_t gradients_scratch(int64_t B, int64_t T, int64_t V, int64_t C, int64_t heads, int64_t layers,
                          int64_t with_threads) {
    for (const int64_t size : {B, T, V, C, heads, layers, with_threads})
        REQUIRE(size >= 1, "a size is ", size, "; it must be at least 1");
    return training::gradients_scratch({B, T, V, C, heads, layers, static_cast<int>(with_threads)});
}

// Writes loss and norm to `results`, and adds to `seconds`, one for each of training::KINDS.
void gradients(const Tensor& ids, const Tensor& targets, const Tensors& parameters, int64_t heads, double clip,
               const Tensors& grads, const Tensor& scratch, const Tensor& results, const Tensor& seconds) {
    const training::Sizes s = sizes_of(ids, parameters, heads);
    REQUIRE(grads.size() == parameters.size(), "gradients has ", grads.size(), " tensors; it must have ",
            parameters.size());
    const auto model = model_of<const float>(s, parameters, "parameter");
    const auto of_model = model_of<float>(s, grads, "gradient");
    std::vector<training::Run> runs;
    for (const Tensor& t : grads) runs.push_back({static_cast<float*>(t.mutable_data_ptr()), t.numel()});
    const training::Batch batch{tokens(ids, "ids", s.rows(), s.V), tokens(targets, "targets", s.rows(), s.V)};
    REQUIRE(results.numel() == 2, "results has ", results.numel(), " numbers; it must have 2");
    float* const to = floats(results, "results");
    const training::Result result = training::gradients(
        s, batch, model, of_model, runs, static_cast<float>(clip),
        scratch_of(scratch, training::gradients_scratch(s)), doubles(seconds, "seconds", training::KINDS));
    to[0] = result.loss, to[1] = result.norm;
}

// rows, cols: the shape of each parameter's matrices for Muon, 0 for AdamW; rates: learning rates.
std::vector<training::Parameter> parameters_of(const Tensors& values, const Tensors& gradients,
                                               const Tensors& first, const Tensors& second,
                                               const Tensors& averages, const std::vector<int64_t>& rows,
                                               const std::vector<int64_t>& cols,
                                               const std::vector<double>& rates) {
    const size_t count = values.size();
    for (const size_t size : {gradients.size(), first.size(), second.size(), averages.size(), rows.size(),
                              cols.size(), rates.size()})
        REQUIRE(size == count, "a list has ", size, " items; it must have ", count);
    std::vector<training::Parameter> all;
    for (size_t i = 0; i < count; i++) {
        training::Parameter p{};
        p.count = values[i].numel(), p.rows = rows[i], p.cols = cols[i], p.rate = rates[i];
        const bool matrix = p.rows > 0 && p.cols > 0;
        REQUIRE(matrix ? p.count % (p.rows * p.cols) == 0 : p.rows == 0 && p.cols == 0, "shape ", i, " is (",
                p.rows, ", ", p.cols, "); it must be that of matrices of ", p.count, " numbers");
        for (const Tensors* each : {&gradients, &first, &averages})
            REQUIRE((*each)[i].numel() == p.count, "tensor ", i, " has ", (*each)[i].numel(),
                    " numbers; it must have ", p.count);
        REQUIRE(second[i].numel() == (matrix ? 0 : p.count), "second ", i, " has ", second[i].numel(),
                " numbers; it must have ", matrix ? 0 : p.count);
        p.value = floats(values[i], "a parameter"), p.gradient = floats(gradients[i], "a gradient");
        p.first = floats(first[i], "first"), p.second = floats(second[i], "second");
        p.average = floats(averages[i], "an average");
        all.push_back(p);
    }
    return all;
}

int64_t update_scratch(const std::vector<int64_t>& rows, const std::vector<int64_t>& cols,
                       int64_t with_threads) {
    REQUIRE(rows.size() == cols.size(), "cols has ", cols.size(), " items; it must have ", rows.size());
    REQUIRE(with_threads >= 1, "threads is ", with_threads, "; it must be at least 1");
    std::vector<training::Parameter> all(rows.size());
    for (size_t i = 0; i < rows.size(); i++) all[i].rows = rows[i], all[i].cols = cols[i];
    training::Settings settings{};
    settings.threads = static_cast<int>(with_threads);
    return training::update_scratch(all, settings);
}

// Increments AdamW's step counters, one per parameter and all equal; returns the new count.
int64_t counted(const Tensors& steps) {
    int64_t number = 1;
    for (const Tensor& t : steps) {
        REQUIRE(t.numel() == 1, "a step has ", t.numel(), " numbers; it must have 1");
        number = static_cast<int64_t>(++*floats(t, "a step"));
    }
    REQUIRE(number >= 1, "a step is ", number - 1, "; it must be at least 0");
    return number;
}

void update(const Tensors& values, const Tensors& gradients, const Tensors& first, const Tensors& second,
            const Tensors& steps, const Tensors& averages, const std::vector<int64_t>& rows,
            const std::vector<int64_t>& cols, const std::vector<double>& rates, double weight_decay,
            double momentum, double beta_1, double beta_2, double epsilon, double average,
            const Tensor& scratch, const Tensor& seconds) {
    const auto all = parameters_of(values, gradients, first, second, averages, rows, cols, rates);
    training::Settings settings{weight_decay, momentum, beta_1, beta_2, epsilon, average, 1, threads()};
    float* const memory = scratch_of(scratch, training::update_scratch(all, settings));
    double* const times = doubles(seconds, "seconds", training::KINDS);
    settings.step = counted(steps);
    training::update(all, settings, memory, times);
}

}  // namespace

#define FRAGMENT(name, m) STABLE_TORCH_LIBRARY_FRAGMENT(name, m)
#define FRAGMENT_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

FRAGMENT(ATTENTION_EXT, m) {
    m.def("gpt_scratch(int B, int T, int V, int C, int heads, int layers, int threads) -> int");
    m.def(
        "gpt_gradients(Tensor ids, Tensor targets, Tensor[] parameters, int heads, float clip, Tensor(a!)[] "
        "gradients, Tensor(b!) scratch, Tensor(c!) results, Tensor(d!) seconds) -> ()");
    m.def("update_scratch(int[] rows, int[] cols, int threads) -> int");
    m.def(
        "gpt_update(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] first, Tensor(c!)[] second, "
        "Tensor(d!)[] steps, Tensor(e!)[] averages, int[] rows, int[] cols, float[] rates, float weight_decay, "
        "float momentum, float beta_1, float beta_2, float epsilon, float average, Tensor(f!) scratch, "
        "Tensor(g!) seconds) -> ()");
}

FRAGMENT_IMPL(ATTENTION_EXT, CPU, m) {
    m.impl("gpt_gradients", BOX(&gradients));
    m.impl("gpt_update", BOX(&update));
}

FRAGMENT_IMPL(ATTENTION_EXT, CompositeExplicitAutograd, m) {
    m.impl("gpt_scratch", BOX(&gradients_scratch));
    m.impl("update_scratch", BOX(&update_scratch));
}
