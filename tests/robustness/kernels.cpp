// Generated cases for the kernels, in memory between guard pages, compared with float64.
//
//   kernels SEED COUNT [THREADS]
//
// runs cases as run_seeds() says. The bound is that of tests/oracle.py: at most twice the error of a plain
// float32 computation, plus 1e-6.
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
    c.lse = random.one_in(2);
    // part 4 divides many keys between threads
    c.draw_sizes(random, random.one_in(40) ? 20'000'000 : 1'000'000, random.one_in(4), random.one_in(8));
    const int64_t Br = random.one_in(8) ? 1 << 20 : random.size(MOST);
    const int64_t Bc = random.one_in(8) ? 1 << 20 : random.size(MOST);
    c.Br = std::min(Br, c.Nq), c.Bc = std::min(Bc, c.Nk);
    c.draw_rest(random, threads, DOUT, {LARGE, DENORMAL, EQUAL, HUGE_VALUES, BAD});
    if (c.Nq <= c.part->few.queries && random.one_in(2)) {
        // In the decoder a panel may be larger than the number of keys.
        if (random.one_in(2)) c.Bc = random.size(MOST);
        c.layouts[K] = draw_transposed(random, c.H, c.Nk, c.d, c.Bc);
        if (!c.layouts[K].panel) c.Bc = std::min(c.Bc, c.Nk);
    } else if (c.Nq <= c.part->few.queries && random.one_in(2)) {
        c.pairs = true;
        c.Bc = round_up(random.size(MOST), 2 * portable::lanes());
    }
    c.bf16 = c.part->takes_bf16() && c.layouts[K].column == 1 && !c.pairs && random.one_in(2);
    return c;
}

void describe(const Case& c) {
    c.tell(c.part->name, c.bf16 ? " in bf16" : "", c.lse ? ", lse" : "", c.pairs ? ", in pairs" : "", ", tile ",
           c.Br, " x ", c.Bc);
}

template <class T> struct Result {
    std::vector<T> out, lse;
    double largest_score = 0;  // the largest magnitude of the finite scores
};

// Attention by its definition, one query at a time, in T: double gives the reference, float the error that is
// normal for float32. Sums run in the order of their terms, or in a random order if `random` is given.
template <class T> Result<T> attend(const Case& c, const Inputs& in, Random* random = nullptr) {
    Result<T> result;
    std::vector<T> p(static_cast<size_t>(c.Nk));
    const std::vector<int64_t> elements = order(c.d, random), keys = order(c.Nk, random);
    for (int64_t head = 0; head < c.B * c.H; head++)
        for (int64_t i = 0; i < c.Nq; i++) {
            const int64_t n = c.seen(i);
            const float* q = in.row(Q, head, i);
            T m = -std::numeric_limits<T>::infinity(), l = 0;
            for (int64_t j = 0; j < n; j++) {
                const float* k = in.row(K, head, j);
                T score = 0;
                for (int64_t e : elements)
                    score += static_cast<T>(q[e]) * static_cast<T>(k[e * c.layouts[K].column]);
                p[j] = static_cast<T>(c.scale) * score;
                m = p[j] > m ? p[j] : m;
                if (std::isfinite(p[j]))
                    result.largest_score = std::max(result.largest_score, std::fabs(static_cast<double>(p[j])));
            }
            for (int64_t j : keys)
                if (j < n) l += p[j] = std::exp(p[j] - m);
            for (int64_t e = 0; e < c.d; e++) {
                T o = 0;
                for (int64_t j : keys)
                    if (j < n) o += p[j] / l * static_cast<T>(in.row(V, head, j)[e]);
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
        for (int64_t head = 0; head < c.B * c.H; head++)
            for (int64_t j = 0; j < c.Nk; j++)
                for (int64_t e = 0; e < d; e++) {
                    put(k.data + head * K_head + (j / Bc * d + e) * Bc / 2, j % Bc,
                        from_k[c.layouts[K].at(head / c.H, head % c.H, j, e)]);
                    put(v.data + head * V_head + j * columns / 2, e,
                        from_v[c.layouts[V].at(head / c.H, head % c.H, j, e)]);
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
Result<float> run_in(const Case& c, Random& random, const Element* q, const Element* k, const Element* v,
                     std::string& wrong) {
    GuardedArray<Element> out(c.B * c.H * c.Nq * c.d, random);
    Guarded lse(c.B * c.H * c.Nq, random);
    AttentionOf<Element> a{c.sizes(c.Br, c.Bc), c.matrices(Q, q), c.matrices(K, k), c.matrices(V, v), out.data};
    a.lse = c.lse ? lse.data : nullptr;
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

Result<float> run(const Case& c, Random& random, const Inputs& in, std::string& wrong) {
    const float *q = in[Q].data, *k = in[K].data, *v = in[V].data;
    if (!c.bf16) return run_in<float>(c, random, q, k, v, wrong);
    const GuardedArray<Bf16> q16(q, c.floats(Q), random), k16(k, c.floats(K), random),
        v16(v, c.floats(V), random);
    return run_in<Bf16>(c, random, q16.data, k16.data, v16.data, wrong);
}

// Describes what is wrong with the results of a case; empty if nothing is.
std::string hold(const Case& c, const Result<float>& got, const Inputs& in) {
    const Result<double> right = attend<double>(c, in);
    // A bfloat16 output and bfloat16 weights are rounded by up to 2^-8 each.
    const double rounding = (c.bf16 ? 0x1p-7 : 0) + 0x1p-24 * right.largest_score;
    Random random(c.seed);
    std::vector<std::vector<float>> outs, lses;
    std::string wrong;
    // In a case of few scores, one order of summation may have almost no error: then others are tried too.
    for (int tried = 0; tried < ORDERS && (tried == 0 || !wrong.empty()); tried++) {
        Result<float> plain = attend<float>(c, in, tried ? &random : nullptr);
        outs.push_back(std::move(plain.out));
        lses.push_back(std::move(plain.lse));
        wrong = compare("out", got.out, right.out, allowance(right.out, outs, rounding), true);
        if (c.lse) wrong += compare("lse", got.lse, right.lse, allowance(right.lse, lses, 0), false);
    }
    return wrong;
}

// Whether a bad value reached a row that does not see it. A bad query reaches its row. A bad key or value may
// also reach rows that do not see it: such numbers of `got` become the right ones.
bool reached(const Case& c, const Inputs& in, const Result<float>& clean, Result<float>& got) {
    std::vector<char> rows(static_cast<size_t>(c.B * c.H * c.Nq)), heads(static_cast<size_t>(c.B * c.H));
    for (int which = 0; which < DOUT; which++)
        c.each(which, in[which], [&](float& x, int64_t b, int64_t h, int64_t i, int64_t) {
            if (std::isfinite(x)) return;
            if (which == Q)
                rows[(b * c.H + h) * c.Nq + i] = 1;
            else
                heads[b * c.H + h] = 1;
        });
    const Result<double> right = attend<double>(c, in);
    for (size_t n = 0; n < clean.out.size(); n++) {
        const size_t row = n / static_cast<size_t>(c.d), head = row / static_cast<size_t>(c.Nq);
        if (heads[head]) {
            if (!std::isnan(right.out[n]) && !std::isfinite(got.out[n]))
                got.out[n] = static_cast<float>(right.out[n]);
            if (c.lse && !std::isnan(right.lse[row]) && !std::isfinite(got.lse[row]))
                got.lse[row] = static_cast<float>(right.lse[row]);
        } else if (!rows[row] && !same(clean.out[n], got.out[n])) {
            return true;
        }
    }
    return false;
}

// Runs a case of attention and describes what is wrong; empty if nothing is.
std::string attempt_attention(const Case& drawn, Random& random) {
    Case c = drawn;
    std::string wrong;
    const Inputs in(c, DOUT, random);
    for (int which = 0; which < DOUT; which++)
        in.each(which, [&](float& x) {
            if (c.bf16 || (c.pairs && which != Q)) x = widened(rounded(x));
            // 300 such values have a sum in float32, with weights of up to 2^8.
            if (which == V && c.kind == HUGE_VALUES) x *= 0x1p112f;
        });
    if (c.kind == EQUAL || (c.kind == LARGE && random.one_in(4))) c.equal_keys(in[K]);
    if (c.kind == LARGE) {
        c.scale = 1;
        c.scale = large_scale(random, attend<double>(c, in).largest_score);
        describe(c);
    }
    in.let(PROT_READ);
    Result<float> got = run(c, random, in, wrong);
    if (c.threads > 1 || random.one_in(4)) {
        Case other = c;
        other.threads = 1, other.lse = !c.lse;
        const Result<float> again = run(other, random, in, wrong);
        if (!same(got.out, again.out)) wrong += "; out depends on the threads, or on whether lse is wanted";
    }
    if (c.kind == BAD) {
        const Result<float> clean = got;
        in.let(PROT_READ | PROT_WRITE);
        for (int64_t n = random.from(1, 3); n > 0; n--) {
            const int which = static_cast<int>(random.from(Q, V));
            c.spoil(which, in[which], random);
        }
        in.let(PROT_READ);
        got = run(c, random, in, wrong);
        if (reached(c, in, clean, got)) wrong += "; a bad value reached a row that does not see it";
    }
    return wrong + hold(c, got, in) + in.beside();
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

// The product with int8 weights: each digit and scale of its rows, and its sums against exact whole numbers. A
// result may err by a rounding of each group's sum, of each product with a scale and of each addition.
class Int8Case {
  public:
    explicit Int8Case(Random& random) : random(random) {}

    std::string attempt() {
        draw_rows(), draw_weights();
        for (int64_t i = 0; i < c.n; i++) {
            if (add) c.data[i] = random.normal();
            before[i] = c.data[i];
        }
        portable::multiply_int8({c.data, ldC}, {A, ldA}, panel(), rows, cols, depth, add);
        for (int64_t i = 0; i < rows && wrong.empty(); i++) check_sums(i), check_alone(i);
        for (int64_t i = 0; i < rows - 1; i++)
            for (int64_t j = cols; j < ldC; j++)
                if (!same(c.data[i * ldC + j], before[i * ldC + j])) wrong += "; wrote between rows";
        for (const Guarded* t : {&x, &a, &b, &c})
            if (!t->whole()) wrong += "; wrote beside a matrix";
        return wrong;
    }

  private:
    static constexpr int BITS = portable::INT8_BITS;
    Random& random;
    const int64_t depth = random.size(MOST), rows = random.from(1, 9), W = portable::lanes();
    const int64_t cols = W * random.from(1, 9), ldB = cols + (random.one_in(2) ? W : 0),
                  ldC = cols + random.from(0, 3);
    const int64_t blocks = portable::int8_blocks(depth), groups = portable::int8_groups(depth);
    const int64_t gap = random.from(0, 3), ldA = portable::fixed_words(depth) + gap;
    const int64_t bad = random.one_in(4) ? random.from(0, rows - 1) : -1;
    const bool add = random.one_in(2);
    Guarded x{rows * depth, random}, a{rows * ldA - gap, random};
    Guarded b{(blocks + 2 * groups) * ldB - (ldB - cols), random}, c{(rows - 1) * ldC + cols, random};
    uint32_t* const A = reinterpret_cast<uint32_t*>(a.data);
    std::vector<double> number = std::vector<double>(rows * depth);  // x as multiples of its row's scale
    std::vector<float> scale = std::vector<float>(rows), before = std::vector<float>(c.n);
    std::vector<int> weight = std::vector<int>(depth * cols);
    std::vector<float> of_group = std::vector<float>(groups * cols);
    std::string wrong;

    portable::Int8Panel panel() const { return {reinterpret_cast<const uint32_t*>(b.data), ldB}; }

    void draw_rows() {
        for (int64_t i = 0; i < rows; i++) {
            const float size = static_cast<float>(std::exp2(static_cast<double>(random.from(-110, 100))));
            float* row = x.data + i * depth;
            for (int64_t k = 0; k < depth; k++) row[k] = random.one_in(9) ? 0 : random.normal() * size;
            if (random.one_in(4))
                row[random.from(0, depth - 1)] = 16 * size * (1 - 0x1p-24f);  // rounded up to 16
            if (i == bad) row[random.from(0, depth - 1)] = random.any(BAD_VALUES);
        }
        x.let(PROT_READ);
        for (int64_t i = 0; i < rows; i++) {
            const float* row = x.data + i * depth;
            portable::to_fixed(A + i * ldA, row, depth);
            std::memcpy(&scale[i], A + i * ldA + 3 * blocks, sizeof scale[i]);
            if (i == bad && !std::isnan(scale[i])) wrong += "; a bad row has a scale";
            if (i != bad) check_digits(i, row);
        }
        a.let(PROT_READ);
    }

    void check_digits(int64_t i, const float* row) {
        double largest = 0;
        for (int64_t k = 0; k < depth; k++) largest = std::max(largest, std::fabs(double{row[k]}));
        for (int64_t k = 0; k < depth && wrong.empty(); k++) {
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
            number[i * depth + k] = static_cast<double>(got - (1 << (BITS - 1)));
            if (number[i * depth + k] != std::nearbyint(row[k] / double{scale[i]}))
                wrong = "; number " + std::to_string(k) + " is not the nearest";
        }
        const double most = largest / scale[i];
        if (most > (1 << (BITS - 1)) || (most < (1 << (BITS - 3)) && scale[i] > 0x1p-126f))
            wrong += "; a scale does not fit its row";
    }

    void draw_weights() {
        for (int64_t col = 0; col < cols; col++) {
            float* word = b.data + col;
            for (int64_t g = 0; g < groups; g++) {
                const int64_t first = g * portable::INT8_GROUP,
                              end = std::min(depth, first + portable::INT8_GROUP);
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
    }

    void check_sums(int64_t i) {
        for (int64_t col = 0; col < cols && wrong.empty(); col++) {
            const float got = c.data[i * ldC + col];
            if (i == bad) {
                if (!std::isnan(got)) wrong = "; a bad row's product is not NaN";
                continue;
            }
            double exact = add ? double{before[i * ldC + col]} : 0, size = std::fabs(exact);
            for (int64_t g = 0; g < groups; g++) {
                double sum = 0;  // of whole numbers below 2^53
                for (int64_t k = g * portable::INT8_GROUP; k < std::min(depth, (g + 1) * portable::INT8_GROUP);
                     k++)
                    sum += number[i * depth + k] * weight[k * cols + col];
                const double term = sum * double{of_group[g * cols + col]} * double{scale[i]};
                exact += term, size += std::fabs(term);
            }
            if (!(std::fabs(got - exact) <= 0x1p-24 * static_cast<double>(groups + 4) * size + 1e-37))
                wrong = "; int8 gives " + std::to_string(got) + ", right is " + std::to_string(exact);
        }
    }

    void check_alone(int64_t i) {
        Guarded one(cols, random);
        std::copy_n(before.data() + i * ldC, cols, one.data);
        portable::multiply_int8({one.data, cols}, {A + i * ldA, ldA}, panel(), 1, cols, depth, add);
        for (int64_t col = 0; col < cols; col++)
            if (!same(one.data[col], c.data[i * ldC + col])) wrong = "; int8 depends on the number of rows";
        if (!one.whole()) wrong += "; wrote beside a row";
    }
};

std::string attempt(const Case& c, Random& random) {
    return attempt_attention(c, random) + attempt_rows(random) + Int8Case(random).attempt();
}

}  // namespace

int main(int argc, char** argv) { return run_cases(argc, argv, draw, attempt); }
