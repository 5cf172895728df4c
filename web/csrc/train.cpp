// Training for a page: the native training step on one thread, over a batch that JavaScript chooses.
#include <numeric>
#include <vector>

#include "buffer.h"
#include "initial.h"
#include "page.h"
#include "training/csrc/training_step.h"

namespace {

// All parameters' floats lie in their order: values, gradients, averages, the optimizers' states.
struct Training {
    training::TrainingStep step;
    Buffer memory, updates, scratch;
    float* averages;
    int64_t floats;  // of the parameters
    double place;    // of the first window, a share of the text

    Training(const training::Sizes& sizes, const training::Settings& settings, uint64_t seed) {
        step.sizes = sizes;
        step.settings = settings;
        const std::vector<training::Shape> shapes = training::shapes(sizes);
        floats = std::accumulate(shapes.begin(), shapes.end(), int64_t{0},
                                 [](int64_t sum, const training::Shape& shape) { return sum + shape.count; });
        memory = Buffer(5 * floats);
        updates = Buffer(shapes.size());
        scratch = Buffer(training::scratch_floats(sizes), true);
        step.scratch = scratch;
        averages = memory + 2 * floats;
        float* at = memory;
        for (size_t i = 0; i < shapes.size(); i++) {
            const bool muon = shapes[i].rows > 0;
            step.parameters.push_back({shapes[i], at, at + floats, at + 2 * floats, at + 3 * floats,
                                       muon ? nullptr : at + 4 * floats, muon ? nullptr : updates + i});
            at += shapes[i].count;
        }
        place = training::begin_values(sizes, step.parameters, seed);
    }
};

}  // namespace

EXPORT(open_training)
Training* page_open_training(int32_t B, int32_t T, int32_t V, int32_t C, int32_t H, int32_t L, int32_t br,
                             int32_t bc, uint64_t seed, const training::Settings* settings) {
    return new Training({B, T, V, C, H, L, br, bc, /* threads */ 1}, *settings, seed);
}

EXPORT(training_place) double page_training_place(const Training* training) { return training->place; }

// The averages of the parameters, and how many floats they are.
EXPORT(averages) const float* page_averages(const Training* training) { return training->averages; }
EXPORT(parameters) int32_t page_parameters(const Training* training) {
    return static_cast<int32_t>(training->floats);
}

// A training step on tokens (B, T + 1): its loss before the update. fraction: of the peak rates.
EXPORT(training_step)
double page_training_step(Training* training, const int64_t* tokens, double fraction, double average) {
    const float loss = training->step.gradients(tokens).loss;
    training->step.update(fraction, average);
    return static_cast<double>(loss);
}

// The sum of the first `rows` rows' losses by the averages, for tokens (B, T + 1).
EXPORT(training_loss)
double page_training_loss(Training* training, const int64_t* tokens, int32_t rows) {
    const Buffer losses(training->step.sizes.rows(), true);
    training->step.losses(tokens, losses);
    return std::accumulate(losses + 0, losses + rows, 0.0);
}
