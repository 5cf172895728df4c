// What the programs of generated cases for the kernels share: random numbers and memory layouts, memory between
// guard pages, and the error that a result may have.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention.h"
#include "parts.h"
#include "running.h"
#include "threads.h"

// New threads for each call: they share only what the kernels pass to them. One source of a program includes
// this file, and the kernels call this.
void on_threads(int threads, const std::function<void(int)>& body) {
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) others.emplace_back(body, thread);
    body(0);
    for (std::thread& other : others) other.join();
}

// Sizes of vectors, panels, strips and tiles.
inline constexpr int64_t EDGES[] = {1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};
inline constexpr int64_t MOST = 300;
inline constexpr int ORDERS = 8;  // orders of summation that a plain computation may try

class Random {  // splitmix64: the same numbers with every compiler and library
  public:
    explicit Random(uint64_t seed) : state(seed) {}

    uint64_t bits() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int64_t from(int64_t least, int64_t most) {
        return least + static_cast<int64_t>(bits() % static_cast<uint64_t>(most - least + 1));
    }
    bool one_in(int64_t n) { return from(1, n) == 1; }
    template <class T, size_t N> T any(const T (&of)[N]) { return of[bits() % N]; }
    double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    float normal() {
        double sum = -6;
        for (int i = 0; i < 12; i++) sum += uniform();
        return static_cast<float>(sum);
    }
    // One of EDGES, a neighbour of one, or any size.
    int64_t size(int64_t most) {
        const int64_t n = one_in(4) ? from(1, most) : any(EDGES) + from(-1, 1);
        return std::min(std::max<int64_t>(n, 1), most);
    }

  private:
    uint64_t state;
};

// n floats between two guard pages: directly after the first page, directly before the second, or some floats
// after the first. The floats and the gaps beside them are filled with a NaN of fixed bits.
class Guarded {
  public:
    Guarded(int64_t n, Random& random) : n(n) {
        const int64_t page = sysconf(_SC_PAGESIZE), floats = page / static_cast<int64_t>(sizeof(float));
        const int64_t at = random.from(0, 2), shift = at == 2 ? random.from(1, 17) : 0;
        inner = (n + shift + floats - 1) / floats * floats;
        bytes = static_cast<size_t>(inner * static_cast<int64_t>(sizeof(float)) + 2 * page);
        base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (base == MAP_FAILED) {
            std::perror("mmap");
            std::exit(3);
        }
        first = reinterpret_cast<float*>(static_cast<char*>(base) + page);
        for (int64_t i = 0; i < inner; i++) std::memcpy(first + i, &OURS, sizeof OURS);
        data = at == 0 ? first + inner - n : first + shift;
        protect(base, page, PROT_NONE), protect(first + inner, page, PROT_NONE);
    }
    Guarded(const Guarded&) = delete;
    ~Guarded() { munmap(base, bytes); }

    float* data;
    const int64_t n;

    void let(int access) { protect(first, inner * static_cast<int64_t>(sizeof(float)), access); }

    // Whether the gaps beside the floats are unchanged.
    bool whole() const {
        for (int64_t i = 0; i < inner; i++)
            if ((first + i < data || first + i >= data + n) && std::memcmp(first + i, &OURS, sizeof OURS) != 0)
                return false;
        return true;
    }

  private:
    static constexpr uint32_t OURS = 0x7fc5a5a5;
    void* base;
    float* first;
    int64_t inner;
    size_t bytes;

    static void protect(void* at, int64_t length, int access) {
        if (mprotect(at, static_cast<size_t>(length), access) == 0) return;
        std::perror("mprotect");
        std::exit(3);
    }
};

// The memory layout of a (B, H, N, d) tensor.
struct Layout {
    const char* name;
    int64_t batch, head, row, column, panel;  // panel: keys in a panel of K, 0 without panels

    int64_t at(int64_t b, int64_t h, int64_t i, int64_t c) const {
        const int64_t before = b * batch + h * head + c * column;
        return panel ? before + i / panel * panel * row + i % panel : before + i * row;
    }
};

inline Layout draw_layout(Random& random, int64_t H, int64_t N, int64_t d) {
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

enum Kind { PLAIN, LARGE, DENORMAL, EQUAL, HUGE_VALUES, BAD };
inline constexpr const char* KINDS[] = {"plain",      "scores of 1e4",  "denormals",
                                        "equal keys", "values of 1e34", "bad values"};
inline constexpr float BAD_VALUES[] = {std::numeric_limits<float>::quiet_NaN(),
                                       std::numeric_limits<float>::infinity(),
                                       -std::numeric_limits<float>::infinity()};

// A case of part 4's backward pass, or of a part's forward pass, which has no dout.
enum Input { Q, K, V, DOUT, MOST_INPUTS };

struct AttentionCase {
    uint64_t seed;
    int64_t B, H, Nq, Nk, d;
    int threads;
    bool causal;
    Kind kind;
    float scale;
    Layout layouts[MOST_INPUTS];

    int64_t rows(int which) const { return which == K || which == V ? Nk : Nq; }
    int64_t seen(int64_t i) const { return causal ? i + 1 + (Nk - Nq) : Nk; }
    int64_t floats(int which) const {
        if (layouts[which].panel) return B * layouts[which].batch;  // the last panel is padded
        return layouts[which].at(B - 1, H - 1, rows(which) - 1, d - 1) + 1;
    }
    // Draws the sizes of a case that takes about `work` multiplications.
    void draw_sizes(Random& random, int64_t work, bool few_queries, bool many_keys) {
        causal = random.one_in(2);
        do {
            B = random.from(1, 2), H = random.from(1, 3);
            Nq = few_queries ? random.from(1, part4::FEW + 1) : random.size(MOST);
            Nk = random.one_in(2) ? Nq : many_keys ? random.from(2040, 5000) : random.size(MOST);
            if (causal && Nk < Nq) std::swap(Nq, Nk);
            d = random.size(random.one_in(10) ? MOST : 130);
        } while (B * H * Nq * Nk * d > work);
    }
    // Their part of a call.
    AttentionSizes sizes(int64_t Br, int64_t Bc) const {
        return {B, H, Nq, Nk, d, causal, scale, std::min(Br, Nq), Bc, threads};
    }
    template <class Element> MatricesOf<Element> matrices(int which, const Element* data) const {
        const Layout& l = layouts[which];
        return {data, l.batch, l.head, l.row, l.column};
    }
    // Calls visit(number, b, h, i, e) for each number of an input.
    template <class Visit> void each(int which, Guarded& input, Visit visit) const {
        for (int64_t b = 0; b < B; b++)
            for (int64_t h = 0; h < H; h++)
                for (int64_t i = 0; i < rows(which); i++)
                    for (int64_t e = 0; e < d; e++)
                        visit(input.data[layouts[which].at(b, h, i, e)], b, h, i, e);
    }

    template <size_t N> void draw_rest(Random& random, int most_threads, int inputs, const Kind (&kinds)[N]) {
        threads = most_threads == 1 ? 1 : static_cast<int>(random.from(1, most_threads));
        kind = random.one_in(2) ? PLAIN : random.any(kinds);
        const float usual = 1 / std::sqrt(static_cast<float>(d)), scales[] = {usual, usual, usual, 0, -usual};
        scale = random.any(scales);
        for (int which = 0; which < inputs; which++) layouts[which] = draw_layout(random, H, rows(which), d);
    }
    float draw_value(Random& random) const {
        const float normal = random.normal();
        return kind == DENORMAL && random.one_in(2) ? normal * 1e-40f : normal;
    }
    // Makes all keys of a head the first one.
    void equal_keys(Guarded& k) const {
        each(K, k, [&](float& x, int64_t b, int64_t h, int64_t, int64_t e) {
            x = k.data[layouts[K].at(b, h, 0, e)];
        });
    }
    // Puts a bad value somewhere into an input.
    void spoil(int which, Guarded& input, Random& random) const {
        const int64_t b = random.from(0, B - 1), h = random.from(0, H - 1);
        const int64_t i = random.from(0, rows(which) - 1), e = random.from(0, d - 1);
        input.data[layouts[which].at(b, h, i, e)] = random.any(BAD_VALUES);
    }
    template <class... Words> void tell(const Words&... words) const {
        set_running(seed, words..., ", B ", B, ", H ", H, ", Nq ", Nq, ", Nk ", Nk, ", d ", d,
                    causal ? ", causal" : ", full", ", threads ", threads, ", ", KINDS[kind], ", scale ", scale,
                    "; q: ", layouts[Q].name, ", k: ", layouts[K].name, ", v: ", layouts[V].name);
    }
};

// The inputs of a case, drawn, between guard pages.
class Inputs {
  public:
    Inputs(const AttentionCase& c, int count, Random& random) : c(c) {
        for (int which = 0; which < count; which++) {
            tensors.push_back(std::make_unique<Guarded>(c.floats(which), random));
            each(which, [&](float& x) { x = c.draw_value(random); });
        }
    }
    Guarded& operator[](int which) const { return *tensors[static_cast<size_t>(which)]; }
    const float* row(int which, int64_t head, int64_t i) const {
        return (*this)[which].data + c.layouts[which].at(head / c.H, head % c.H, i, 0);
    }
    template <class Change> void each(int which, const Change& change) const {
        c.each(which, (*this)[which], [&](float& x, int64_t, int64_t, int64_t, int64_t) { change(x); });
    }
    void let(int access) const {
        for (const auto& t : tensors) t->let(access);
    }
    // What is wrong beside the tensors; empty if nothing is.
    std::string beside() const {
        for (const auto& t : tensors)
            if (!t->whole()) return "; wrote beside an input";
        return "";
    }

  private:
    const AttentionCase& c;
    std::vector<std::unique_ptr<Guarded>> tensors;
};

// A scale, perhaps negative, with which the largest score is 1e4; largest: that of the scale 1.
inline float large_scale(Random& random, double largest) {
    const float sign = random.one_in(2) ? 1.0f : -1.0f;
    return largest > 0 ? sign * static_cast<float>(1e4 / largest) : sign;
}

// 0 to n - 1, shuffled if `random` is given.
inline std::vector<int64_t> order(int64_t n, Random* random) {
    std::vector<int64_t> numbers(static_cast<size_t>(n));
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int64_t i = n - 1; random && i > 0; i--) std::swap(numbers[i], numbers[random->from(0, i)]);
    return numbers;
}

// The error that a float32 result may have: twice the largest error in `plain`, plus 1e-6 of the largest value.
// For scores of 1e4, rounding a score by half a unit in the last place changes its weight by more than 1e-6:
// then `rounding` takes the place of 1e-6.
inline double allowance(const std::vector<double>& right, const std::vector<std::vector<float>>& plain,
                        double rounding) {
    double error = 0, largest = 1;
    for (size_t i = 0; i < right.size(); i++) {
        if (!std::isfinite(right[i])) continue;
        largest = std::max(largest, std::fabs(right[i]));
        for (const std::vector<float>& one : plain)
            if (std::isfinite(one[i]))
                error = std::max(error, std::fabs(static_cast<double>(one[i]) - right[i]));
    }
    return 2 * error + std::max(1e-6, rounding) * largest;
}

// Describes what is wrong with `got`; empty if nothing is.
inline std::string compare(const char* name, const std::vector<float>& got, const std::vector<double>& right,
                           double allowed, bool same_infinity) {
    for (size_t i = 0; i < right.size(); i++) {
        const double x = static_cast<double>(got[i]);
        const bool good = std::isfinite(right[i])                 ? std::fabs(x - right[i]) <= allowed
                          : same_infinity && std::isinf(right[i]) ? x == right[i]
                          : same_infinity                         ? std::isnan(x)
                                                                  : !std::isfinite(x);
        if (good) continue;
        char text[160];
        std::snprintf(text, sizeof text, "; %s[%zu] is %.9g, right is %.9g, allowed %.3g", name, i, x, right[i],
                      allowed);
        return text;
    }
    return "";
}

// The program of the cases that draw(seed, random, threads) gives; attempt(case, random) says what is wrong.
template <class Draw, class Attempt>
int run_cases(int argc, char** argv, const Draw& draw, const Attempt& attempt) {
    return run_seeds(argc, argv, [&](uint64_t seed, int threads) {
        Random random(seed);
        const auto c = draw(seed, random, threads);
        describe(c);
        return attempt(c, random);
    });
}

inline bool same(float a, float b) {
    return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (!same(a[i], b[i])) return false;
    return true;
}
