// Muon (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon) and AdamW (Loshchilov & Hutter 2017,
// arXiv:1711.05101), one matrix or one chunk of the other parameters per piece, over all threads.
//
// Muon's direction is the result of five iterations X <- a X + b (X X^T) X + c (X X^T)^2 X from the momentum,
// divided by its norm. Some are done on the smaller A = X X^T alone, where products are symmetric:
//
//   P <- a I + b A + c A^2;  Q <- P Q;  A <- P (P A)          then X <- Q X, once
//
// Rounding loses A's smallest singular values, and iterations enlarge the error: three on one A keep it at
// 1e-5 of the largest number. One piece does all of a matrix's update, in the caches of one core.
#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "layers.h"
#include "phases.h"
#include "simd/portable.h"
#include "training_step.h"

namespace training {
namespace {

constexpr int64_t WIDE = 2;      // from this ratio of columns to rows on, iterations are done on A
constexpr int64_t CHUNK = 4096;  // numbers in a piece of AdamW
constexpr int64_t DEPTH = 256;   // terms of a sum at a time: half a panel of this many rows stays in L1

// The workspace of a matrix (rows, cols) with the smaller side n: X^T (m, n), its successor, and five n x n.
struct Workspace {
    int64_t n, m;
    simd::Matrix x, next_x, A, square, P, Q, next;

    Workspace(const Shape& s, Scratch& scratch) : n(std::min(s.rows, s.cols)), m(std::max(s.rows, s.cols)) {
        for (simd::Matrix* each : {&x, &next_x})  // or x itself (n, m)
            *each = {scratch.take(std::max(m * row_stride(n), n * row_stride(m))), row_stride(n)};
        for (simd::Matrix* each : {&A, &square, &P, &Q, &next}) *each = scratch.matrix(n, n);
    }

    // The numbers of iterations on one A.
    std::vector<int> stages() const { return m >= WIDE * n ? std::vector{2, 3} : std::vector{1, 1, 1, 1, 1}; }
};

// C <- X Y (n, n), which is symmetric: the lower half, and its copy; Y (depth, n).
void symmetric_product(simd::Matrix C, const simd::Strided& X, simd::ConstMatrix Y, int64_t n, int64_t depth) {
    const int64_t width = 2 * portable::lanes();
    for (int64_t c = 0; c < n; c += width) {
        const int64_t cols = std::min(width, n - c);
        multiply_some({C.data + c * C.ld + c, C.ld}, {X.data + c * X.row_stride, X.row_stride, X.depth_stride},
                      {Y.data + c, Y.ld}, n - c, cols, depth, DEPTH);
        if (c + width < n)
            portable::transpose({C.data + c * C.ld + c + width, C.ld}, {C.data + (c + width) * C.ld + c, C.ld},
                                n - c - width, cols, 1.0f);
    }
}

void symmetric_product(simd::Matrix C, simd::Matrix X, simd::Matrix Y, int64_t n) {
    symmetric_product(C, {X.data, X.ld, 1}, {Y.data, Y.ld}, n, n);
}

// C <- X Y; X (rows, depth), Y (depth, cols)
void product(simd::Matrix C, simd::Matrix X, simd::Matrix Y, int64_t rows, int64_t cols, int64_t depth) {
    for (int64_t c = 0; c < cols; c += portable::panel())
        portable::multiply({C.data + c, C.ld}, {X.data, X.ld, 1}, {Y.data + c, Y.ld}, rows,
                           std::min(portable::panel(), cols - c), depth);
}

// Q after `iterations` on A, which is overwritten.
void polynomial(Workspace& w, int iterations, const double* quintic) {
    const auto first = static_cast<float>(quintic[0]);
    const auto third = static_cast<float>(quintic[1]);
    const auto fifth = static_cast<float>(quintic[2]);
    const int64_t n = w.n;
    for (int i = 0; i < iterations; i++) {
        symmetric_product(w.square, w.A, w.A, n);
        for (int64_t r = 0; r < n; r++) {
            float* const p = w.P.data + r * w.P.ld;
            const float *const a = w.A.data + r * w.A.ld, *const a2 = w.square.data + r * w.square.ld;
            for (int64_t c = 0; c < n; c++) p[c] = third * a[c] + fifth * a2[c];
            p[r] += first;
        }
        if (i + 1 < iterations) {
            symmetric_product(w.square, w.P, w.A, n);
            symmetric_product(w.A, w.P, w.square, n);
        }
        if (i == 0) {
            std::swap(w.P, w.Q);
        } else {
            symmetric_product(w.next, w.P, w.Q, n);
            std::swap(w.next, w.Q);
        }
    }
}

// Replaces w.x, which is not 0, by about the nearest orthogonal matrix.
void orthogonalize(Workspace& w, float norm, const Settings& settings) {
    const float factor = 1 / (norm + static_cast<float>(settings.least_norm));
    for (int64_t r = 0; r < w.m; r++) portable::scale_row(w.x.data + r * w.x.ld, w.n, factor);
    for (const int iterations : w.stages()) {
        symmetric_product(w.A, {w.x.data, 1, w.x.ld}, {w.x.data, w.x.ld}, w.n, w.m);
        polynomial(w, iterations, settings.quintic);
        product(w.next_x, w.x, w.Q, w.m, w.n, w.n);
        std::swap(w.x, w.next_x);
    }
}

// What every parameter's update takes.
struct Update {
    const Settings& settings;
    double fraction, average;

    float decayed(double rate) const { return static_cast<float>(1 - rate * settings.weight_decay); }
    float toward() const { return static_cast<float>(1 - average); }  // the values, from their average
};

// Muon's update of the number-th matrix of a parameter.
void muon(const Parameter& p, int64_t number, const Update& update, float* scratch) {
    const Settings& s = update.settings;
    Scratch memory(scratch);
    Workspace w(p.shape, memory);
    const int64_t rows = p.shape.rows, cols = p.shape.cols, start = number * rows * cols;
    const float blend = static_cast<float>(1 - s.momentum), keep = static_cast<float>(s.momentum);
    const bool lying = rows < cols;
    const simd::Matrix x = lying ? simd::Matrix{w.next_x.data, row_stride(cols)} : w.x;
    float square = 0;
    for (int64_t r = 0; r < rows; r++) {
        float *const b = p.first + start + r * cols, *const to = x.data + r * x.ld;
        const float* const g = p.gradient + start + r * cols;
        for (int64_t c = 0; c < cols; c++) {
            b[c] += blend * (g[c] - b[c]);
            to[c] = g[c] + keep * (b[c] - g[c]);  // Nesterov's momentum
        }
        square += sum_of(cols, [to](int64_t c) { return to[c] * to[c]; });
    }
    if (lying) portable::transpose(w.x, {x.data, x.ld}, rows, cols, 1.0f);
    orthogonalize(w, std::sqrt(square), s);
    simd::Matrix direction = w.x;
    if (lying) {
        direction = {w.next_x.data, row_stride(cols)};
        portable::transpose(direction, {w.x.data, w.x.ld}, cols, rows, 1.0f);
    }
    const double ratio = static_cast<double>(rows) / static_cast<double>(cols);
    const double rate = update.fraction * s.muon_rate;
    const float length = static_cast<float>(rate * std::sqrt(std::max(1.0, ratio)));
    const float decayed = update.decayed(rate), toward = update.toward();
    for (int64_t r = 0; r < rows; r++) {
        float *const value = p.value + start + r * cols, *const average = p.average + start + r * cols;
        const float* const u = direction.data + r * direction.ld;
        for (int64_t c = 0; c < cols; c++) {
            value[c] = value[c] * decayed - length * u[c];
            average[c] += toward * (value[c] - average[c]);
        }
    }
}

void adamw(const Parameter& p, double rate, int64_t number, const Update& update) {
    const Settings& s = update.settings;
    const int64_t begin = number * CHUNK, end = std::min(p.shape.count, begin + CHUNK);
    const double updates = static_cast<double>(*p.updates);
    const double correction_1 = 1 - std::pow(s.beta_1, updates), correction_2 = 1 - std::pow(s.beta_2, updates);
    const float blend_1 = static_cast<float>(1 - s.beta_1), blend_2 = static_cast<float>(1 - s.beta_2);
    const float beta_2 = static_cast<float>(s.beta_2), epsilon = static_cast<float>(s.epsilon);
    const float length = static_cast<float>(rate / correction_1);
    const float root = static_cast<float>(1 / std::sqrt(correction_2));
    const float decayed = update.decayed(rate), toward = update.toward();
    for (int64_t i = begin; i < end; i++) {
        const float g = p.gradient[i];
        p.first[i] += blend_1 * (g - p.first[i]);
        p.second[i] = beta_2 * p.second[i] + blend_2 * g * g;
        p.value[i] = p.value[i] * decayed - length * p.first[i] / (std::sqrt(p.second[i]) * root + epsilon);
        p.average[i] += toward * (p.value[i] - p.average[i]);
    }
}

struct Piece {
    const Parameter* parameter;
    int64_t number, cost;
};

// A thread's scratch: the workspace of the largest matrix.
int64_t thread_scratch(const Sizes& s) {
    Scratch counted;
    const Workspace w({0, 4 * s.C, s.C}, counted);
    return counted.taken();
}

}  // namespace

std::vector<Shape> shapes(const Sizes& s) {
    const int64_t C = s.C;
    std::vector<Shape> all{{s.V * C, 0, 0}, {s.window > 0 ? 0 : s.T * C, 0, 0}};
    const Shape norm{C, 0, 0}, c_attn{3 * C * C, C, C}, attn_proj{C * C, C, C}, c_fc{4 * C * C, 4 * C, C},
        mlp_proj{4 * C * C, C, 4 * C};
    for (int64_t l = 0; l < s.L; l++)
        for (const Shape& each : {norm, c_attn, attn_proj, norm, c_fc, mlp_proj}) all.push_back(each);
    all.push_back(norm);
    return all;
}

int64_t update_scratch(const Sizes& s) { return s.threads * thread_scratch(s); }

void TrainingStep::update(double fraction, double average) {
    std::vector<Piece> pieces;
    for (const Parameter& p : parameters) {
        const Shape& s = p.shape;
        const int64_t matrix = s.rows * s.cols, n = std::min(s.rows, s.cols);
        const int64_t count = matrix > 0 ? s.count / matrix : (s.count + CHUNK - 1) / CHUNK;
        for (int64_t i = 0; i < count; i++) pieces.push_back({&p, i, matrix * n});
        if (p.updates) ++*p.updates;
    }
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
    const int64_t own = thread_scratch(sizes);
    const Update every{settings, fraction, average};
    run_phases(1, sizes.threads, sizes.pool, seconds, [&](Worker& m) {
        m.run(pieces.size(), [&](int64_t i) {
            const auto [parameter, number, cost] = pieces[i];
            if (cost > 0) {
                muon(*parameter, number, every, scratch + m.thread * own);
            } else {
                const bool positions = parameter == &parameters[WPE];
                adamw(*parameter, fraction * (positions ? settings.position_rate : settings.adam_rate), number,
                      every);
            }
            m.lap(cost > 0 ? "Muon" : "AdamW");
        });
    });
}

}  // namespace training
