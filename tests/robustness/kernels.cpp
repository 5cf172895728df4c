// Generated cases for the kernels, in memory between guard pages, compared with float64: each part's attention,
// part 4's gradients, and the products of weights in each precision.
//
//   kernels SEED COUNT [THREADS]
//
// runs cases as run_seeds() says. The bound is that of tests/oracle.py: at most twice the error of a plain
// float32 computation, plus 1e-6. A gradient may also err by a unit in the last place of its terms: unlike an
// output it is a sum of any number of them.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bf16.h"
#include "generated.h"
#include "model/csrc/precision.h"
#include "parts.h"

namespace {

constexpr int64_t LAST_PART = std::size(PARTS) - 1;
constexpr int ORDERS = 8;  // orders of summation that a plain computation may try

// The memory layout of a (B, H, N, d) tensor.
struct Layout {
    const char* name;
    int64_t batch, head, row, column, panel;  // panel: keys in a panel of K, 0 without panels

    int64_t at(int64_t b, int64_t h, int64_t i, int64_t c) const {
        const int64_t before = b * batch + h * head + c * column;
        return panel ? before + i / panel * panel * row + i % panel : before + i * row;
    }
};

Layout draw_layout(Random& random, int64_t H, int64_t N, int64_t d) {
    const int64_t gap = random.from(1, 20), row = d + gap, head = N * row + random.from(0, 20);
    const int64_t several = random.from(1, 3);
    const Layout all[] = {
        {"contiguous", H * N * d, N * d, d, 1, 0},
        {"gaps", H * head + gap, head, row, 1, 0},
        {"heads in rows", N * several * H * d, d, several * H * d, 1, 0},
        {"one head", 0, 0, d, 1, 0},
        {"one row", H * d, d, 0, 1, 0},
    };
    return random.one_in(3) ? all[0] : all[random.from(1, random.one_in(10) ? 4 : 3)];
}

// The transposed K that part 4 takes for few queries: whole, or in panels.
Layout draw_transposed(Random& random, int64_t H, int64_t Nk, int64_t d, int64_t panel) {
    const int64_t ld = Nk + (random.one_in(2) ? random.from(1, 40) : 0);
    const int64_t padded = (Nk + panel - 1) / panel * panel;
    if (random.one_in(2)) return {"transposed", H * d * ld, d * ld, 1, ld, 0};
    return {"panels", H * padded * d, padded * d, d, panel, panel};
}

enum Kind { PLAIN, LARGE, DENORMAL, EQUAL, HUGE_VALUES, BAD };
constexpr const char* KINDS[] = {"plain",      "scores of 1e4",  "denormals",
                                 "equal keys", "values of 1e34", "bad values"};
constexpr float BAD_VALUES[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity()};

enum Input { Q, K, V, DOUT, DLSE, INPUTS };
enum Output { OUT, LSE, DQ, DK, DV, OUTPUTS };
constexpr const char* NAMES[] = {"out", "lse", "dq", "dk", "dv"};

struct Case {
    uint64_t seed;
    const Part* part;
    bool backward, causal, lse, bf16;  // lse: it is computed too; of a backward pass: it has a gradient
    int64_t B, H, Nq, Nk, d, Br, Bc;
    int threads;
    Kind kind;
    float scale;
    Layout layouts[INPUTS];

    int inputs() const { return !backward ? DOUT : lse ? INPUTS : DLSE; }
    int64_t rows(int input) const { return input == K || input == V ? Nk : Nq; }
    int64_t seen(int64_t i) const { return causal ? i + 1 + (Nk - Nq) : Nk; }
    int64_t floats(int input) const {
        if (layouts[input].panel) return B * layouts[input].batch;  // the last panel is padded
        return layouts[input].at(B - 1, H - 1, rows(input) - 1, d - 1) + 1;
    }
    bool has(int output) const { return backward ? output >= DQ : output == OUT || (output == LSE && lse); }
    int64_t row_length(int output) const { return output == LSE ? 1 : d; }
    int64_t numbers_of_head(int output) const { return (output >= DK ? Nk : Nq) * row_length(output); }

    template <class Element> MatricesOf<Element> matrices(int input, const Element* data) const {
        const Layout& l = layouts[input];
        return {data, l.batch, l.head, l.row, l.column};
    }
    AttentionSizes sizes(int64_t rows, int64_t keys) const {
        return {B, H, Nq, Nk, d, causal, scale, std::min(rows, Nq), keys, threads, nullptr, on_new_threads};
    }
};

// The inputs of a case, drawn, between guard pages.
class Inputs {
  public:
    Inputs(const Case& c, Random& random) : c(c) {
        for (int which = 0; which < c.inputs(); which++) {
            tensors.push_back(std::make_unique<Guarded>(c.floats(which), random));
            each(which, [&](float& x, int64_t, int64_t) {
                x = random.normal() * (c.kind == DENORMAL && random.one_in(2) ? 1e-40f : 1.0f);
            });
        }
    }
    Guarded& operator[](int which) const { return *tensors[static_cast<size_t>(which)]; }
    float* row(int which, int64_t head, int64_t i) const {
        return (*this)[which].data + c.layouts[which].at(head / c.H, head % c.H, i, 0);
    }
    // Calls visit(number, head, row) for each number of an input.
    template <class Visit> void each(int which, const Visit& visit) const {
        for (int64_t head = 0; head < c.B * c.H; head++)
            for (int64_t i = 0; i < c.rows(which); i++)
                for (int64_t e = 0; e < c.d; e++)
                    visit(row(which, head, i)[e * c.layouts[which].column], head, i);
    }
    // Makes all keys of a head the first one.
    void equal_keys() const {
        for (int64_t head = 0; head < c.B * c.H; head++)
            for (int64_t i = 0; i < c.Nk; i++)
                for (int64_t at = 0, e = 0; e < c.d; e++, at += c.layouts[K].column)
                    row(K, head, i)[at] = row(K, head, 0)[at];
    }
    // Puts a bad value somewhere into an input. An infinite score may hide a row, whose gradients are then
    // zeros: a backward pass gets NaN.
    void spoil(Random& random) const {
        const int which = static_cast<int>(random.from(0, c.inputs() - 1));
        float* const to = row(which, random.from(0, c.B * c.H - 1), random.from(0, c.rows(which) - 1));
        to[random.from(0, c.d - 1) * c.layouts[which].column] =
            c.backward ? BAD_VALUES[0] : random.any(BAD_VALUES);
    }
    void let(int access) const {
        for (const auto& t : tensors) t->let(access);
    }
    bool whole() const {
        return std::all_of(tensors.begin(), tensors.end(), [](const auto& t) { return t->whole(); });
    }

  private:
    const Case& c;
    std::vector<std::unique_ptr<Guarded>> tensors;
};

void describe(const Case& c) {
    set_running(c.seed, c.backward ? "backward" : c.part->name, c.bf16 ? " in bf16" : "", c.lse ? ", lse" : "",
                ", tile ", c.Br, " x ", c.Bc, ", B ", c.B, ", H ", c.H, ", Nq ", c.Nq, ", Nk ", c.Nk, ", d ",
                c.d, c.causal ? ", causal" : ", full", ", threads ", c.threads, ", ", KINDS[c.kind], ", scale ",
                c.scale, "; q: ", c.layouts[Q].name, ", k: ", c.layouts[K].name, ", v: ", c.layouts[V].name);
}

Case draw(uint64_t seed, Random& random, int threads) {
    Case c{};
    c.seed = seed;
    c.backward = random.one_in(3);
    // The last part has the most cases to try: it gets most of all.
    c.part = &PARTS[c.backward || random.one_in(2) ? LAST_PART : random.from(0, LAST_PART - 1)];
    c.lse = random.one_in(2);
    c.causal = random.one_in(2);
    // Part 4 divides many keys between threads.
    const bool few_queries = !c.backward && random.one_in(4), many_keys = !c.backward && random.one_in(8);
    const int64_t work = (random.one_in(40) ? 20'000'000 : 1'000'000) / (c.backward ? 2 : 1);
    do {
        c.B = random.from(1, 2);
        c.H = random.from(1, 3);
        c.Nq = few_queries ? random.from(1, part4::FEW + 1) : random.size(MOST);
        c.Nk = random.one_in(2) ? c.Nq : many_keys ? random.from(2040, 5000) : random.size(MOST);
        if (c.causal && c.Nk < c.Nq) std::swap(c.Nq, c.Nk);
        c.d = random.size(random.one_in(10) ? MOST : 130);
    } while (c.B * c.H * c.Nq * c.Nk * c.d > work);
    c.Br = std::min(random.one_in(8) ? 1 << 20 : random.size(MOST), c.Nq);
    c.Bc = std::min(random.one_in(8) ? 1 << 20 : random.size(MOST), c.Nk);
    c.threads = static_cast<int>(random.from(1, threads));
    c.kind = random.one_in(2) ? PLAIN : static_cast<Kind>(random.from(LARGE, BAD));
    const float usual = 1 / std::sqrt(static_cast<float>(c.d)), scales[] = {usual, usual, usual, 0, -usual};
    c.scale = random.any(scales);
    for (int which = 0; which < DLSE; which++) c.layouts[which] = draw_layout(random, c.H, c.rows(which), c.d);
    c.layouts[DLSE] = {"dlse", c.H * c.Nq, c.Nq, 1, 0, 0};
    if (!c.backward && c.Nq <= c.part->few.queries && random.one_in(2)) {
        // In the decoder a panel may be larger than the number of keys.
        if (random.one_in(2)) c.Bc = random.size(MOST);
        c.layouts[K] = draw_transposed(random, c.H, c.Nk, c.d, c.Bc);
        if (!c.layouts[K].panel) c.Bc = std::min(c.Bc, c.Nk);
    }
    c.bf16 = !c.backward && c.part->takes_bf16() && c.layouts[K].column == 1 && random.one_in(2);
    describe(c);
    return c;
}

template <class T> struct Results {
    std::vector<T> tensors[OUTPUTS];
    double largest_score = 0;  // the largest magnitude of the finite scores
    double largest_sum = 0;    // of the magnitudes of the terms of a number of dq, dk or dv
};

// 0 to n - 1, shuffled if `random` is given.
std::vector<int64_t> order(int64_t n, Random* random) {
    std::vector<int64_t> numbers(static_cast<size_t>(n));
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int64_t i = n - 1; random && i > 0; i--) std::swap(numbers[i], numbers[random->from(0, i)]);
    return numbers;
}

// Attention and its gradients by their definition, one query at a time, in T: double gives the reference, float
// the error that is normal for float32. Sums run in the order of their terms, or in a random order if `random`
// is given. As in PyTorch's own backward pass, P is exp(s - lse) of scores that are computed again, here in
// another order.
template <class T> Results<T> compute(const Case& c, const Inputs& in, Random* random = nullptr) {
    Results<T> r;
    std::vector<double> sums[OUTPUTS];
    for (int t = 0; t < OUTPUTS; t++) {
        r.tensors[t].resize(static_cast<size_t>(c.B * c.H * c.numbers_of_head(t)));
        sums[t].resize(c.backward && t >= DQ ? r.tensors[t].size() : 0);
    }
    const auto add = [&](int t, int64_t at, T a, float b) {
        r.tensors[t][at] += a * static_cast<T>(b);
        sums[t][at] += std::fabs(static_cast<double>(a) * double{b});
    };
    const auto dot = [](const float* x, const float* y, int64_t column, const std::vector<int64_t>& elements) {
        T sum = 0;
        for (int64_t e : elements) sum += static_cast<T>(x[e]) * static_cast<T>(y[e * column]);
        return sum;
    };
    const std::vector<int64_t> forth = order(c.d, random), back(forth.rbegin(), forth.rend());
    const std::vector<int64_t> keys = order(c.Nk, random), queries = order(c.Nq, random);
    const int64_t column = c.layouts[K].column;
    std::vector<T> s(static_cast<size_t>(c.Nk));
    for (int64_t head = 0; head < c.B * c.H; head++)
        for (int64_t i : queries) {
            const int64_t n = c.seen(i), query = head * c.Nq + i;
            const float* const q = in.row(Q, head, i);
            T m = -std::numeric_limits<T>::infinity(), l = 0, D = 0;
            for (int64_t j = 0; j < n; j++) {
                s[j] = static_cast<T>(c.scale) * dot(q, in.row(K, head, j), column, forth);
                m = s[j] > m ? s[j] : m;
                const double score = std::fabs(static_cast<double>(s[j]));
                if (std::isfinite(score)) r.largest_score = std::max(r.largest_score, score);
            }
            for (int64_t j : keys)
                if (j < n) l += std::exp(s[j] - m);
            for (int64_t e : forth) {
                T& o = r.tensors[OUT][query * c.d + e];
                for (int64_t j : keys)
                    if (j < n) o += std::exp(s[j] - m) / l * static_cast<T>(in.row(V, head, j)[e]);
                if (c.backward) D += static_cast<T>(in.row(DOUT, head, i)[e]) * o;
            }
            const T lse = r.tensors[LSE][query] = m + std::log(l);
            if (!c.backward) continue;
            if (c.lse) D -= static_cast<T>(*in.row(DLSE, head, i));
            const float* const dout = in.row(DOUT, head, i);
            for (int64_t j = 0; j < n; j++) {
                const float *k = in.row(K, head, j), *v = in.row(V, head, j);
                const T p = std::exp(static_cast<T>(c.scale) * dot(q, k, 1, back) - lse);
                const T ds = static_cast<T>(c.scale) * p * (dot(dout, v, 1, back) - D);
                for (int64_t e = 0; e < c.d; e++) {
                    const int64_t key = (head * c.Nk + j) * c.d + e;
                    add(DQ, query * c.d + e, ds, k[e]);
                    add(DK, key, ds, q[e]);
                    add(DV, key, p, dout[e]);
                }
            }
        }
    for (const std::vector<double>& of_tensor : sums)
        for (const double sum : of_tensor)
            if (std::isfinite(sum)) r.largest_sum = std::max(r.largest_sum, sum);
    return r;
}

// Elements between guard pages, the last one directly before a gap or a page.
template <class Element> struct GuardedArray {
    static constexpr int64_t OF_A_FLOAT = sizeof(float) / sizeof(Element);
    Guarded memory;
    Element* data;

    GuardedArray(int64_t n, Random& random)
        : memory((n + OF_A_FLOAT - 1) / OF_A_FLOAT, random),
          data(reinterpret_cast<Element*>(memory.data) + memory.n * OF_A_FLOAT - n) {}
    GuardedArray(const float* from, int64_t n, Random& random) : GuardedArray(n, random) {
        for (int64_t i = 0; i < n; i++) convert(data + i, from + i, 1);
        memory.let(PROT_READ);
    }
};

template <class Element>
Results<float> run_in(const Case& c, Random& random, const Inputs& in, std::string& wrong) {
    const GuardedArray<Element> q(in[Q].data, in[Q].n, random), k(in[K].data, in[K].n, random),
        v(in[V].data, in[V].n, random);
    GuardedArray<Element> out(c.B * c.H * c.Nq * c.d, random);
    Guarded lse(c.B * c.H * c.Nq, random);
    AttentionOf<Element> a{c.sizes(c.Br, c.Bc), c.matrices<Element>(Q, q.data), c.matrices<Element>(K, k.data),
                           c.matrices<Element>(V, v.data), out.data};
    a.lse = c.lse ? lse.data : nullptr;
    Guarded scratch(c.part->scratch(a), random);
    if (!c.lse) lse.let(PROT_NONE);
    c.part->attention(a, scratch.data);
    if (!c.lse) lse.let(PROT_READ);
    if (!out.memory.whole()) wrong += "; wrote beside out";
    if (!lse.whole()) wrong += "; wrote beside lse";
    if (!scratch.whole()) wrong += "; wrote beside its scratch";
    Results<float> result;
    for (int64_t i = 0; i < c.B * c.H * c.Nq * c.d; i++) result.tensors[OUT].push_back(widened(out.data[i]));
    result.tensors[LSE].assign(lse.data, lse.data + lse.n);
    return result;
}

// Part 4's gradients, from its own forward pass.
Results<float> run_backward(const Case& c, Random& random, const Inputs& in, std::string& wrong) {
    const auto matrices = [&](Input which) { return c.matrices<float>(which, in[which].data); };
    Guarded out(c.B * c.H * c.Nq * c.d, random), lse(c.B * c.H * c.Nq, random);
    Attention forward{c.sizes(96, std::min<int64_t>(128, c.Nk)), matrices(Q), matrices(K), matrices(V),
                      out.data};
    forward.lse = lse.data;
    forward.threads = 1;
    std::vector<float> room(static_cast<size_t>(flash_scratch(forward)));
    flash_attention(forward, room.data());
    out.let(PROT_READ), lse.let(PROT_READ);

    Guarded dq(out.n, random), dk(c.B * c.H * c.Nk * c.d, random), dv(dk.n, random);
    AttentionGradient a{c.sizes(1, 1), matrices(Q), matrices(K), matrices(V), matrices(DOUT)};
    a.out = out.data, a.lse = lse.data, a.dlse = c.lse ? in[DLSE].data : nullptr;
    a.dq = dq.data, a.dk = dk.data, a.dv = dv.data;
    Guarded scratch(flash_backward_scratch(a), random);
    flash_backward(a, scratch.data);
    Results<float> result;
    const Guarded* const made[] = {&dq, &dk, &dv};
    for (int t = DQ; t <= DV; t++) {
        const Guarded& gradient = *made[t - DQ];
        if (!gradient.whole()) wrong += "; wrote beside a gradient";
        result.tensors[t].assign(gradient.data, gradient.data + gradient.n);
    }
    if (!scratch.whole()) wrong += "; wrote beside its scratch";
    return result;
}

Results<float> run(const Case& c, Random& random, const Inputs& in, std::string& wrong) {
    if (c.backward) return run_backward(c, random, in, wrong);
    return (c.bf16 ? run_in<Bf16> : run_in<float>)(c, random, in, wrong);
}

// Describes what is wrong with a tensor; empty if nothing is. For scores of 1e4, rounding a score by half a
// unit in the last place changes its weight by more than 1e-6: then `rounding` takes the place of 1e-6.
std::string compare(int t, const Results<float>& got, const Results<double>& exact,
                    const std::vector<Results<float>>& plain, double rounding) {
    const std::vector<double>& right = exact.tensors[t];
    double error = 0, largest = 1;
    for (size_t i = 0; i < right.size(); i++) {
        if (!std::isfinite(right[i])) continue;
        largest = std::max(largest, std::fabs(right[i]));
        for (const Results<float>& one : plain)
            if (const double x = one.tensors[t][i]; std::isfinite(x))
                error = std::max(error, std::fabs(x - right[i]));
    }
    // A weight may err by a unit in the last place, in all queries alike.
    const double allowed = 2 * error + std::max(1e-6, rounding) * largest + 0x1p-23 * exact.largest_sum;
    for (size_t i = 0; i < right.size(); i++) {
        const double x = static_cast<double>(got.tensors[t][i]);
        const bool good = std::isfinite(right[i])            ? std::fabs(x - right[i]) <= allowed
                          : t == OUT && std::isinf(right[i]) ? x == right[i]
                          : t == OUT                         ? std::isnan(x)
                                                             : !std::isfinite(x);
        if (good) continue;
        char text[160];
        std::snprintf(text, sizeof text, "; %s[%zu] is %.9g, right is %.9g, allowed %.3g", NAMES[t], i, x,
                      right[i], allowed);
        return text;
    }
    return "";
}

// Describes what is wrong with the results of a case; empty if nothing is.
std::string hold(const Case& c, const Results<float>& got, const Inputs& in) {
    const Results<double> right = compute<double>(c, in);
    // A bfloat16 output and bfloat16 weights are rounded by up to 2^-8 each. In a backward pass a query times
    // the scale, its product with a key, and the row's logsumexp are each rounded once, by half a unit in the
    // last place of a score: in a row of one number (d = 1) nothing averages this out.
    const double rounding = (c.bf16 ? 0x1p-7 : 0) + (c.backward ? 3 : 1) * 0x1p-24 * right.largest_score;
    Random random(c.seed);
    std::vector<Results<float>> plain;
    std::string wrong;
    // In a case of few scores, one order of summation may have almost no error: then others are tried too.
    for (int tried = 0; tried < ORDERS && (tried == 0 || !wrong.empty()); tried++) {
        plain.push_back(compute<float>(c, in, tried ? &random : nullptr));
        wrong.clear();
        for (int t = 0; t < OUTPUTS; t++)
            if (c.has(t)) wrong += compare(t, got, right, plain, t == LSE ? 0 : rounding);
    }
    return wrong;
}

// Whether a bad value reached a row that does not see it. A bad query reaches its row, or in a backward pass
// its head. A bad key or value may also reach rows of its head that do not see it: such numbers of `got` become
// the right ones.
bool reached(const Case& c, const Inputs& in, const Results<float>& clean, Results<float>& got) {
    std::vector<char> rows(static_cast<size_t>(c.B * c.H * c.Nq)), heads(static_cast<size_t>(c.B * c.H));
    for (int which = 0; which < c.inputs(); which++)
        in.each(which, [&](const float& x, int64_t head, int64_t i) {
            if (std::isfinite(x)) return;
            (which == Q && !c.backward ? rows[head * c.Nq + i] : heads[head]) = 1;
        });
    const Results<double> right = compute<double>(c, in);
    for (int t = 0; t < OUTPUTS; t++)
        for (size_t n = 0; c.has(t) && n < right.tensors[t].size(); n++) {
            const double exact = right.tensors[t][n];
            float& x = got.tensors[t][n];
            if (heads[n / c.numbers_of_head(t)]) {
                if (!std::isnan(exact) && !std::isfinite(x)) x = static_cast<float>(exact);
            } else if ((c.backward || !rows[n / c.row_length(t)]) && !same(clean.tensors[t][n], x)) {
                return true;
            }
        }
    return false;
}

// Runs a case of attention and describes what is wrong; empty if nothing is.
std::string attempt_attention(Case c, Random& random) {
    std::string wrong;
    const Inputs in(c, random);
    for (int which = 0; which < DOUT; which++)
        in.each(which, [&](float& x, int64_t, int64_t) {
            if (c.bf16) x = widened(rounded(x));
            // 300 such values have a sum in float32, with weights of up to 2^8.
            if (which == V && c.kind == HUGE_VALUES && !c.backward) x *= 0x1p112f;
        });
    if (c.kind == EQUAL || (c.kind == LARGE && !c.backward && random.one_in(4))) in.equal_keys();
    if (c.kind == LARGE) {
        c.scale = 1;
        const double largest = compute<double>(c, in).largest_score;
        c.scale = (random.one_in(2) ? 1.0f : -1.0f) * (largest > 0 ? static_cast<float>(1e4 / largest) : 1.0f);
        describe(c);
    }
    in.let(PROT_READ);
    Results<float> got = run(c, random, in, wrong);
    if (c.threads > 1 || random.one_in(4)) {
        Case other = c;
        other.threads = 1;
        if (!c.backward) other.lse = !c.lse;
        const Results<float> again = run(other, random, in, wrong);
        for (int t = 0; t < OUTPUTS; t++)
            if (c.has(t) && other.has(t) && !same(got.tensors[t], again.tensors[t]))
                wrong += "; a result depends on the threads, or on whether lse is wanted";
    }
    if (c.kind == BAD) {
        const Results<float> clean = got;
        in.let(PROT_READ | PROT_WRITE);
        for (int64_t n = random.from(1, 3); n > 0; n--) in.spoil(random);
        in.let(PROT_READ);
        got = run(c, random, in, wrong);
        if (reached(c, in, clean, got)) wrong += "; a bad value reached a row that does not see it";
    }
    return wrong + hold(c, got, in) + (in.whole() ? "" : "; wrote beside an input");
}

// Multiplies rows by a panel of weights in one of the precisions. All are whole numbers that each precision
// holds, so a result may err by the roundings of its sum only: of int8, those of each group's.
std::string attempt_product(Random& random) {
    const PrecisionRow& precision = PRECISIONS[random.from(0, std::size(PRECISIONS) - 1)];
    const int64_t in = random.size(MOST), rows = random.from(1, 9);
    const int64_t width = precision.vectors * portable::lanes() * random.from(1, 9);
    const int64_t words = precision.operand ? precision.operand_words(in) : in;
    const Panels shape{width, in, width};
    const bool add = random.one_in(2);
    Guarded x(rows * in, random), w(in * width, random), y(rows * width, random);
    Guarded panel(precision.words(shape), random), operand(rows * words, random);
    const auto whole = [&, least = random.one_in(8) ? 1.0 : -1.0](int64_t most) {
        return static_cast<float>(random.from(static_cast<int64_t>(least) * most, most));
    };
    for (int64_t i = 0; i < rows; i++) {
        const float size = std::exp2(static_cast<float>(random.from(-100, 80)));
        float* const row = x.data + i * in;
        for (int64_t k = 0; k < in; k++) row[k] = whole(1 << 18) * size;
        if (precision.operand)
            precision.operand(operand.data + i * words, row, in);
        else
            std::copy_n(row, in, operand.data + i * words);
    }
    for (int64_t k = 0; k < in; k++)  // each group has the largest number, so that int8's scale is 1
        for (int64_t c = 0; c < width; c++) w.data[k * width + c] = k % PACKED_ROWS ? whole(127) : 127;
    for (int64_t k = 0; k < in; k += PACKED_ROWS) {
        const int64_t terms = std::min(PACKED_ROWS, in - k);
        float* const to = panel.data + precision.words({width, k, width});
        if (precision.pack)
            precision.pack(to, w.data + k * width, terms, width);
        else
            std::copy_n(w.data + k * width, terms * width, to);
    }
    for (int64_t i = 0; i < y.n; i++) y.data[i] = random.normal();
    const std::vector<float> before(y.data, y.data + y.n);
    for (Guarded* input : {&panel, &operand}) input->let(PROT_READ);
    precision.multiply({y.data, width}, {operand.data, words}, panel.data, shape, rows, 0, width, add);
    for (const Guarded* t : {&x, &w, &y, &panel, &operand})
        if (!t->whole()) return "; wrote beside a matrix";
    for (int64_t n = 0; n < y.n; n++) {
        double exact = add ? double{before[n]} : 0, size = std::fabs(exact);
        for (int64_t k = 0; k < in; k++) {
            const double term = double{x.data[n / width * in + k]} * double{w.data[k * width + n % width]};
            exact += term;
            size += std::fabs(term);
        }
        const auto roundings = static_cast<double>(4 + (precision.operand ? portable::int8_groups(in) : in));
        if (!(std::fabs(y.data[n] - exact) <= 0x1p-24 * roundings * size + 1e-37))
            return "; a product in " + std::string(precision.name) + " is " + std::to_string(y.data[n]) +
                   ", right is " + std::to_string(exact);
    }
    return "";
}

std::string attempt(uint64_t seed, int threads) {
    Random random(seed);
    const Case c = draw(seed, random, threads);
    return attempt_attention(c, random) + attempt_product(random);
}

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, attempt); }
