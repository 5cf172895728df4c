// The SIMD helpers in C++ vector extensions: AVX-512, AVX2, SSE and NEON from one source.
//
// A vector is as wide as the widest register the compiler was told of. Loads and stores go through
// memcpy, which compiles to one unaligned instruction.
#include "simd.h"

#include <cmath>
#include <cstring>

namespace simd {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(W * sizeof(float))));

inline Vec splat(float x) { return Vec{} + x; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// The first n lanes from p, the others `rest`; n < W.
inline Vec load_part(const float* p, int64_t n, float rest) {
    Vec v = splat(rest);
    std::memcpy(&v, p, n * sizeof(float));
    return v;
}

inline void store_part(float* p, Vec v, int64_t n) { std::memcpy(p, &v, n * sizeof(float)); }

inline Vec max(Vec a, Vec b) { return b > a ? b : a; }  // a where either is NaN

// op over all lanes, as a tree.
template <class Op>
inline float reduce(Vec v, Op op) {
    float lane[W];
    std::memcpy(lane, &v, sizeof v);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lane[i] = op(lane[i], lane[i + n]);
    return lane[0];
}

inline float sum(Vec v) {
    return reduce(v, [](float a, float b) { return a + b; });
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87.3, where exp leaves the normal
// floats. x = n log 2 + f with |f| <= log(2) / 2, exp(f) by a polynomial (Cephes' expf), and 2^n added
// to the exponent.
inline Vec exp_nonpositive(Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Vec n = (x * 1.44269504f + magic) - magic;
    const Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    const IntVec tiny = x < -87.3f;
    const Vec in_range = tiny ? Vec{} : n;
    const IntVec exponent = __builtin_convertvector(in_range == in_range ? in_range : Vec{}, IntVec);
    IntVec bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;
    Vec result;
    std::memcpy(&result, &bits, sizeof result);
    result = tiny ? Vec{} : result;
    return x == x ? result : x;
}

// ROWS x COLS dot products at once, each operand loaded once for all of them; lanes span the depth.
template <int ROWS, int COLS>
inline void dot_products(float* S, int64_t ldS, const float* A, int64_t ldA, const float* B, int64_t ldB,
                         int64_t depth, float scale) {
    Vec acc[ROWS][COLS] = {};
    auto accumulate = [&](auto&& fetch) {
        Vec b[COLS];
        for (int j = 0; j < COLS; j++) b[j] = fetch(B + j * ldB);
        for (int i = 0; i < ROWS; i++) {
            const Vec a = fetch(A + i * ldA);
            for (int j = 0; j < COLS; j++) acc[i][j] += a * b[j];
        }
    };
    int64_t c = 0;
    for (; c + W <= depth; c += W) accumulate([&](const float* p) { return load(p + c); });
    if (c < depth) accumulate([&](const float* p) { return load_part(p + c, depth - c, 0.0f); });
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLS; j++) S[i * ldS + j] = scale * sum(acc[i][j]);
}

template <int ROWS>
inline void dot_product_rows(float* S, int64_t ldS, const float* A, int64_t ldA, const float* B, int64_t ldB,
                             int64_t cols, int64_t depth, float scale) {
    int64_t j = 0;
    for (; j + 4 <= cols; j += 4) dot_products<ROWS, 4>(S + j, ldS, A, ldA, B + j * ldB, ldB, depth, scale);
    for (; j < cols; j++) dot_products<ROWS, 1>(S + j, ldS, A, ldA, B + j * ldB, ldB, depth, scale);
}

// ROWS rows of C, VECS vectors wide, held in registers over the whole depth; lanes span C's columns.
template <int ROWS, int VECS>
inline void outer_products(float* C, int64_t ldC, const float* A, int64_t ldA, const float* B, int64_t ldB,
                           int64_t depth) {
    Vec acc[ROWS][VECS];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = load(C + i * ldC + v * W);
    for (int64_t j = 0; j < depth; j++) {
        for (int v = 0; v < VECS; v++) {
            const Vec b = load(B + j * ldB + v * W);
            for (int i = 0; i < ROWS; i++) acc[i][v] += A[i * ldA + j] * b;
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECS; v++) store(C + i * ldC + v * W, acc[i][v]);
}

template <int ROWS>
inline void outer_product_rows(float* C, int64_t ldC, const float* A, int64_t ldA, const float* B, int64_t ldB,
                               int64_t cols, int64_t depth) {
    int64_t c = 0;
    for (; c + 2 * W <= cols; c += 2 * W) outer_products<ROWS, 2>(C + c, ldC, A, ldA, B + c, ldB, depth);
    for (; c + W <= cols; c += W) outer_products<ROWS, 1>(C + c, ldC, A, ldA, B + c, ldB, depth);
    if (c == cols) return;
    for (int i = 0; i < ROWS; i++) {  // the last columns, less than a vector
        Vec acc = load_part(C + i * ldC + c, cols - c, 0.0f);
        for (int64_t j = 0; j < depth; j++) acc += A[i * ldA + j] * load_part(B + j * ldB + c, cols - c, 0.0f);
        store_part(C + i * ldC + c, acc, cols - c);
    }
}

}  // namespace

void multiply_transposed(float* S, int64_t ldS, const float* A, int64_t ldA, const float* B, int64_t ldB,
                         int64_t rows, int64_t cols, int64_t depth, float scale) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4)
        dot_product_rows<4>(S + i * ldS, ldS, A + i * ldA, ldA, B, ldB, cols, depth, scale);
    for (; i < rows; i++) dot_product_rows<1>(S + i * ldS, ldS, A + i * ldA, ldA, B, ldB, cols, depth, scale);
}

void multiply_add(float* C, int64_t ldC, const float* A, int64_t ldA, const float* B, int64_t ldB, int64_t rows,
                  int64_t cols, int64_t depth) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4)
        outer_product_rows<4>(C + i * ldC, ldC, A + i * ldA, ldA, B, ldB, cols, depth);
    for (; i < rows; i++) outer_product_rows<1>(C + i * ldC, ldC, A + i * ldA, ldA, B, ldB, cols, depth);
}

float row_max(const float* x, int64_t n, float m) {
    Vec most = splat(m);
    int64_t i = 0;
    for (; i + W <= n; i += W) most = max(most, load(x + i));
    if (i < n) most = max(most, load_part(x + i, n - i, m));
    return reduce(most, [](float a, float b) { return b > a ? b : a; });
}

float exp_sum(float* x, int64_t n, float m) {
    Vec total{};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const Vec e = exp_nonpositive(load(x + i) - m);
        store(x + i, e);
        total += e;
    }
    if (i < n) {
        const Vec e = exp_nonpositive(load_part(x + i, n - i, -INFINITY) - m);  // exp(-inf) adds 0
        store_part(x + i, e, n - i);
        total += e;
    }
    return sum(total);
}

void scale_row(float* x, int64_t n, float a) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, load(x + i) * a);
    if (i < n) store_part(x + i, load_part(x + i, n - i, 0.0f) * a, n - i);
}

const char* name() {
    return W == 16 ? "portable C++, 16 floats" : W == 8 ? "portable C++, 8 floats" : "portable C++, 4 floats";
}

}  // namespace simd
