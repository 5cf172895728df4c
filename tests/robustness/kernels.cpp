// Generated cases for the kernels, in memory between guard pages, compared with float64.
//
//   kernels SEED COUNT [THREADS]
//
// runs the cases of the seeds SEED .. SEED + COUNT - 1 with at most THREADS threads, by default 1. It prints
// the seed and the description of a case that fails or ends the program; `kernels SEED 1 THREADS` repeats the
// case. The bound is that of tests/oracle.py: at most twice the error of a plain float32 computation, plus
// 1e-6.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bf16.h"
#include "buffer.h"
#include "generated.h"
#include "parts.h"
#include "simd/portable.h"
#include "threads.h"

namespace {

constexpr int64_t LAST_PART = std::size(PARTS) - 1;

// The transposed K that part 4 takes for few queries: whole, or in panels.
Layout draw_transposed(Random& random, int64_t H, int64_t Nk, int64_t d, int64_t panel) {
    const int64_t ld = Nk + (random.one_in(2) ? random.from(1, 40) : 0);
    const int64_t padded = (Nk + panel - 1) / panel * panel;
    if (random.one_in(2)) return {"transposed", H * d * ld, d * ld, 1, ld, 0};
    return {"panels", H * padded * d, padded * d, d, panel, panel};
}

struct Case : AttentionCase {
    const Part* part;
    int64_t Br, Bc;
    bool lse, bf16;
    bool pairs;  // k and v are handed over in bfloat16, k in panels of Bc keys
};

Case draw(uint64_t seed, Random& random, int threads) {
    Case c{};
    c.seed = seed;
    // The last part has the most cases to try: it gets half of all.
    c.part = &PARTS[random.one_in(2) ? LAST_PART : random.from(0, LAST_PART - 1)];
    c.causal = random.one_in(2);
    c.lse = random.one_in(2);
    const int64_t work = random.one_in(40) ? 20'000'000 : 1'000'000;
    do {
        c.B = random.from(1, 2), c.H = random.from(1, 3);
        c.Nq = random.one_in(4) ? random.from(1, part4::FEW + 1) : random.size(MOST);
        c.Nk = random.one_in(2) ? c.Nq : random.size(MOST);
        if (random.one_in(16)) c.Nk = random.from(2040, 5000);  // part 4 divides so many between threads
        if (c.causal && c.Nk < c.Nq) std::swap(c.Nq, c.Nk);
        c.d = random.size(random.one_in(10) ? MOST : 130);
    } while (c.B * c.H * c.Nq * c.Nk * c.d > work);
    const int64_t Br = random.one_in(8) ? 1 << 20 : random.size(MOST);
    const int64_t Bc = random.one_in(8) ? 1 << 20 : random.size(MOST);
    c.Br = std::min(Br, c.Nq), c.Bc = std::min(Bc, c.Nk);
    c.draw_rest(random, threads, DOUT, {LARGE, DENORMAL, EQUAL, HUGE_VALUES, BAD});
    if (c.Nq <= c.part->few.queries && random.one_in(2)) {
        // In the decoder a panel may be larger than the number of keys.
        if (random.one_in(2)) c.Bc = random.size(MOST);
        c.layouts[1] = draw_transposed(random, c.H, c.Nk, c.d, c.Bc);
        if (!c.layouts[1].panel) c.Bc = std::min(c.Bc, c.Nk);
    } else if (c.Nq <= c.part->few.queries && random.one_in(2)) {
        c.pairs = true;
        c.Bc = round_up(random.size(MOST), 2 * portable::lanes());
    }
    c.bf16 = c.part->takes_bf16() && c.layouts[1].column == 1 && !c.pairs && random.one_in(2);
    return c;
}

void describe(const Case& c) {
    c.tell(c.part->name, c.bf16 ? " in bf16" : "", c.lse ? ", lse" : "", c.pairs ? ", in pairs" : "", ", tile ",
           c.Br, " x ", c.Bc);
}

template <class T>
struct Result {
    std::vector<T> out, lse;
    double largest_score = 0;  // the largest magnitude of the finite scores
};

// Attention by its definition, one query at a time, in T: double gives the reference, float the error that is
// normal for float32. Sums run in the order of their terms, or in a random order if `random` is given.
template <class T>
Result<T> attend(const Case& c, const float* q, const float* k, const float* v, Random* random = nullptr) {
    Result<T> result;
    std::vector<T> p(static_cast<size_t>(c.Nk));
    const std::vector<int64_t> elements = order(c.d, random), keys = order(c.Nk, random);
    for (int64_t b = 0; b < c.B; b++)
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t i = 0; i < c.Nq; i++) {
                const int64_t n = c.seen(i);
                T m = -std::numeric_limits<T>::infinity(), l = 0;
                for (int64_t j = 0; j < n; j++) {
                    T s = 0;
                    const float *x = q + c.layouts[0].at(b, h, i, 0), *y = k + c.layouts[1].at(b, h, j, 0);
                    for (int64_t e : elements)
                        s += static_cast<T>(x[e]) * static_cast<T>(y[e * c.layouts[1].column]);
                    p[j] = static_cast<T>(c.scale) * s;
                    m = p[j] > m ? p[j] : m;
                    if (!std::isfinite(p[j])) continue;
                    const double score = std::fabs(static_cast<double>(p[j]));
                    result.largest_score = std::max(result.largest_score, score);
                }
                for (int64_t j : keys)
                    if (j < n) l += p[j] = std::exp(p[j] - m);
                for (int64_t e = 0; e < c.d; e++) {
                    T o = 0;
                    for (int64_t j : keys)
                        if (j < n) o += p[j] / l * static_cast<T>(v[c.layouts[2].at(b, h, j, 0) + e]);
                    result.out.push_back(o);
                }
                result.lse.push_back(m + std::log(l));
            }
    return result;
}

// K in panels of Bc keys, and V, both in bfloat16 pairs. What pads them is NaN.
struct Pairs {
    int64_t d, Bc, columns, K_head, V_head;  // of a head: in words
    Guarded k, v;

    Pairs(const Case& c, Random& random)
        : d(c.d),
          Bc(c.Bc),
          columns(round_up(d, 2 * portable::lanes())),
          K_head(round_up(c.Nk, Bc) * d / 2),
          V_head(c.Nk * columns / 2),
          k(c.B * c.H * K_head, random),
          v(c.B * c.H * V_head, random) {}

    void fill(const Case& c, const float* from_k, const float* from_v) {
        for (int64_t b = 0; b < c.B; b++)
            for (int64_t h = 0; h < c.H; h++)
                for (int64_t j = 0; j < c.Nk; j++)
                    for (int64_t e = 0; e < d; e++) {
                        float* panel = k.data + (b * c.H + h) * K_head + j / Bc * Bc * d / 2;
                        put(panel + e * Bc / 2, j % Bc, from_k[c.layouts[1].at(b, h, j, e)]);
                        float* row = v.data + (b * c.H + h) * V_head + j * columns / 2;
                        put(row, e, from_v[c.layouts[2].at(b, h, j, e)]);
                    }
        k.let(PROT_READ), v.let(PROT_READ);
    }

    static void put(float* row, int64_t column, float x) {
        const int64_t W = portable::lanes();
        float* word = row + column / (2 * W) * W + column % W;
        uint32_t bits, pair;
        std::memcpy(&bits, &x, sizeof bits), std::memcpy(&pair, word, sizeof pair);
        pair = column / W % 2 ? (pair & 0xffff) | (bits & 0xffff0000) : (pair & 0xffff0000) | bits >> 16;
        std::memcpy(word, &pair, sizeof pair);
    }
};

// Elements between guard pages, the last one directly before a gap or a page.
template <class Element>
struct GuardedArray {
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
Result<float> run_in(const Case& c, Random& random, const Element* q, const Element* k, const Element* v,
                     std::string& wrong) {
    const auto matrices = [&](int which, const Element* data) {
        const Layout& l = c.layouts[which];
        return MatricesOf<Element>{data, l.batch, l.head, l.row, l.column};
    };
    GuardedArray<Element> out(c.B * c.H * c.Nq * c.d, random);
    Guarded lse(c.B * c.H * c.Nq, random);
    AttentionOf<Element> a{};
    a.B = c.B, a.H = c.H, a.Nq = c.Nq, a.Nk = c.Nk, a.d = c.d;
    a.q = matrices(0, q), a.k = matrices(1, k), a.v = matrices(2, v);
    a.out = out.data;
    a.lse = c.lse ? lse.data : nullptr;
    a.causal = c.causal, a.scale = c.scale;
    a.Br = c.Br, a.Bc = c.Bc;
    a.threads = c.threads;
    [[maybe_unused]] std::optional<Pairs> pairs;
    if constexpr (std::is_same_v<Element, float>) {
        if (c.pairs) {
            pairs.emplace(c, random).fill(c, k, v);
            a.kv = CachePrecision::bf16;
            a.k = {pairs->k.data, c.H * pairs->K_head, pairs->K_head, c.d, c.Bc / 2};
            a.v = {pairs->v.data, c.H * pairs->V_head, pairs->V_head, pairs->columns / 2, 1};
        }
    }
    Guarded scratch(c.part->scratch(a), random);
    if (!c.lse) lse.let(PROT_NONE);
    c.part->attention(a, scratch.data);
    if (!c.lse) lse.let(PROT_READ);
    if (!out.memory.whole()) wrong += "; wrote beside out";
    if (!lse.whole()) wrong += "; wrote beside lse";
    if (!scratch.whole()) wrong += "; wrote beside its scratch";
    Result<float> result;
    for (int64_t i = 0; i < c.B * c.H * c.Nq * c.d; i++) result.out.push_back(widened(out.data[i]));
    if (c.lse) result.lse.assign(lse.data, lse.data + lse.n);
    return result;
}

Result<float> run(const Case& c, Random& random, const float* q, const float* k, const float* v,
                  std::string& wrong) {
    if (!c.bf16) return run_in<float>(c, random, q, k, v, wrong);
    const GuardedArray<Bf16> q16(q, c.floats(0), random), k16(k, c.floats(1), random),
        v16(v, c.floats(2), random);
    return run_in<Bf16>(c, random, q16.data, k16.data, v16.data, wrong);
}

// Describes what is wrong with the results of a case; empty if nothing is.
std::string hold(const Case& c, const Result<float>& got, const float* q, const float* k, const float* v) {
    const Result<double> right = attend<double>(c, q, k, v);
    // A bfloat16 output and bfloat16 weights are rounded by up to 2^-8 each.
    const double rounding = (c.bf16 ? 0x1p-7 : 0) + 0x1p-24 * right.largest_score;
    Random random(c.seed);
    std::vector<std::vector<float>> outs, lses;
    std::string wrong;
    // In a case of few scores, one order of summation may have almost no error: then others are tried too.
    for (int tried = 0; tried < ORDERS && (tried == 0 || !wrong.empty()); tried++) {
        Result<float> plain = attend<float>(c, q, k, v, tried ? &random : nullptr);
        outs.push_back(std::move(plain.out));
        lses.push_back(std::move(plain.lse));
        wrong = compare("out", got.out, right.out, allowance(right.out, outs, rounding), true);
        if (c.lse) wrong += compare("lse", got.lse, right.lse, allowance(right.lse, lses, 0), false);
    }
    return wrong;
}

// Runs a case and describes what is wrong; empty if nothing is.
std::string attempt(const Case& drawn, Random& random) {
    Case c = drawn;
    std::string wrong;
    Guarded q(c.floats(0), random), k(c.floats(1), random), v(c.floats(2), random);
    Guarded* const tensors[] = {&q, &k, &v};
    for (int which = 0; which < DOUT; which++)
        c.each(which, *tensors[which], [&](float& x, int64_t, int64_t, int64_t, int64_t) {
            x = c.draw_value(random);
            if (c.bf16) x = widened(rounded(x));
            // 300 such values have a sum in float32, with weights of up to 2^8.
            if (which == V && c.kind == HUGE_VALUES) x *= 0x1p112f;
        });
    if (c.kind == EQUAL || (c.kind == LARGE && random.one_in(4))) c.equal_keys(k);
    for (int which = 1; c.pairs && which < 3; which++)
        c.each(which, *tensors[which],
               [](float& x, int64_t, int64_t, int64_t, int64_t) { x = widened(rounded(x)); });
    if (c.kind == LARGE) {
        c.scale = random.one_in(2) ? 1.0f : -1.0f;
        const double most = attend<double>(c, q.data, k.data, v.data).largest_score;
        if (most > 0) c.scale *= static_cast<float>(1e4 / most);
        describe(c);
    }
    const auto read_only = [&](bool only) {
        for (Guarded* t : tensors) t->let(only ? PROT_READ : PROT_READ | PROT_WRITE);
    };

    read_only(true);
    Result<float> got = run(c, random, q.data, k.data, v.data, wrong);
    if (c.threads > 1 || random.one_in(4)) {
        Case other = c;
        other.threads = 1, other.lse = !c.lse;
        const Result<float> again = run(other, random, q.data, k.data, v.data, wrong);
        if (!same(got.out, again.out)) wrong += "; out depends on the threads, or on whether lse is wanted";
    }
    if (c.kind == BAD) {
        const Result<float> clean = got;
        read_only(false);
        for (int64_t n = random.from(1, 3); n > 0; n--) {
            const int which = static_cast<int>(random.from(Q, V));
            c.spoil(which, *tensors[which], random);
        }
        read_only(true);
        got = run(c, random, q.data, k.data, v.data, wrong);
        // A bad query reaches its row. A bad key or value may also reach rows that do not see it.
        std::vector<char> rows(static_cast<size_t>(c.B * c.H * c.Nq)), heads(static_cast<size_t>(c.B * c.H));
        for (int which = 0; which < 3; which++)
            c.each(which, *tensors[which], [&](float& x, int64_t b, int64_t h, int64_t i, int64_t) {
                if (std::isfinite(x)) return;
                if (which == 0)
                    rows[(b * c.H + h) * c.Nq + i] = 1;
                else
                    heads[b * c.H + h] = 1;
            });
        const Result<double> right = attend<double>(c, q.data, k.data, v.data);
        for (size_t n = 0; n < clean.out.size(); n++) {
            const size_t row = n / static_cast<size_t>(c.d), head = row / static_cast<size_t>(c.Nq);
            if (heads[head]) {
                if (!std::isnan(right.out[n]) && !std::isfinite(got.out[n]))
                    got.out[n] = static_cast<float>(right.out[n]);
                if (c.lse && !std::isnan(right.lse[row]) && !std::isfinite(got.lse[row]))
                    got.lse[row] = static_cast<float>(right.lse[row]);
            } else if (!rows[row] && !same(clean.out[n], got.out[n])) {
                wrong += "; a bad value reached a row that does not see it";
                break;
            }
        }
    }
    wrong += hold(c, got, q.data, k.data, v.data);
    for (const Guarded* t : tensors)
        if (!t->whole()) wrong += "; wrote beside an input";
    return wrong;
}

// Tries the helpers that only the model needs, with awkward sizes and bad values. Other tests compare its
// logits with PyTorch's.
std::string attempt_rows(Random& random) {
    const int64_t n = random.size(MOST), bad = random.one_in(4) ? random.from(0, n - 1) : -1;
    const bool biased = random.one_in(2);
    const float size = static_cast<float>(std::exp2(6 * random.uniform() - 3)), shift = random.normal() * size;
    Guarded x(n, random), y(n, random), weight(n, random), bias(n, random);
    for (int64_t i = 0; i < n; i++) {
        x.data[i] = i == bad ? random.any(BAD_VALUES) : random.normal() * size + shift;
        weight.data[i] = random.normal(), bias.data[i] = random.normal();
    }
    for (Guarded* input : {&x, &weight, &bias}) input->let(PROT_READ);
    portable::layer_norm(y.data, x.data, weight.data, biased ? bias.data : nullptr, n);
    double mean = 0, variance = 0, most = 0;
    for (int64_t i = 0; i < n; i++) mean += double{x.data[i]} / static_cast<double>(n);
    for (int64_t i = 0; i < n; i++) {
        variance += (x.data[i] - mean) * (x.data[i] - mean) / static_cast<double>(n);
        most = std::max(most, std::fabs(double{x.data[i]}));
    }
    std::string wrong;
    for (int64_t i = 0; i < n && wrong.empty(); i++) {
        const double factor = weight.data[i] / std::sqrt(variance + 1e-5);
        const double exact = (x.data[i] - mean) * factor + (biased ? bias.data[i] : 0);
        const bool near = std::fabs(y.data[i] - exact) <= 4e-6 * most * std::fabs(factor) + 1e-6;
        if (bad < 0 ? !near : !std::isnan(y.data[i]))
            wrong = "; layer_norm of " + std::to_string(n) + " is wrong at " + std::to_string(i);
    }
    x.let(PROT_READ | PROT_WRITE);
    std::vector<float> before(x.data, x.data + n);
    portable::gelu(x.data, n);
    for (int64_t i = 0; i < n; i++) {
        const double exact = before[i] * std::erfc(-before[i] / std::sqrt(2.0)) / 2, got = x.data[i];
        const bool near = got == exact || std::fabs(got - exact) <= 1e-7 + 3e-7 * std::fabs(exact);
        if (std::isnan(exact) ? !std::isnan(got) : !near) {
            wrong += "; gelu of " + std::to_string(before[i]) + " is " + std::to_string(got);
            break;
        }
    }
    for (const Guarded* t : {&x, &y, &weight, &bias})
        if (!t->whole()) wrong += "; wrote beside a row";
    return wrong;
}

// Tries the product with int8 weights: each digit and scale of its rows, and its sums against exact whole
// numbers. A result may err by a rounding of each group's sum, of each product with a scale and of each
// addition.
std::string attempt_int8(Random& random) {
    const int64_t depth = random.size(MOST), rows = random.from(1, 9), W = portable::lanes();
    const int64_t cols = W * random.from(1, 9), ldB = cols + (random.one_in(2) ? W : 0),
                  ldC = cols + random.from(0, 3);
    const int64_t blocks = portable::int8_blocks(depth), words = portable::fixed_words(depth),
                  gap = random.from(0, 3);
    const int64_t ldA = words + gap, panel_rows = blocks + 2 * portable::int8_groups(depth);
    const int64_t bad = random.one_in(4) ? random.from(0, rows - 1) : -1;
    const bool add = random.one_in(2);
    std::string wrong;

    Guarded x(rows * depth, random), a(rows * ldA - gap, random), b(panel_rows * ldB - (ldB - cols), random);
    Guarded c((rows - 1) * ldC + cols, random);
    std::vector<double> number(static_cast<size_t>(rows * depth));  // x as multiples of its row's scale
    std::vector<float> scale(static_cast<size_t>(rows)), before(static_cast<size_t>(c.n));
    for (int64_t i = 0; i < rows; i++) {
        const float size = static_cast<float>(std::exp2(static_cast<double>(random.from(-110, 100))));
        float* row = x.data + i * depth;
        for (int64_t k = 0; k < depth; k++) row[k] = random.one_in(9) ? 0 : random.normal() * size;
        if (random.one_in(4)) row[random.from(0, depth - 1)] = 16 * size * (1 - 0x1p-24f);  // rounded up to 16
        if (i == bad) row[random.from(0, depth - 1)] = random.any(BAD_VALUES);
    }
    x.let(PROT_READ);
    uint32_t* const A = reinterpret_cast<uint32_t*>(a.data);
    for (int64_t i = 0; i < rows; i++) {
        const float* row = x.data + i * depth;
        portable::to_fixed(A + i * ldA, row, depth);
        std::memcpy(&scale[i], A + i * ldA + 3 * blocks, sizeof scale[i]);
        if (i == bad && !std::isnan(scale[i])) wrong += "; a bad row has a scale";
        double largest = 0;
        for (int64_t k = 0; k < depth; k++) largest = std::max(largest, std::fabs(double{row[k]}));
        const int bits = portable::INT8_BITS;
        for (int64_t k = 0; k < depth && i != bad && wrong.empty(); k++) {
            int64_t got = 0;
            if (portable::INT8_PAIRS) {
                got = A[i * ldA + k % 2 * blocks + k / 4] >> 8 * (k & 2) & 65535;
                if (got > 16383) wrong = "; a number has more than 14 bits";
            }
            for (int digit = portable::INT8_PAIRS ? 2 : 0; digit < 3; digit++) {
                const uint32_t byte = A[i * ldA + digit * blocks + k / 4] >> 8 * (k % 4) & 255;
                if (byte > 127) wrong = "; a digit has more than 7 bits";
                got = 128 * got + byte;
            }
            number[i * depth + k] = static_cast<double>(got - (1 << (bits - 1)));
            if (number[i * depth + k] != std::nearbyint(row[k] / double{scale[i]}))
                wrong = "; number " + std::to_string(k) + " is not the nearest";
        }
        const double most = largest / scale[i];
        if (i != bad && (most > (1 << (bits - 1)) || (most < (1 << (bits - 3)) && scale[i] > 0x1p-126f)))
            wrong += "; a scale does not fit its row";
    }
    a.let(PROT_READ);

    const int64_t groups = portable::int8_groups(depth);
    std::vector<int> weight(static_cast<size_t>(depth * cols));
    std::vector<float> of_group(static_cast<size_t>(groups * cols));
    for (int64_t col = 0; col < cols; col++) {
        float* word = b.data + col;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = g * portable::INT8_GROUP,
                          end = std::min<int64_t>(depth, first + portable::INT8_GROUP);
            const bool extreme = random.one_in(8);
            int32_t sum = 0;
            for (int64_t k = first; k < end; k++)
                sum += weight[k * cols + col] = static_cast<int>(extreme ? 127 : random.from(-127, 127));
            const int32_t start = -64 * sum;
            std::memcpy(word, &start, sizeof start);
            word[ldB] = of_group[g * cols + col] = random.one_in(9) ? 0 : std::fabs(random.normal());
            word += 2 * ldB;
            for (int64_t k = first; k < end; k += 4, word += ldB) {
                uint32_t bytes = 0;
                for (int64_t j = k; j < std::min(end, k + 4); j++)
                    bytes |= (static_cast<uint32_t>(weight[j * cols + col]) & 255) << 8 * (j - k);
                std::memcpy(word, &bytes, sizeof bytes);
            }
        }
    }
    b.let(PROT_READ);
    for (int64_t i = 0; i < c.n; i++) {
        if (add) c.data[i] = random.normal();
        before[i] = c.data[i];
    }
    portable::multiply_int8({c.data, ldC}, {A, ldA}, {reinterpret_cast<const uint32_t*>(b.data), ldB}, rows,
                            cols, depth, add);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t col = 0; col < cols && wrong.empty(); col++) {
            const float got = c.data[i * ldC + col];
            if (i == bad) {
                if (!std::isnan(got)) wrong = "; a bad row's product is not NaN";
                continue;
            }
            double exact = add ? double{before[i * ldC + col]} : 0, size = std::fabs(exact);
            for (int64_t g = 0; g < groups; g++) {
                double sum = 0;  // of whole numbers below 2^53
                for (int64_t k = g * portable::INT8_GROUP;
                     k < std::min<int64_t>(depth, (g + 1) * portable::INT8_GROUP); k++)
                    sum += number[i * depth + k] * weight[k * cols + col];
                const double term = sum * double{of_group[g * cols + col]} * double{scale[i]};
                exact += term, size += std::fabs(term);
            }
            // In the digits' sums numbers have an offset: 2^(portable::INT8_BITS - 1) a weight, which cancels
            // exactly.
            if (!(std::fabs(got - exact) <= 0x1p-24 * static_cast<double>(groups + 4) * size + 1e-37))
                wrong = "; int8 gives " + std::to_string(got) + ", right is " + std::to_string(exact);
        }
    for (int64_t i = 0; i < rows && wrong.empty(); i++) {  // alone, each row has the same result
        Guarded one(cols, random);
        for (int64_t col = 0; col < cols; col++) one.data[col] = before[i * ldC + col];
        portable::multiply_int8({one.data, cols}, {A + i * ldA, ldA},
                                {reinterpret_cast<const uint32_t*>(b.data), ldB}, 1, cols, depth, add);
        for (int64_t col = 0; col < cols; col++)
            if (!same(one.data[col], c.data[i * ldC + col])) wrong = "; int8 depends on the number of rows";
        if (!one.whole()) wrong += "; wrote beside a row";
    }
    for (int64_t i = 0; i < rows - 1; i++)
        for (int64_t j = cols; j < ldC; j++)
            if (!same(c.data[i * ldC + j], before[i * ldC + j])) wrong += "; wrote between rows";
    for (const Guarded* t : {&x, &a, &b, &c})
        if (!t->whole()) wrong += "; wrote beside a matrix";
    return wrong;
}

// Few rows together have the bits of each row alone, whose product attention's cases check.
std::string attempt_few(Random& random) {
    const int64_t depth = random.size(MOST), rows = random.from(1, portable::FEW_ROWS), W = portable::lanes();
    const bool pairs = random.one_in(2), add = random.one_in(2);
    const int64_t cols = (pairs ? 2 : 1) * W * random.from(1, 9), words = cols / (pairs ? 2 : 1);
    const int64_t ldA = depth + random.from(0, 3), ldB = words + random.from(0, 3),
                  ldC = cols + random.from(0, 3);
    Guarded a((rows - 1) * ldA + depth, random), b((depth - 1) * ldB + words, random),
        c((rows - 1) * ldC + cols, random), one(cols, random);
    for (Guarded* input : {&a, &b}) {
        for (int64_t i = 0; i < input->n; i++) input->data[i] = random.normal();
        input->let(PROT_READ);
    }
    if (add)
        for (int64_t i = 0; i < c.n; i++) c.data[i] = random.normal();
    const std::vector<float> before(c.data, c.data + c.n);
    const portable::Bf16Pairs in_pairs{reinterpret_cast<const uint32_t*>(b.data), ldB};
    if (pairs)
        portable::multiply_few({c.data, ldC}, {a.data, ldA}, in_pairs, rows, cols, depth, add);
    else
        portable::multiply_few({c.data, ldC}, {a.data, ldA}, {b.data, ldB}, rows, cols, depth, add);
    std::string wrong;
    for (int64_t i = 0; i < rows; i++) {
        const float* row = a.data + i * ldA;
        std::copy_n(before.data() + i * ldC, cols, one.data);
        if (pairs)
            portable::multiply_bf16({one.data, cols}, {row, ldA}, in_pairs, 1, cols, depth, add);
        else if (add)
            portable::multiply_add({one.data, cols}, {row, ldA, 1}, {b.data, ldB}, 1, cols, depth, depth);
        else
            portable::multiply({one.data, cols}, {row, ldA, 1}, {b.data, ldB}, 1, cols, depth);
        for (int64_t j = 0; j < cols && wrong.empty(); j++)
            if (!same(one.data[j], c.data[i * ldC + j])) wrong = "; few rows differ from one row";
        for (int64_t j = cols; j < ldC && i + 1 < rows; j++)
            if (!same(c.data[i * ldC + j], before[i * ldC + j])) wrong += "; wrote between few rows";
    }
    for (const Guarded* t : {&a, &b, &c, &one})
        if (!t->whole()) wrong += "; few rows wrote beside a matrix";
    return wrong;
}

}  // namespace

int main(int argc, char** argv) {
    return run_seeds(argc, argv, [](uint64_t seed, int threads) {
        Random random(seed);
        const Case c = draw(seed, random, threads);
        describe(c);
        return attempt(c, random) + attempt_rows(random) + attempt_int8(random) + attempt_few(random);
    });
}
