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
#include "training/csrc/training_step.h"

namespace {

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
    s.Br = random.one_in(2) ? 192 : random.from(1, 250), s.Bc = random.one_in(2) ? 256 : random.from(1, 250);
    s.threads = static_cast<int>(random.from(1, threads));
    c.clip = random.one_in(2) ? 1e-3f : 1e3f;
    set_running(seed, "B ", s.B, ", T ", s.T, ", V ", s.V, ", C ", s.C, ", H ", s.H, ", L ", s.L, ", Br ", s.Br,
                ", Bc ", s.Bc, ", threads ", s.threads, ", clip ", c.clip);
    return c;
}

// One tensor for each parameter, between guard pages.
using Tensors = std::vector<std::unique_ptr<Guarded>>;

Tensors tensors(const training::Sizes& s, Random& random) {
    Tensors all;
    for (const training::Shape& shape : training::shapes(s))
        all.push_back(std::make_unique<Guarded>(shape.count, random));
    return all;
}

struct Stepped {
    std::vector<float> numbers;  // of all tensors, and the loss and the norm
    std::string wrong;
};

// Two steps from the weights and tokens of a seed.
Stepped run(const Case& c, int threads, Random& memory) {
    training::Sizes s = c.sizes;
    s.threads = threads;
    s.pool = on_new_threads;
    Random random(c.seed);
    enum { VALUES, GRADIENTS, AVERAGES, FIRST, SECOND, STATES };
    constexpr const char* NAMES[] = {"parameter", "gradient", "average", "momentum", "square"};
    Tensors states[STATES];
    for (int state = 0; state < STATES; state++) {
        states[state] = tensors(s, memory);
        for (const auto& t : states[state])
            for (int64_t i = 0; i < t->n && state != GRADIENTS; i++)
                t->data[i] = state == VALUES ? 0.3f * random.normal() : 0.0f;
    }
    std::vector<int64_t> tokens(static_cast<size_t>(s.B * (s.T + 1)));
    for (int64_t& token : tokens) token = random.from(0, s.V - 1);

    Guarded scratch(training::scratch_floats(s), memory);
    const training::Settings settings{
        c.clip, 0.01, 0.01, 0.01, 0.1, 0.95, 0.9, 0.99, 1e-8, {3.4445, -4.7750, 2.0315}, 1e-7};
    training::TrainingStep step{s, settings, {}, scratch.data};
    const std::vector<training::Shape> shapes = training::shapes(s);
    std::vector<float> updates(shapes.size());
    for (size_t i = 0; i < shapes.size(); i++) {
        const auto of = [&](int state) { return states[state][i]->data; };
        const bool muon = shapes[i].rows > 0;
        step.parameters.push_back({shapes[i], of(VALUES), of(GRADIENTS), of(AVERAGES), of(FIRST),
                                   muon ? nullptr : of(SECOND), muon ? nullptr : &updates[i]});
    }
    Stepped done{};
    training::Result result{};
    for (int count = 0; count < 2; count++) {
        std::fill_n(scratch.data, scratch.n, NAN);
        result = step.gradients(tokens.data());
        std::fill_n(scratch.data, scratch.n, NAN);
        step.update(1.0, 0.5);
    }
    if (!scratch.whole()) done.wrong += "; wrote beside the scratch";
    done.numbers = {result.loss, result.norm};
    for (int state = 0; state < STATES; state++)
        for (const auto& t : states[state]) {
            if (!t->whole()) done.wrong += std::string("; wrote beside a ") + NAMES[state];
            for (int64_t i = 0; i < t->n; i++) {
                const float x = t->data[i];
                done.numbers.push_back(x);
                if (!std::isfinite(x)) return {{}, std::string("; a number is not finite: ") + NAMES[state]};
            }
        }
    if (!std::isfinite(result.loss)) done.wrong += "; the loss is not finite";
    return done;
}

std::string attempt(uint64_t seed, int threads) {
    Random memory(seed);
    const Case c = draw(seed, memory, threads);
    const Stepped got = run(c, c.sizes.threads, memory);
    if (c.sizes.threads == 1 || !got.wrong.empty()) return got.wrong;
    return same(got.numbers, run(c, 1, memory).numbers) ? "" : "; a bit depends on the threads";
}

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, attempt); }
