// The SIMD helpers in C++ vector extensions: AVX-512, AVX2, SSE and NEON from one source.
//
// A vector is as wide as the widest register that the compiler may use. Loads and stores go through
// memcpy, which compiles to one unaligned instruction; the columns beyond the last whole vector go
// through a masked copy of less than a vector.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "simd/constants.h"
#include "simd/simd.h"
#if defined(__AVX512DQ__) && !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
#define INSTRUCTIONS_FOR_EXP2  // Intel's; on AMD they are not faster than the sums
#include "simd/exp2_avx512.h"
#endif

namespace simd {
namespace {

// W: floats in a vector. A register block has ROWS rows of VECS vectors: as many accumulators, and VECS + 1
// more registers for the operands.
#if defined(__AVX512F__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr int W = 16, ROWS = 4, VECS = 4;  // Zen 4 (older compilers call it znver3): 2 % faster than 8 x 3
#elif defined(__AVX512F__)
constexpr int W = 16, ROWS = 8, VECS = 3;
#elif defined(__AVX__)
constexpr int W = 8, ROWS = 4, VECS = 3;  // 16 registers
#elif defined(__aarch64__)
constexpr int W = 4, ROWS = 8, VECS = 3;  // 32 registers
#else
constexpr int W = 4, ROWS = 4, VECS = 3;
#endif
// The same for int8, whose accumulators are three.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int INT8_ROWS = 4, INT8_VECS = 2, INT8_WIDE = 4;
#else
constexpr int INT8_ROWS = 2, INT8_VECS = 2, INT8_WIDE = 4;
#endif
// Rows of a block of two vectors for sums of at least LONG products, where 32 registers hold it: B's columns
// are read half as often, and more of them stay in L1. 5 % of a step of 32 texts, and 4 % of part 4's backward
// pass (AMD Zen 5).
constexpr int TALL = W == 16 ? 8 : ROWS;
constexpr int64_t LONG = 48;
constexpr int WIDE = 8;  // vectors in a block of one row: enough independent sums to hide an addition's latency

typedef float Vec __attribute__((vector_size(W * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(W * sizeof(float))));
typedef uint32_t UintVec __attribute__((vector_size(W * sizeof(float))));
typedef unsigned char ByteVec __attribute__((vector_size(W)));

#define INLINE inline __attribute__((always_inline))

INLINE Vec splat(float x) { return Vec{} + x; }

INLINE Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Vector v of the columns of a row of B: floats, or bfloat16 in the pairs of simd.h.
INLINE Vec column(const float* b, int v) { return load(b + v * W); }

INLINE Vec column(const uint32_t* b, int v) {
    UintVec pair;
    std::memcpy(&pair, b + v / 2 * W, sizeof pair);
    const UintVec bits = v % 2 ? pair & 0xffff0000u : pair << 16;
    Vec x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The address of column c.
INLINE const float* columns(const float* b, int64_t c) { return b + c; }
INLINE const uint32_t* columns(const uint32_t* b, int64_t c) { return b + c / 2; }

INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// The first n lanes from p, the others `rest`; n < W. Not unrolled, the loop becomes one masked load.
INLINE Vec load_part(const float* p, int64_t n, float rest) {
    const int count = static_cast<int>(n);
    float lane[W];
#pragma GCC unroll 1
    for (int i = 0; i < W; i++) lane[i] = i < count ? p[i] : rest;
    return load(lane);
}

INLINE void store_part(float* p, Vec v, int64_t n) {
    const int count = static_cast<int>(n);
    float lane[W];
    store(lane, v);
#pragma GCC unroll 1
    for (int i = 0; i < W; i++)
        if (i < count) p[i] = lane[i];
}

INLINE Vec max(Vec a, Vec b) { return b > a ? b : a; }  // a where either is NaN

INLINE IntVec lane_numbers() {
    IntVec n;
    for (int i = 0; i < W; i++) n[i] = i;
    return n;
}

template <class To, class From>
INLINE To bit_cast(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Reduces all lanes by op, as a tree: each step combines a lane with the lane `away` from it.
template <int away = 1, class Op, size_t... I>
INLINE float reduce(Vec v, Op op, std::index_sequence<I...> lanes) {
    v = op(v, __builtin_shufflevector(v, v, (I ^ away)...));
    if constexpr (2 * away < W)
        return reduce<2 * away>(v, op, lanes);
    else
        return v[0];
}

INLINE float sum(Vec v) {
    return reduce(v, [](Vec a, Vec b) { return a + b; }, std::make_index_sequence<W>());
}

INLINE float largest(Vec v) { return reduce(v, max, std::make_index_sequence<W>()); }

template <int away = 1, size_t... I>
INLINE int32_t greatest(IntVec v, std::index_sequence<I...> lanes) {
    const IntVec other = __builtin_shufflevector(v, v, (I ^ away)...);
    v = other > v ? other : v;
    if constexpr (2 * away < W)
        return greatest<2 * away>(v, lanes);
    else
        return v[0];
}

// 2^x for x <= 8, as constants.h describes. Unless KEEPS_NAN, the result for NaN is 0 and callers test their
// inputs.
#if defined(INSTRUCTIONS_FOR_EXP2)
constexpr bool KEEPS_NAN = true;
INLINE Vec exp2_bounded(Vec x) { return exp2_or_zero(x); }
#else
constexpr bool KEEPS_NAN = false;
INLINE Vec exp2_bounded(Vec x) {
    const Vec round = splat(SIMD_ROUND);
    const Vec z = x + round;
    const Vec f = x - (z - round);
    Vec p = f * SIMD_EXP2_C5 + SIMD_EXP2_C4;
    p = p * f + SIMD_EXP2_C3;
    p = p * f + SIMD_EXP2_C2;
    p = p * f + SIMD_EXP2_C1;
    p = p * f + SIMD_EXP2_C0;
    const UintVec bits = bit_cast<UintVec>(p) + (bit_cast<UintVec>(z) << 23);  // far below the least they wrap
    return x >= SIMD_EXP2_LEAST ? bit_cast<Vec>(bits) : Vec{};
}
#endif

// Phi(x), with Phi(-|x|) = 2^q(|x|)
INLINE Vec normal(Vec x) {
    const Vec magnitude = bit_cast<Vec>(bit_cast<IntVec>(x) & 0x7fffffff);
    Vec q = magnitude * SIMD_GELU_C8 + SIMD_GELU_C7;
    q = q * magnitude + SIMD_GELU_C6;
    q = q * magnitude + SIMD_GELU_C5;
    q = q * magnitude + SIMD_GELU_C4;
    q = q * magnitude + SIMD_GELU_C3;
    q = q * magnitude + SIMD_GELU_C2;
    q = q * magnitude + SIMD_GELU_C1;
    q = q * magnitude + SIMD_GELU_C0;
    const Vec tail = exp2_bounded(q);
    return x > 0 ? 1.0f - tail : tail;
}

INLINE Vec gelu(Vec x) { return x * normal(x); }

// x, but NaN where `witness` is NaN.
INLINE Vec nan_if(Vec witness, Vec x) { return witness == witness ? x : witness; }

// The functions below are inlined into loops that were tuned with them, so they take plain pointers and
// strides, not the structs of simd.h.

// acc[i][v] <- acc[i][v] + A(i, k) * B[k] in the vectors v from G on; if G is CUT, there only in the lanes
// after `hidden`.
template <int G, bool CUT, int R, int VS, class Element>
INLINE void add_products(Vec (&acc)[R][VS], const float* a, int64_t row_stride, const Element* b,
                         int64_t hidden) {
    const IntVec lane = lane_numbers();
    Vec x[VS];
    for (int v = G; v < VS; v++) x[v] = column(b, v);
    for (int i = 0; i < R; i++) {
        for (int v = G; v < VS; v++) {
            const Vec next = acc[i][v] + a[i * row_stride] * x[v];
            acc[i][v] = CUT && v == G ? (lane > static_cast<int>(hidden) ? next : acc[i][v]) : next;
        }
    }
}

// The products from k on that only some lanes of vector G take. The vector's first column takes `first`
// products.
template <int G, int R, int VS, class Element>
INLINE void descend(Vec (&acc)[R][VS], const float* A, int64_t row_stride, int64_t depth_stride,
                    const Element* B, int64_t ldB, int64_t k, int64_t depth, int64_t first) {
    const int64_t end = std::min(depth, first + W);
    for (; k < end; k++) add_products<G, true>(acc, A + k * depth_stride, row_stride, B + k * ldB, k - first);
    if constexpr (G + 1 < VS) descend<G + 1>(acc, A, row_stride, depth_stride, B, ldB, k, depth, first + W);
}

// Columns [c, c + VS vectors) of R rows of C, in registers over the whole depth, which is not 0. With ADD they
// start from C; with STAIRS column c takes the products k < first + c.
template <int R, int VS, bool ADD, bool STAIRS, class Element>
INLINE void register_block(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                           const Element* B, int64_t ldB, int64_t depth, int64_t first) {
    Vec acc[R][VS];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < VS; v++) acc[i][v] = ADD ? load(C + i * ldC + v * W) : Vec{};
    if (!STAIRS && depth <= 0)
        __builtin_unreachable();  // otherwise GCC keeps a copy of C on the stack for that case
    const int64_t all = STAIRS ? std::min(first, depth) : depth;
#pragma GCC unroll 2  // 2 % of the whole kernel
    for (int64_t k = 0; k < all; k++)
        add_products<0, false>(acc, A + k * depth_stride, row_stride, B + k * ldB, 0);
    if constexpr (STAIRS) descend<0>(acc, A, row_stride, depth_stride, B, ldB, all, depth, first);
    for (int i = 0; i < R; i++)
        for (int v = 0; v < VS; v++) store(C + i * ldC + v * W, acc[i][v]);
}

// The last columns, n < W of them: one row at a time.
template <bool ADD>
void last_columns(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                  const float* B, int64_t ldB, int64_t rows, int64_t n, int64_t depth, int64_t first) {
    const IntVec lane = lane_numbers();
    for (int64_t i = 0; i < rows; i++) {
        Vec acc = ADD ? load_part(C + i * ldC, n, 0.0f) : Vec{};
        for (int64_t k = 0; k < depth; k++) {
            const Vec next = acc + A[i * row_stride + k * depth_stride] * load_part(B + k * ldB, n, 0.0f);
            acc = lane > static_cast<int>(k - first) ? next : acc;
        }
        store_part(C + i * ldC, acc, n);
    }
}

// VS vectors of columns of all rows, R rows at a time and then the rest.
template <int R, int VS, bool ADD, bool STAIRS, class Element>
INLINE void block_column(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                         const Element* B, int64_t ldB, int64_t rows, int64_t depth, int64_t first) {
    int64_t i = 0;
    for (; i + R <= rows; i += R)
        register_block<R, VS, ADD, STAIRS>(C + i * ldC, ldC, A + i * row_stride, row_stride, depth_stride, B,
                                           ldB, depth, first);
    if constexpr (R > 1)
        block_column<R / 2, VS, ADD, STAIRS>(C + i * ldC, ldC, A + i * row_stride, row_stride, depth_stride, B,
                                             ldB, rows - i, depth, first);
}

// One row's columns from c on, up to VS vectors at a time; returns where the last whole vector ends. A matrix
// that is packed in panels of that width is read as one stream.
template <int VS, bool ADD, class Element>
INLINE int64_t one_row(float* C, const float* A, int64_t depth_stride, const Element* B, int64_t ldB, int64_t c,
                       int64_t cols, int64_t depth) {
    for (; c + VS * W <= cols; c += VS * W)
        register_block<1, VS, ADD, false>(C + c, 0, A, 0, depth_stride, columns(B, c), ldB, depth, 0);
    if constexpr (VS > 1)
        return one_row<VS - 1, ADD>(C, A, depth_stride, B, ldB, c, cols, depth);
    else
        return c;
}

// Whole vectors of columns from c on, VS at a time; returns where they end.
template <int VS, bool ADD, class Element>
INLINE int64_t block_columns(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                             const Element* B, int64_t ldB, int64_t rows, int64_t c, int64_t cols,
                             int64_t depth, int64_t first) {
    if constexpr (ADD && std::is_same_v<Element, float>)
        for (; c + VS * W <= cols && first + c < depth; c += VS * W)
            block_column<ROWS, VS, ADD, true>(C + c, ldC, A, row_stride, depth_stride, B + c, ldB, rows, depth,
                                              first + c);
    for (; c + VS * W <= cols; c += VS * W)
        block_column<ROWS, VS, ADD, false>(C + c, ldC, A, row_stride, depth_stride, columns(B, c), ldB, rows,
                                           depth, 0);
    return c;
}

// All whole vectors of columns, the widest blocks first; bfloat16 has its vectors in pairs.
template <bool ADD, class Element>
INLINE int64_t whole_columns(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                             const Element* B, int64_t ldB, int64_t rows, int64_t cols, int64_t depth,
                             int64_t first) {
    constexpr int MOST = std::is_same_v<Element, float> ? VECS : 2;
    int64_t c = 0;
    if (rows == 1 && first >= depth) c = one_row<WIDE, ADD>(C, A, depth_stride, B, ldB, c, cols, depth);
    if constexpr (ROWS < TALL)
        for (; rows >= TALL && first >= depth && depth_stride == 1 && depth >= LONG && c + 2 * W <= cols;
             c += 2 * W)
            block_column<TALL, 2, ADD, false>(C + c, ldC, A, row_stride, depth_stride, columns(B, c), ldB, rows,
                                              depth, 0);
    c = block_columns<MOST, ADD>(C, ldC, A, row_stride, depth_stride, B, ldB, rows, c, cols, depth, first);
    c = block_columns<2, ADD>(C, ldC, A, row_stride, depth_stride, B, ldB, rows, c, cols, depth, first);
    return block_columns<1, ADD>(C, ldC, A, row_stride, depth_stride, B, ldB, rows, c, cols, depth, first);
}

template <bool ADD>
INLINE void product(float* C, int64_t ldC, const float* A, int64_t row_stride, int64_t depth_stride,
                    const float* B, int64_t ldB, int64_t rows, int64_t cols, int64_t depth, int64_t first) {
    const int64_t c = whole_columns<ADD>(C, ldC, A, row_stride, depth_stride, B, ldB, rows, cols, depth, first);
    if (!ADD && c < cols && cols >= W)  // the last whole vector: some columns are computed twice
        block_column<ROWS, 1, false, false>(C + cols - W, ldC, A, row_stride, depth_stride, B + cols - W, ldB,
                                            rows, depth, 0);
    else if (c < cols)
        last_columns<ADD>(C + c, ldC, A, row_stride, depth_stride, B + c, ldB, rows, cols - c, depth,
                          first + c);
}

// Adds to each lane of acc the dot product of four bytes: the first of a are at most 127, those of b are
// signed.
INLINE IntVec dot4(IntVec acc, IntVec a, IntVec b) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return bit_cast<IntVec>(
        _mm512_dpbusd_epi32(bit_cast<__m512i>(acc), bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b));
    return acc + bit_cast<IntVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return bit_cast<IntVec>(
        _mm256_dpbusd_avx_epi32(bit_cast<__m256i>(acc), bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_maddubs_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b));
    return acc + bit_cast<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return bit_cast<IntVec>(
        vdotq_s32(bit_cast<int32x4_t>(acc), bit_cast<int8x16_t>(a), bit_cast<int8x16_t>(b)));
#else
    const UintVec bits = bit_cast<UintVec>(b);
    for (int j = 0; j < 4; j++) acc += (a >> 8 * j & 127) * (bit_cast<IntVec>(bits << (24 - 8 * j)) >> 24);
    return acc;
#endif
}

INLINE IntVec load_int(const uint32_t* p) {
    IntVec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Keeps a vector in a register: GCC would load it again for each of its uses.
INLINE IntVec once(IntVec v) {
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

INLINE IntVec splat_int(uint32_t x) { return IntVec{} + static_cast<int32_t>(x); }

// VS vectors of columns of R rows of multiply_int8().
template <int R, int VS, bool ADD>
INLINE void int8_block(float* C, int64_t ldC, const uint32_t* A, int64_t ldA, const uint32_t* B, int64_t ldB,
                       int64_t blocks) {
    Vec total[R][VS] = {};
    for (int64_t k = 0; k < blocks;) {
        const int64_t end = std::min<int64_t>(blocks, k + SIMD_INT8_GROUP / 4);
        const uint32_t *offsets = B, *scales = B + ldB;
        B += 2 * ldB;
        IntVec high[R][VS], middle[R][VS] = {}, low[R][VS] = {};
        for (int i = 0; i < R; i++)
            for (int v = 0; v < VS; v++) high[i][v] = load_int(offsets + v * W);
        for (; k < end; k++, B += ldB) {
            const auto add = [&](int i, int v, IntVec b) {
                const uint32_t* a = A + i * ldA + k;
                high[i][v] = dot4(high[i][v], splat_int(a[0]), b);
                middle[i][v] = dot4(middle[i][v], splat_int(a[blocks]), b);
                low[i][v] = dot4(low[i][v], splat_int(a[2 * blocks]), b);
            };
            if constexpr (R <= 2) {  // the digits of the rows stay in registers; of more rows, a part of B does
                for (int v = 0; v < VS; v++) {
                    const IntVec b = once(load_int(B + v * W));
                    for (int i = 0; i < R; i++) add(i, v, b);
                }
            } else {
                IntVec b[VS];
                for (int v = 0; v < VS; v++) b[v] = once(load_int(B + v * W));
                for (int i = 0; i < R; i++)
                    for (int v = 0; v < VS; v++) add(i, v, b[v]);
            }
        }
        for (int v = 0; v < VS; v++) {
            const Vec scale = bit_cast<Vec>(load_int(scales + v * W));
            for (int i = 0; i < R; i++) {
                const Vec upper = __builtin_convertvector(high[i][v] * 128 + middle[i][v], Vec);
                total[i][v] += (upper * 128.0f + __builtin_convertvector(low[i][v], Vec)) * scale;
            }
        }
    }
    for (int i = 0; i < R; i++) {
        float scale;
        std::memcpy(&scale, A + i * ldA + 3 * blocks, sizeof scale);
        for (int v = 0; v < VS; v++) {
            const Vec product = total[i][v] * scale;
            store(C + i * ldC + v * W, ADD ? load(C + i * ldC + v * W) + product : product);
        }
    }
}

// VS vectors of columns of all rows, R rows at a time and then the rest.
template <int R, int VS, bool ADD>
INLINE void int8_rows(float* C, int64_t ldC, const uint32_t* A, int64_t ldA, const uint32_t* B, int64_t ldB,
                      int64_t rows, int64_t blocks) {
    int64_t i = 0;
    for (; i + R <= rows; i += R) int8_block<R, VS, ADD>(C + i * ldC, ldC, A + i * ldA, ldA, B, ldB, blocks);
    if constexpr (R > 1)
        int8_rows<R / 2, VS, ADD>(C + i * ldC, ldC, A + i * ldA, ldA, B, ldB, rows - i, blocks);
}

// Columns from c on, R rows by VS vectors at a time, and then fewer vectors.
template <int R, int VS, bool ADD>
INLINE void int8_columns(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t c, int64_t cols,
                         int64_t blocks) {
    for (; c + VS * W <= cols; c += VS * W)
        int8_rows<R, VS, ADD>(C.data + c, C.ld, A.data, A.ld, B.data + c, B.ld, rows, blocks);
    if constexpr (VS > 1) int8_columns<R, VS - 1, ADD>(C, A, B, rows, c, cols, blocks);
}

template <bool ADD>
void int8_product(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t blocks) {
    if (rows == 1)
        int8_columns<1, INT8_WIDE, ADD>(C, A, B, 1, 0, cols, blocks);
    else
        int8_columns<INT8_ROWS, INT8_VECS, ADD>(C, A, B, rows, 0, cols, blocks);
}

// One step of sums(): adds neighbouring chunks of C lanes. Of each block of lanes the sums of a fill the first
// half, those of b the second.
template <int C, int BLOCK, size_t... I>
INLINE Vec pairwise(Vec a, Vec b, std::index_sequence<I...>) {
    constexpr auto source = [](int lane, int odd) {
        const int of_b = lane % BLOCK / (BLOCK / 2), i = lane % (BLOCK / 2);
        return of_b * W + lane / BLOCK * BLOCK + (2 * (i / C) + odd) * C + i % C;
    };
    return __builtin_shufflevector(a, b, source(I, 0)...) + __builtin_shufflevector(a, b, source(I, 1)...);
}

// Lane i of the result <- sum(v[i]), each in the same order, so that equal rows have equal sums. First the
// lanes of each 128 bits are added, then those sums: both steps have an instruction that shuffles two
// registers.
template <int N = W>
INLINE Vec sums(Vec* v) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        constexpr bool within = 4 * N > W;
        for (int i = 0; i < N / 2; i++)
            v[i] =
                pairwise<within ? 1 : 4, within ? 4 : W>(v[2 * i], v[2 * i + 1], std::make_index_sequence<W>());
        return sums<N / 2>(v);
    }
}

// The first and the second half of a0 b0 a1 b1 ...
template <size_t... I>
INLINE void interleave(Vec a, Vec b, Vec& low, Vec& high, std::index_sequence<I...>) {
    low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
    high = __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}

// A W x W square: interleaving row i with row i + W / 2, log2(W) times over, moves every element to its
// transposed place.
INLINE void transpose_square(float* T, int64_t ldT, const float* X, int64_t ldX, float scale) {
    Vec v[W], next[W];
    for (int i = 0; i < W; i++) v[i] = scale * load(X + i * ldX);
    for (int step = 1; step < W; step *= 2) {
        for (int i = 0; i < W / 2; i++)
            interleave(v[i], v[i + W / 2], next[2 * i], next[2 * i + 1], std::make_index_sequence<W>());
        for (int i = 0; i < W; i++) v[i] = next[i];
    }
    for (int i = 0; i < W; i++) store(T + i * ldT, v[i]);
}

// o <- o + sum_j p[j] * B[j] for VS vectors of columns, in independent sums.
template <int VS, class Element>
INLINE void weighted_columns(float* o, const float* p, const Element* B, int64_t ldB, int64_t rows) {
    constexpr int CHAINS = 4;
    Vec acc[CHAINS][VS] = {};
    const auto add = [&](int64_t j, int chain) {
        for (int v = 0; v < VS; v++) acc[chain][v] += p[j] * column(B + j * ldB, v);
    };
    int64_t j = 0;
    for (; j + CHAINS <= rows; j += CHAINS)
        for (int n = 0; n < CHAINS; n++) add(j + n, n);
    for (; j < rows; j++) add(j, 0);
    for (int v = 0; v < VS; v++)
        store(o + v * W, load(o + v * W) + ((acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v])));
}

}  // namespace

int64_t lanes() { return W; }

int64_t panel() { return VECS * W; }

int64_t rows() { return ROWS; }

const char* name() {
    return W == 16 ? "portable C++, 16 floats" : W == 8 ? "portable C++, 8 floats" : "portable C++, 4 floats";
}

// The maximum, x - m and the sum; 2^x; where 2^x loses NaN, another sum. Without AVX-512 2^x selects by an
// instruction of its own.
int64_t softmax_instructions() { return 3 + (KEEPS_NAN ? 8 : W == 16 ? 11 + 1 : 12 + 1); }

bool may_use_tiles() { return true; }

void transpose(Matrix T, ConstMatrix X, int64_t rows, int64_t cols, float scale) {
    for (int64_t r = 0; r < rows; r += W) {
        for (int64_t c = 0; c < cols; c += W) {
            const float* x = X.data + r * X.ld + c;
            float* t = T.data + c * T.ld + r;
            if (r + W <= rows && c + W <= cols) {
                transpose_square(t, T.ld, x, X.ld, scale);
                continue;
            }
            for (int64_t i = 0; i < W && r + i < rows; i++)
                for (int64_t j = 0; j < W && c + j < cols; j++) t[j * T.ld + i] = scale * x[i * X.ld + j];
        }
    }
}

void multiply(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth) {
    product<false>(C.data, C.ld, A.data, A.row_stride, A.depth_stride, B.data, B.ld, rows, cols, depth, depth);
}

void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first) {
    product<true>(C.data, C.ld, A.data, A.row_stride, A.depth_stride, B.data, B.ld, rows, cols, depth, first);
}

void multiply_bf16(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add) {
    if (add)
        whole_columns<true>(C.data, C.ld, A.data, A.ld, 1, B.data, B.ld, rows, cols, depth, depth);
    else
        whole_columns<false>(C.data, C.ld, A.data, A.ld, 1, B.data, B.ld, rows, cols, depth, depth);
}

void to_fixed(uint32_t* row, const float* x, int64_t n) {
    const int64_t blocks = int8_blocks(n);
    const auto magnitude = [](Vec v) { return bit_cast<IntVec>(v) & 0x7fffffff; };  // in the order of integers
    const auto larger = [](IntVec a, IntVec b) { return b > a ? b : a; };
    IntVec even{}, odd{};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        even = larger(even, magnitude(load(x + i)));
        odd = larger(odd, magnitude(load(x + i + W)));
    }
    for (; i + W <= n; i += W) even = larger(even, magnitude(load(x + i)));
    if (i < n) odd = larger(odd, magnitude(load_part(x + i, n - i, 0.0f)));
    const Int8Scale scale(bit_cast<float>(greatest(larger(even, odd), std::make_index_sequence<W>())));
    std::memcpy(row + 3 * blocks, &scale.scale, sizeof scale.scale);

    // Adding SIMD_ROUND rounds, as for 2^x. A row with NaN has no numbers, but its digits have 7 bits too.
    unsigned char* const digits = reinterpret_cast<unsigned char*>(row);
    const auto number = [&](Vec v) {
        const UintVec bits = bit_cast<UintVec>(v * scale.factor + SIMD_ROUND);
        return bits + (1u << (SIMD_INT8_BITS - 1)) - bit_cast<uint32_t>(SIMD_ROUND);
    };
    const auto store_digits = [&](UintVec u, int64_t bytes) {
        for (int digit = 0; digit < 3; digit++) {
            const ByteVec seven = __builtin_convertvector(u >> (14 - 7 * digit) & 127, ByteVec);
            std::memcpy(digits + 4 * blocks * digit + i, &seven, bytes);
        }
    };
    for (i = 0; i + W <= n; i += W) store_digits(number(load(x + i)), W);
    if (i < n) store_digits(number(load_part(x + i, n - i, 0.0f)), 4 * blocks - i);
}

void multiply_int8(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t depth, bool add) {
    if (add)
        int8_product<true>(C, A, B, rows, cols, int8_blocks(depth));
    else
        int8_product<false>(C, A, B, rows, cols, int8_blocks(depth));
}

void dot_rows(float* s, const float* x, ConstMatrix B, int64_t rows, int64_t depth, float scale) {
    const int64_t whole = depth / W * W;
    int64_t j = 0;
    for (; j + W <= rows; j += W) {
        const float* b = B.data + j * B.ld;
        Vec acc[W];
        for (int i = 0; i < W; i++) acc[i] = Vec{};
        for (int64_t c = 0; c < whole; c += W) {
            const Vec a = load(x + c);
            const float* p = b + c;
            for (int i = 0; i < W; i++, p += B.ld) acc[i] += a * load(p);
        }
        Vec dots = sums(acc);
        for (int64_t c = whole; c < depth; c++)  // the last features, one at a time
            for (int i = 0; i < W; i++) dots[i] += x[c] * b[i * B.ld + c];
        store(s + j, scale * dots);
    }
    for (; j < rows; j++) {
        const float* b = B.data + j * B.ld;
        Vec acc{};
        for (int64_t c = 0; c < whole; c += W) acc += load(x + c) * load(b + c);
        float dot = sum(acc);
        for (int64_t c = whole; c < depth; c++) dot += x[c] * b[c];
        s[j] = scale * dot;
    }
}

void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols) {
    int64_t c = 0;
    for (; c + 4 * W <= cols; c += 4 * W) weighted_columns<4>(o + c, p, B.data + c, B.ld, rows);
    for (; c + 2 * W <= cols; c += 2 * W) weighted_columns<2>(o + c, p, B.data + c, B.ld, rows);
    for (; c + W <= cols; c += W) weighted_columns<1>(o + c, p, B.data + c, B.ld, rows);
    if (c < cols) last_columns<true>(o + c, 0, p, 0, 1, B.data + c, B.ld, 1, cols - c, rows, rows);
}

void add_weighted_rows_bf16(float* o, const float* p, Bf16Pairs B, int64_t rows, int64_t cols) {
    int64_t c = 0;
    for (; c + 4 * W <= cols; c += 4 * W) weighted_columns<4>(o + c, p, columns(B.data, c), B.ld, rows);
    for (; c < cols; c += 2 * W) weighted_columns<2>(o + c, p, columns(B.data, c), B.ld, rows);
}

float row_max(const float* x, int64_t n, float m) {
    Vec even = splat(m), odd = even;
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
        even = max(even, load(x + i));
        odd = max(odd, load(x + i + W));
    }
    for (; i + W <= n; i += W) even = max(even, load(x + i));
    if (i < n) odd = max(odd, load_part(x + i, n - i, m));
    return largest(max(even, odd));
}

float exp_sum(float* x, int64_t n, float m) {
    Vec total{}, witness{};
    int64_t i = 0;
    const auto step = [&](Vec v) {
        const Vec y = (v - m) * SIMD_LOG2E, e = exp2_bounded(y);
        total += e;
        if (!KEEPS_NAN) witness += y;
        return e;
    };
    for (; i + W <= n; i += W) store(x + i, step(load(x + i)));
    if (i < n) store_part(x + i, step(load_part(x + i, n - i, -INFINITY)), n - i);  // 2^-inf adds 0
    return sum(nan_if(witness, total));
}

void scale_row(float* x, int64_t n, float a) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, load(x + i) * a);
    if (i < n) store_part(x + i, load_part(x + i, n - i, 0.0f) * a, n - i);
}

void layer_norm(float* y, const float* x, const float* weight, const float* bias, int64_t n) {
    const auto sum_of = [&](auto term, float nothing) {  // term(nothing) is 0
        Vec even{}, odd{};
        int64_t i = 0;
        for (; i + 2 * W <= n; i += 2 * W) {
            even += term(load(x + i));
            odd += term(load(x + i + W));
        }
        for (; i + W <= n; i += W) even += term(load(x + i));
        if (i < n) odd += term(load_part(x + i, n - i, nothing));
        return sum(even + odd);
    };
    const float mean = sum_of([](Vec v) { return v; }, 0.0f) / n;
    const float variance = sum_of([mean](Vec v) { return (v - mean) * (v - mean); }, mean) / n;
    const float factor = 1 / std::sqrt(variance + SIMD_LAYER_NORM_EPSILON);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const Vec v = (load(x + i) - mean) * factor * load(weight + i);
        store(y + i, bias ? v + load(bias + i) : v);
    }
    for (; i < n; i++) y[i] = (x[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

void gelu(float* x, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, gelu(load(x + i)));
    if (i < n) store_part(x + i, gelu(load_part(x + i, n - i, 0.0f)), n - i);
}

void gelu_gradient(float* dx, float* y, const float* x, int64_t n) {
    const auto step = [](Vec v, Vec d, Vec& value) {
        const Vec below = normal(v);
        value = v * below;
        return d * (below + v * SIMD_NORMAL_DENSITY * exp2_bounded(v * v * (-0.5f * SIMD_LOG2E)));
    };
    int64_t i = 0;
    Vec value;
    for (; i + W <= n; i += W) {
        store(dx + i, step(load(x + i), load(dx + i), value));
        store(y + i, value);
    }
    if (i == n) return;
    store_part(dx + i, step(load_part(x + i, n - i, 0.0f), load_part(dx + i, n - i, 0.0f), value), n - i);
    store_part(y + i, value, n - i);
}

bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    const int64_t ldS = S.ld;
    const IntVec lane = lane_numbers();
    const Vec low = splat(-INFINITY);
    IntVec moved{};
    for (int64_t c = 0; c < cols; c += W) {
        const int64_t all = std::min(rows, first + c), some = std::min(rows, first + c + W);
        const auto live = [&](int64_t j, Vec x) {  // in the lanes that see row j
            return lane > static_cast<int>(j - first - c) ? x : low;
        };
        const Vec before = load(m + c);
        Vec even = before, odd = before;  // two independent chains of maxima
        int64_t j = 0;
        for (; j + 1 < all; j += 2) {
            even = max(even, load(S.data + j * ldS + c));
            odd = max(odd, load(S.data + (j + 1) * ldS + c));
        }
        for (; j < some; j++) even = max(even, live(j, load(S.data + j * ldS + c)));
        const Vec most = max(even, odd);
        const Vec after = most > before + SIMD_MAX_LAG ? most : before;
        const Vec subtracted = after == low ? Vec{} : after;  // -inf - -inf would be NaN

        Vec total{}, witness{};
        const auto exponentiate = [&](int64_t j, Vec x) {
            const Vec p = exp2_bounded(x);
            store(S.data + j * ldS + c, p);
            total += p;
            if (!KEEPS_NAN) witness += x;
        };
        for (j = 0; j < all; j++) exponentiate(j, load(S.data + j * ldS + c) - subtracted);
        for (; j < some; j++) exponentiate(j, live(j, load(S.data + j * ldS + c) - subtracted));
        const Vec a = exp2_bounded(before - subtracted);
        store(m + c, after);
        store(l + c, nan_if(witness, a * load(l + c) + total));
        store(correction + c, a);
        moved |= a != 1.0f;
    }
    int64_t halves[sizeof moved / sizeof(int64_t)], any = 0;
    std::memcpy(halves, &moved, sizeof moved);
    for (const int64_t half : halves) any |= half;
    return any != 0;
}

void softmax_gradient(Matrix S, Matrix dP, int64_t rows, int64_t cols, int64_t first, const float* lse,
                      const float* rest, const float* D) {
    const IntVec lane = lane_numbers();
    for (int64_t c = 0; c < cols; c += W) {
        const int64_t all = std::min(rows, first + c), some = std::min(rows, first + c + W);
        const Vec subtracted = load(lse + c), more = load(rest + c), of_row = load(D + c);
        float *s = S.data + c, *dp = dP.data + c;
        const auto step = [&](auto live) {
            const Vec x = load(s) - subtracted - more;  // above 0 by rounding only
            const Vec p = live(nan_if(x, exp2_bounded(x > 0 ? Vec{} : x)));
            store(s, p);
            store(dp, live(p * (load(dp) - of_row)));
            s += S.ld, dp += dP.ld;
        };
        for (int64_t j = 0; j < all; j++) step([](Vec x) { return x; });
        for (int64_t j = all; j < some; j++)
            step([&](Vec x) { return lane > static_cast<int>(j - first - c) ? x : Vec{}; });
    }
}

void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a) {
    int64_t c = 0;
    for (; c + W <= cols; c += W) {
        const Vec factor = load(a + c);
        for (int64_t i = 0; i < rows; i++) store(C.data + i * C.ld + c, load(C.data + i * C.ld + c) * factor);
    }
    for (; c < cols; c++)
        for (int64_t i = 0; i < rows; i++) C.data[i * C.ld + c] *= a[c];
}

}  // namespace simd
