// Generated cases for part 4's backward pass, in memory between guard pages, compared with float64.
//
//   backward SEED COUNT [THREADS]
//
// runs the cases of the seeds as kernels.cpp does. A gradient may err by as much, and by a unit in the last
// place of its terms: unlike an output it is a sum of any number of them.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "generated.h"
#include "parts.h"

namespace {

struct Case : AttentionCase {
    bool dlse;
};

Case draw(uint64_t seed, Random& random, int threads) {
    Case c{};
    c.seed = seed, c.dlse = random.one_in(2);
    c.draw_sizes(random, random.one_in(40) ? 8'000'000 : 400'000, false, false);
    c.draw_rest(random, threads, MOST_INPUTS, {LARGE, DENORMAL, EQUAL, BAD});
    return c;
}

void describe(const Case& c) { c.tell("backward", c.dlse ? ", dlse" : "", ", dout: ", c.layouts[DOUT].name); }

template <class T> struct Gradients {
    std::vector<T> dq, dk, dv;
    double largest_score = 0;  // the largest magnitude of the finite scores
    double largest_sum = 0;    // of the magnitudes of the terms of a number of dq, dk or dv
};

// The gradients, one query at a time, in T: double gives the reference, float the error that is normal for
// float32. As in PyTorch's own backward pass, P is exp(s - lse) of scores that are computed again, here in
// another order, and D = rowsum(dout * out). With `random` the orders of the sums are random.
template <class T>
Gradients<T> differentiate(const Case& c, const Inputs& in, const float* dlse, Random* random = nullptr) {
    const auto size = [&](int64_t rows) { return static_cast<size_t>(c.B * c.H * rows * c.d); };
    Gradients<T> g{std::vector<T>(size(c.Nq)), std::vector<T>(size(c.Nk)), std::vector<T>(size(c.Nk))};
    std::vector<T> s(static_cast<size_t>(c.Nk));
    std::vector<double> of_dq(g.dq.size()), of_dk(g.dk.size()), of_dv(g.dv.size());
    const auto add = [](T& to, double& sum, T a, float b) {
        to += a * static_cast<T>(b);
        sum += std::fabs(static_cast<double>(a) * double{b});
    };
    const std::vector<int64_t> forth = order(c.d, random), back(forth.rbegin(), forth.rend());
    const std::vector<int64_t> queries = order(c.Nq, random);
    for (int64_t head = 0; head < c.B * c.H; head++) {
        const auto row = [&](Input which, int64_t i) { return in.row(which, head, i); };
        const auto dot = [&](const float* x, const float* y, const std::vector<int64_t>& elements) {
            T sum = 0;
            for (int64_t e : elements) sum += static_cast<T>(x[e]) * static_cast<T>(y[e]);
            return sum;
        };
        for (int64_t i : queries) {
            const float *q = row(Q, i), *dout = row(DOUT, i);
            const int64_t n = c.seen(i);
            T m = -std::numeric_limits<T>::infinity(), l = 0, D = 0;
            for (int64_t j = 0; j < n; j++) {
                s[j] = static_cast<T>(c.scale) * dot(q, row(K, j), forth);
                m = s[j] > m ? s[j] : m;
                const double score = std::fabs(static_cast<double>(s[j]));
                if (std::isfinite(score)) g.largest_score = std::max(g.largest_score, score);
            }
            for (int64_t j = 0; j < n; j++) l += std::exp(s[j] - m);
            for (int64_t e : forth) {
                T o = 0;
                for (int64_t j = 0; j < n; j++) o += std::exp(s[j] - m) / l * static_cast<T>(row(V, j)[e]);
                D += static_cast<T>(dout[e]) * o;
            }
            if (dlse) D -= static_cast<T>(dlse[head * c.Nq + i]);
            const T lse = m + std::log(l);
            for (int64_t j = 0; j < n; j++) {
                const T p = std::exp(static_cast<T>(c.scale) * dot(q, row(K, j), back) - lse);
                const T ds = static_cast<T>(c.scale) * p * (dot(dout, row(V, j), back) - D);
                for (int64_t e = 0; e < c.d; e++) {
                    const int64_t query = (head * c.Nq + i) * c.d + e, key = (head * c.Nk + j) * c.d + e;
                    add(g.dq[query], of_dq[query], ds, row(K, j)[e]);
                    add(g.dk[key], of_dk[key], ds, q[e]);
                    add(g.dv[key], of_dv[key], p, dout[e]);
                }
            }
        }
    }
    for (const std::vector<double>* sums : {&of_dq, &of_dk, &of_dv})
        for (const double sum : *sums)
            if (std::isfinite(sum)) g.largest_sum = std::max(g.largest_sum, sum);
    return g;
}

// The kernel's gradients, from its own forward pass.
Gradients<float> run(const Case& c, Random& random, const Inputs& in, const float* dlse, std::string& wrong) {
    const auto matrices = [&](Input which) {
        return c.matrices(which, static_cast<const float*>(in[which].data));
    };
    const int64_t heads = c.B * c.H;
    Guarded out(heads * c.Nq * c.d, random), lse(heads * c.Nq, random);
    Attention forward{c.sizes(96, std::min<int64_t>(128, c.Nk)), matrices(Q), matrices(K), matrices(V),
                      out.data};
    forward.lse = lse.data, forward.threads = 1;
    std::vector<float> room(static_cast<size_t>(flash_scratch(forward)));
    flash_attention(forward, room.data());
    out.let(PROT_READ), lse.let(PROT_READ);

    Guarded dq(heads * c.Nq * c.d, random), dk(heads * c.Nk * c.d, random), dv(heads * c.Nk * c.d, random);
    AttentionGradient a{c.sizes(1, 1), matrices(Q), matrices(K), matrices(V), matrices(DOUT)};
    a.out = out.data, a.lse = lse.data, a.dlse = dlse;
    a.dq = dq.data, a.dk = dk.data, a.dv = dv.data;
    Guarded scratch(flash_backward_scratch(a), random);
    flash_backward(a, scratch.data);
    for (const Guarded* t : {&dq, &dk, &dv})
        if (!t->whole()) wrong += "; wrote beside a gradient";
    if (!scratch.whole()) wrong += "; wrote beside its scratch";
    return {{dq.data, dq.data + dq.n}, {dk.data, dk.data + dk.n}, {dv.data, dv.data + dv.n}, 0, 0};
}

bool all_same(const Gradients<float>& a, const Gradients<float>& b) {
    return same(a.dq, b.dq) && same(a.dk, b.dk) && same(a.dv, b.dv);
}

// Describes what is wrong with a case's gradients; empty if nothing is.
std::string hold(const Case& c, const Gradients<float>& got, const Inputs& in, const float* dlse) {
    const Gradients<double> right = differentiate<double>(c, in, dlse);
    // A query times the scale, its product with a key, and the row's logsumexp are each rounded once, by half a
    // unit in the last place of a score. In a row of one number (d = 1) nothing averages this out.
    const double rounding = 3 * 0x1p-24 * right.largest_score;
    // A weight may err by a unit in the last place, in all queries alike.
    const double weights = 0x1p-23 * right.largest_sum;
    Random random(c.seed);
    std::vector<std::vector<float>> dq, dk, dv;
    std::string wrong;
    for (int tried = 0; tried < ORDERS && (tried == 0 || !wrong.empty()); tried++) {
        Gradients<float> plain = differentiate<float>(c, in, dlse, tried ? &random : nullptr);
        dq.push_back(std::move(plain.dq)), dk.push_back(std::move(plain.dk)), dv.push_back(std::move(plain.dv));
        wrong = compare("dq", got.dq, right.dq, weights + allowance(right.dq, dq, rounding), false) +
                compare("dk", got.dk, right.dk, weights + allowance(right.dk, dk, rounding), false) +
                compare("dv", got.dv, right.dv, weights + allowance(right.dv, dv, rounding), false);
    }
    return wrong;
}

// Whether `got` differs from `clean` in a head without a bad value. In the others a bad value may also reach
// what does not depend on it: such numbers of `got` become those of `right`.
bool reached(const Case& c, const std::vector<char>& bad, const Gradients<float>& clean,
             const Gradients<double>& right, Gradients<float>& got) {
    const auto differ = [&](const std::vector<float>& before, const std::vector<double>& exact,
                            std::vector<float>& x, int64_t rows) {
        for (size_t n = 0; n < x.size(); n++) {
            if (!bad[n / static_cast<size_t>(rows * c.d)]) {
                if (!same(before[n], x[n])) return true;
            } else if (std::isfinite(exact[n]) && !std::isfinite(x[n])) {
                x[n] = static_cast<float>(exact[n]);
            }
        }
        return false;
    };
    return differ(clean.dq, right.dq, got.dq, c.Nq) || differ(clean.dk, right.dk, got.dk, c.Nk) ||
           differ(clean.dv, right.dv, got.dv, c.Nk);
}

// Runs a case and describes what is wrong; empty if nothing is.
std::string attempt(const Case& drawn, Random& random) {
    Case c = drawn;
    std::string wrong;
    const Inputs in(c, MOST_INPUTS, random);
    Guarded of_lse(c.B * c.H * c.Nq, random);
    for (int64_t n = 0; n < of_lse.n; n++) of_lse.data[n] = c.draw_value(random);
    const float* const dlse = c.dlse ? of_lse.data : nullptr;
    if (c.kind == EQUAL) c.equal_keys(in[K]);
    if (c.kind == LARGE) {
        c.scale = 1;
        c.scale = large_scale(random, differentiate<double>(c, in, dlse).largest_score);
        describe(c);
    }
    in.let(PROT_READ), of_lse.let(PROT_READ);
    Gradients<float> got = run(c, random, in, dlse, wrong);
    if (c.threads > 1) {
        Case other = c;
        other.threads = 1;
        if (!all_same(got, run(other, random, in, dlse, wrong))) wrong += "; a gradient depends on the threads";
    }
    if (c.kind == BAD) {
        const Gradients<float> clean = got;
        in.let(PROT_READ | PROT_WRITE), of_lse.let(PROT_READ | PROT_WRITE);
        std::vector<char> heads(static_cast<size_t>(c.B * c.H));
        for (int64_t n = random.from(1, 3); n > 0; n--) {
            const int which = static_cast<int>(random.from(0, MOST_INPUTS));
            if (which < MOST_INPUTS) {
                c.spoil(which, in[which], random);
                continue;
            }
            const int64_t row = random.from(0, of_lse.n - 1);
            of_lse.data[row] = random.any(BAD_VALUES);
            if (c.dlse) heads[row / c.Nq] = 1;
        }
        in.let(PROT_READ), of_lse.let(PROT_READ);
        got = run(c, random, in, dlse, wrong);
        for (int which = 0; which < MOST_INPUTS; which++)
            c.each(which, in[which], [&](float& x, int64_t b, int64_t h, int64_t, int64_t) {
                if (!std::isfinite(x)) heads[b * c.H + h] = 1;
            });
        if (reached(c, heads, clean, differentiate<double>(c, in, dlse), got))
            wrong += "; a bad value reached another head";
    }
    wrong += hold(c, got, in, dlse) + in.beside();
    return of_lse.whole() ? wrong : wrong + "; wrote beside dlse";
}

}  // namespace

int main(int argc, char** argv) { return run_cases(argc, argv, draw, attempt); }
