// Generated cases for the training step, in memory between guard pages.
//
//   training SEED COUNT [THREADS]
//
// runs the cases of the seeds as kernels.cpp does: the gradients of a random model, then both optimizers. All
// scratch is NaN before, so that a number that is read before it is written shows. The results must be finite,
// and the same bits for any number of threads; tests/training/test_native.py compares them with float64.
#include <sys/mman.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "generated.h"
#include "training/csrc/model.h"
#include "training/csrc/update.h"

namespace {

constexpr int64_t OF_LAYER = 6;  // parameters

struct Case {
    uint64_t seed;
    training::Sizes sizes;
    float clip;
};

Case draw(uint64_t seed, Random& random, int threads) {
    Case c{};
    training::Sizes& s = c.sizes;
    c.seed = seed;
    do {
        s.B = random.from(1, 6), s.T = random.size(250), s.V = random.size(130);
        s.H = random.from(1, 4), s.C = s.H * random.size(40), s.L = random.from(1, 2);
    } while (s.B * s.T * s.L * s.C * (12 * s.C + s.V + s.T) > 4'000'000);
    s.threads = threads == 1 ? 1 : static_cast<int>(random.from(1, threads));
    c.clip = random.one_in(2) ? 1e-3f : 1e3f;
    return c;
}

void describe(const Case& c) {
    const training::Sizes& s = c.sizes;
    set_running(c.seed, "B ", s.B, ", T ", s.T, ", V ", s.V, ", C ", s.C, ", H ", s.H, ", L ", s.L,
                ", threads ", s.threads, ", clip ", c.clip);
}

// One tensor for each parameter, between guard pages.
using Tensors = std::vector<std::unique_ptr<Guarded>>;

std::vector<int64_t> counts(const training::Sizes& s) {
    std::vector<int64_t> all{s.V * s.C, s.T * s.C};
    for (int64_t l = 0; l < s.L; l++)
        for (const int64_t rows : {int64_t{1}, 3 * s.C, s.C, int64_t{1}, 4 * s.C, 4 * s.C})
            all.push_back(rows * s.C);
    all.push_back(s.C);
    return all;
}

Tensors tensors(const training::Sizes& s, Random& random) {
    Tensors all;
    for (const int64_t count : counts(s)) all.push_back(std::make_unique<Guarded>(count, random));
    return all;
}

template <class Float>
training::ModelOf<Float> model_of(const training::Sizes& s, const Tensors& t) {
    training::ModelOf<Float> model{};
    model.wte = t[0]->data, model.wpe = t[1]->data, model.ln_f = t.back()->data;
    for (int64_t l = 0; l < s.L; l++) {
        const size_t first = static_cast<size_t>(2 + OF_LAYER * l);
        const auto at = [&](size_t i) { return t[first + i]->data; };
        model.layers.push_back({at(0), at(1), at(2), at(3), at(4), at(5)});
    }
    return model;
}

std::vector<float> copied(const Tensors& tensors) {
    std::vector<float> all;
    for (const auto& t : tensors) all.insert(all.end(), t->data, t->data + t->n);
    return all;
}

std::string check(const char* what, const Tensors& tensors) {
    for (const auto& t : tensors)
        if (!t->whole()) return std::string("; wrote beside a ") + what;
    for (const float x : copied(tensors))
        if (!std::isfinite(x)) return std::string("; a ") + what + " is not finite";
    return "";
}

// The shape of the matrices of parameter i, of `count` numbers; (0, 0) for AdamW.
std::pair<int64_t, int64_t> shape_of(const training::Sizes& s, size_t i, int64_t count) {
    const bool in_layer = i >= 2 && i < static_cast<size_t>(2 + OF_LAYER * s.L);
    const size_t which = (i - 2) % static_cast<size_t>(OF_LAYER);
    if (!in_layer || which == 0 || which == 3) return {0, 0};
    if (which == 1) return {s.C, s.C};
    const int64_t cols = which == 5 ? 4 * s.C : s.C;
    return {count / cols, cols};
}

struct Stepped {
    std::vector<float> gradients, values, first, second, averages;
    float loss, norm;
    std::string wrong;
};

bool all_same(const Stepped& a, const Stepped& b) {
    return same(a.gradients, b.gradients) && same(a.values, b.values) && same(a.first, b.first) &&
           same(a.second, b.second) && same(a.averages, b.averages) && same(a.loss, b.loss) &&
           same(a.norm, b.norm);
}

// Two steps from the weights and tokens of a seed.
Stepped run(const Case& c, int threads, Random& memory) {
    training::Sizes s = c.sizes;
    s.threads = threads;
    Random random(c.seed);
    const Tensors values = tensors(s, memory), gradients = tensors(s, memory), first = tensors(s, memory),
                  second = tensors(s, memory), averages = tensors(s, memory);
    const auto each = [](const Tensors& tensors, const auto& number) {
        for (const auto& t : tensors)
            for (int64_t i = 0; i < t->n; i++) t->data[i] = number();
    };
    each(values, [&] { return 0.3f * random.normal(); });
    for (const Tensors* state : {&first, &second, &averages}) each(*state, [] { return 0.0f; });
    std::vector<int64_t> tokens(static_cast<size_t>(2 * s.rows()));
    for (int64_t& token : tokens) token = random.from(0, s.V - 1);

    std::vector<training::Run> runs;
    std::vector<training::Parameter> parameters;
    for (size_t i = 0; i < values.size(); i++) {
        runs.push_back({gradients[i]->data, gradients[i]->n});
        const auto [rows, cols] = shape_of(s, i, values[i]->n);
        parameters.push_back({values[i]->data, gradients[i]->data, first[i]->data,
                              rows ? nullptr : second[i]->data, averages[i]->data, values[i]->n, rows, cols,
                              0.01});
    }
    training::Settings settings{0.1, 0.95, 0.9, 0.99, 1e-8, 0.5, 1, threads};
    double seconds[training::KINDS] = {};
    Stepped done{};
    for (int step = 1; step <= 2; step++) {
        Guarded scratch(training::gradients_scratch(s), memory);
        const training::Result result =
            training::gradients(s, {tokens.data(), tokens.data() + s.rows()}, model_of<const float>(s, values),
                                model_of<float>(s, gradients), runs, c.clip, scratch.data, seconds);
        settings.step = step;
        Guarded more(training::update_scratch(parameters, settings), memory);
        training::update(parameters, settings, more.data, seconds);
        if (!scratch.whole() || !more.whole()) done.wrong += "; wrote beside the scratch";
        done.loss = result.loss, done.norm = result.norm;
    }
    done.wrong += check("parameter", values) + check("gradient", gradients) + check("momentum", first) +
                  check("square", second) + check("average", averages);
    double square = 0;
    done.gradients = copied(gradients);
    for (const float x : done.gradients) square += static_cast<double>(x) * static_cast<double>(x);
    const double clipped = std::min<double>(static_cast<double>(done.norm), static_cast<double>(c.clip));
    if (!(std::fabs(std::sqrt(square) - clipped) <= 1e-3 * clipped)) done.wrong += "; the norm is wrong";
    if (!(done.loss >= 0 && done.loss < 1e3f)) done.wrong += "; the loss is wrong";
    done.values = copied(values), done.first = copied(first), done.second = copied(second);
    done.averages = copied(averages);
    return done;
}

std::string attempt(const Case& c, Random& memory) {
    const Stepped got = run(c, c.sizes.threads, memory);
    if (c.sizes.threads == 1 || !got.wrong.empty()) return got.wrong;
    return all_same(got, run(c, 1, memory)) ? "" : "; a bit depends on the threads";
}

}  // namespace

int main(int argc, char** argv) {
    return run_seeds(argc, argv, [](uint64_t seed, int threads) {
        Random random(seed);
        const Case c = draw(seed, random, threads);
        describe(c);
        return attempt(c, random);
    });
}
