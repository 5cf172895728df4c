// One kernel in a process of its own: for a cache simulator (lab/counters.py), `perf record` or a debugger.
//
//   alone PART N d BR BC CAUSAL HEADS REPEATS [SWEEP [QUERIES [THREADS]]]
//
// calls PART, a part's operator, REPEATS >= 0 times on one thread and prints the sum of its output. q, k, v
// and out are (1, HEADS, N, d), q and out with QUERIES rows, BR and BC part 4's tile, CAUSAL 0 or 1. All is
// allocated before the first call. SWEEP bytes are written before the first call and after the last one, to
// empty smaller caches. Built with USER_KERNEL, the kernel is that of a user's file, with THREADS threads; its
// backward pass if PART is `backward`.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "parts.h"

#if defined(USER_KERNEL)
#include "tools/user_kernel.h"

// The backward pass, called as a part: dout is q, and lse is 0.
int64_t scratch_of_gradient(const Attention& a) { return user_kernel_backward_scratch({a}); }
void gradient(const Attention& a, float* floats) {
    const int64_t queries = a.B * a.H * a.Nq, keys = a.B * a.H * a.Nk;
    std::vector<float> lse(queries), dq(queries * a.d), dk(keys * a.d), dv(keys * a.d);
    std::fprintf(stderr, "lse at %p, dq at %p, dk at %p, dv at %p\n", (void*)lse.data(), (void*)dq.data(),
                 (void*)dk.data(), (void*)dv.data());
    run(attention_backward,
        {a, a.q, a.k, a.v, a.q, a.out, lse.data(), nullptr, dq.data(), dk.data(), dv.data()}, floats);
}
void user_kernel_attention(const Attention& a, float* floats) { run(attention, a, floats); }

const Part user_forward{"forward", {user_kernel_scratch, user_kernel_attention}, none, none};
const Part user_backward{"backward", {scratch_of_gradient, gradient}, none, none};
const Part* part_of(const char* name) {
    return name == std::string("backward") ? &user_backward : &user_forward;
}
#else
const Part* part_of(const char* name) { return find_part(name); }
#endif

namespace {

constexpr int64_t LINE_BYTES = 64;  // a cache line, and the alignment of PyTorch's tensors

// An argument between least and most; ends the program otherwise.
int64_t number(const char* name, const char* text, int64_t least, int64_t most) {
    char* end;
    errno = 0;
    const long long n = std::strtoll(text, &end, 10);
    if (errno == 0 && end != text && *end == '\0' && least <= n && n <= most) return n;
    std::fprintf(stderr, "alone: %s is %s; it must be a whole number from %lld to %lld\n", name, text,
                 static_cast<long long>(least), static_cast<long long>(most));
    std::exit(2);
}

// n zeros that live until the program ends. No more bytes are allocated, so that a sanitizer finds the end.
float* zeros(int64_t n) {
    const int64_t bytes = n * static_cast<int64_t>(sizeof(float));
    void* memory = nullptr;
    if (posix_memalign(&memory, LINE_BYTES, bytes) != 0) {
        std::fprintf(stderr, "alone: no memory for %lld bytes\n", static_cast<long long>(bytes));
        std::exit(1);
    }
    float* const p = static_cast<float*>(memory);
    std::fill_n(p, n, 0.0f);
    return p;
}

// n numbers from -1 to 1, determined by the seed.
float* noise(int64_t n, uint32_t seed) {
    float* p = zeros(n);
    for (int64_t i = 0; i < n; i++) {
        seed = 1664525 * seed + 1013904223;
        p[i] = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
    }
    return p;
}

void write_lines(volatile float* p, int64_t bytes) {
    constexpr int64_t FLOAT_BYTES = sizeof(float);
    for (int64_t i = 0; i < bytes / FLOAT_BYTES; i += LINE_BYTES / FLOAT_BYTES) p[i] = 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 9 || argc > 12) {
        std::fputs("usage: alone PART N d BR BC CAUSAL HEADS REPEATS [SWEEP [QUERIES [THREADS]]]\n", stderr);
        return 2;
    }
    constexpr int64_t MOST = int64_t{1} << 20, MOST_TILE_SIDE = int64_t{1} << 31;
    const Part* part = part_of(argv[1]);
    if (!part) {
        std::fprintf(stderr, "alone: PART is %s; it must be one of", argv[1]);
        for (const Part& known : PARTS) std::fprintf(stderr, " %s", known.name);
        std::fputs("\n", stderr);
        return 2;
    }
    const int64_t N = number("N", argv[2], 1, MOST), d = number("d", argv[3], 1, MOST);
    const int64_t Br = number("BR", argv[4], 1, MOST_TILE_SIDE), Bc = number("BC", argv[5], 1, MOST_TILE_SIDE);
    const bool causal = number("CAUSAL", argv[6], 0, 1);
    const int64_t H = number("HEADS", argv[7], 1, MOST), repeats = number("REPEATS", argv[8], 0, MOST);
    const int64_t sweep = argc > 9 ? number("SWEEP", argv[9], 0, int64_t{1} << 40) : 0;
    const int64_t Nq = argc > 10 ? number("QUERIES", argv[10], 1, causal ? N : MOST) : N;
    const int threads = argc > 11 ? static_cast<int>(number("THREADS", argv[11], 1, MOST_THREADS)) : 1;

    const auto matrices = [&](const float* data, int64_t rows) {
        return Matrices{data, H * rows * d, rows * d, d, 1};
    };
    const float *q = noise(H * Nq * d, 1), *k = noise(H * N * d, 2), *v = noise(H * N * d, 3);
    float* out = zeros(H * Nq * d);
    const float scale = 1 / std::sqrt(static_cast<float>(d));
    const Attention a{{1, H, Nq, N, d, causal, scale, std::min(Br, Nq), std::min(Bc, N), threads},
                      matrices(q, Nq),
                      matrices(k, N),
                      matrices(v, N),
                      out};
    float *scratch = zeros(part->scratch(a)), *other = zeros(sweep / sizeof(float));

#if defined(USER_KERNEL)  // for who reads a sanitizer's report
    std::fprintf(stderr, "q at %p, k at %p, v at %p, out at %p, scratch at %p\n", (const void*)q,
                 (const void*)k, (const void*)v, (const void*)out, (const void*)scratch);
#endif
    write_lines(other, sweep);
    for (int64_t i = 0; i < repeats; i++) part->attention(a, scratch);
    write_lines(other, sweep);

    double sum = 0;
    for (int64_t i = 0; i < H * Nq * d; i++) sum += out[i];
    std::printf("%.6f\n", sum);
    return 0;
}
