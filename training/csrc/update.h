// A step of the optimizers: Muon for matrices, AdamW for the rest, and the average of the weights.
#pragma once

#include <cstdint>
#include <vector>

namespace training {

// A parameter with its gradient, its optimizer's state and its average.
struct Parameter {
    float* value;
    const float* gradient;
    float *first, *second;  // Muon: momentum and null; AdamW: averages of the gradient and of its square
    float* average;
    int64_t count;       // numbers
    int64_t rows, cols;  // Muon: the shape of each of its matrices; AdamW: 0
    double rate;
};

struct Settings {
    double weight_decay, momentum, beta_1, beta_2, epsilon;
    double average;  // decay of the average of the weights
    int64_t step;    // AdamW's, from 1 on
    int threads;
};

// The scratch of update(), in floats.
int64_t update_scratch(const std::vector<Parameter>&, const Settings&);

// Steps all parameters and updates their averages. Adds to seconds[KINDS].
void update(const std::vector<Parameter>&, const Settings&, float* scratch, double* seconds);

}  // namespace training
