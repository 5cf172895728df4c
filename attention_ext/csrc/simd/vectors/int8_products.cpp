// Products with int8 weights: an activation is three digits of 7 bits, whose products are exact.
#include <algorithm>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "simd/portable.h"
#include "simd/vectors/vectors.h"

namespace portable {
namespace {

// A register block has ROWS rows of VECS vectors, or one row of WIDE, each with three accumulators.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int ROWS = 2, VECS = 3, WIDE = 4;  // with the digits in lanes, 27 of 32 registers
#elif defined(__AVX512F__)  // 10 loads for 24 products, of whole rows of a panel of WIDE vectors
constexpr int ROWS = 2, VECS = 4, WIDE = 4;
#elif defined(__aarch64__)
constexpr int ROWS = 4, VECS = 2, WIDE = 4;
#else
constexpr int ROWS = 2, VECS = 2, WIDE = 4;
#endif

typedef unsigned char ByteVec __attribute__((vector_size(W)));

// Adds to each lane of acc the dot product of four bytes: a's are at most 127, b's are signed.
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

// The same with lane I of a. ARM takes it as it lies; a load that broadcasts takes the place of a product.
template <int I> INLINE IntVec dot4_lane(IntVec acc, IntVec a, IntVec b) {
#if defined(__ARM_FEATURE_DOTPROD)
    return bit_cast<IntVec>(
        vdotq_laneq_s32(bit_cast<int32x4_t>(acc), bit_cast<int8x16_t>(b), bit_cast<int8x16_t>(a), I));
#else
    return dot4(acc, IntVec{} + a[I], b);
#endif
}
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool BY_LANE = true;
#else
constexpr bool BY_LANE = false;
#endif

// Without a dot product of bytes, two products of numbers of 16 bits replace the four of the two upper digits.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
static_assert(INT8_PAIRS);
INLINE IntVec dot2(IntVec a, IntVec b) {
    return bit_cast<IntVec>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
}
// The bytes 0 and 2 of each lane of b as numbers of 16 bits; and the bytes 1 and 3.
INLINE IntVec even_bytes(IntVec b) {
    return bit_cast<IntVec>(_mm256_srai_epi16(_mm256_slli_epi16(bit_cast<__m256i>(b), 8), 8));
}
INLINE IntVec odd_bytes(IntVec b) { return bit_cast<IntVec>(_mm256_srai_epi16(bit_cast<__m256i>(b), 8)); }
// The numbers 4 j and 4 j + 2 in the halves of lane j < 2; 4 j + 1 and 4 j + 3 in those of lane 2 + j.
INLINE UintVec pairs(UintVec u) {
    const UintVec pair = u | __builtin_shufflevector(u, u, 2, 3, 4, 5, 6, 7, 0, 1) << 16;
    return __builtin_shufflevector(pair, pair, 0, 4, 1, 5, 2, 6, 3, 7);
}
#else
static_assert(!INT8_PAIRS);
[[maybe_unused]] INLINE IntVec dot2(IntVec a, IntVec) { return a; }
[[maybe_unused]] INLINE IntVec even_bytes(IntVec b) { return b; }
[[maybe_unused]] INLINE IntVec odd_bytes(IntVec b) { return b; }
[[maybe_unused]] INLINE UintVec pairs(UintVec u) { return u; }
#endif

INLINE IntVec load_int(const uint32_t* p) {
    IntVec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INLINE IntVec splat_int(uint32_t x) { return IntVec{} + static_cast<int32_t>(x); }

// VS vectors of columns of R rows of multiply_int8().
template <int R, int VS, bool ADD>
INLINE void int8_block(Matrix C, FixedRows rows, Int8Panel panel, int64_t blocks) {
    const uint32_t *const A = rows.data, *B = panel.data;
    const int64_t ldA = rows.ld, ldB = panel.ld;
    Vec total[R][VS] = {};
    for (int64_t k = 0; k < blocks;) {
        const int64_t end = std::min<int64_t>(blocks, k + INT8_GROUP / 4);
        const uint32_t *offsets = B, *scales = B + ldB;
        B += 2 * ldB;
        IntVec high[R][VS], middle[R][VS] = {}, low[R][VS] = {};
        for (int i = 0; i < R; i++)
            for (int v = 0; v < VS; v++) high[i][v] = load_int(offsets + v * W) * (INT8_PAIRS ? 128 : 1);
        for (; BY_LANE && k + W <= end; k += W) {
            IntVec a[R][3];
            for (int i = 0; i < R; i++)
                for (int digit = 0; digit < 3; digit++)
                    a[i][digit] = load_int(A + i * ldA + digit * blocks + k);
            const auto add = [&](auto lane, const uint32_t* row) {
                for (int v = 0; v < VS; v++) {
                    const IntVec b = load_int(row + v * W);
                    for (int i = 0; i < R; i++) {
                        high[i][v] = dot4_lane<lane>(high[i][v], a[i][0], b);
                        middle[i][v] = dot4_lane<lane>(middle[i][v], a[i][1], b);
                        low[i][v] = dot4_lane<lane>(low[i][v], a[i][2], b);
                    }
                }
            };
            add(std::integral_constant<int, 0>(), B), add(std::integral_constant<int, 1>(), B + ldB);
            add(std::integral_constant<int, 2>(), B + 2 * ldB),
                add(std::integral_constant<int, 3>(), B + 3 * ldB);
            B += 4 * ldB;
        }
        for (; k < end; k++, B += ldB) {
            const auto add = [&](int i, int v, IntVec b) {
                const uint32_t* a = A + i * ldA + k;
                if constexpr (INT8_PAIRS) {
                    high[i][v] +=
                        dot2(splat_int(a[0]), even_bytes(b)) + dot2(splat_int(a[blocks]), odd_bytes(b));
                } else {
                    high[i][v] = dot4(high[i][v], splat_int(a[0]), b);
                    middle[i][v] = dot4(middle[i][v], splat_int(a[blocks]), b);
                }
                low[i][v] = dot4(low[i][v], splat_int(a[2 * blocks]), b);
            };
            if constexpr (R <= 2) {  // the digits of the rows stay in registers; of more rows, a part of B does
                for (int v = 0; v < VS; v++) {
                    const IntVec b = kept(load_int(B + v * W));
                    for (int i = 0; i < R; i++) add(i, v, b);
                }
            } else {
                IntVec b[VS];
                for (int v = 0; v < VS; v++) b[v] = kept(load_int(B + v * W));
                for (int i = 0; i < R; i++)
                    for (int v = 0; v < VS; v++) add(i, v, b[v]);
            }
        }
        for (int v = 0; v < VS; v++) {
            const Vec scale = bit_cast<Vec>(load_int(scales + v * W));
            for (int i = 0; i < R; i++) {
                const IntVec sum = INT8_PAIRS ? high[i][v] : high[i][v] * 128 + middle[i][v];
                const Vec upper = __builtin_convertvector(sum, Vec);
                total[i][v] += (upper * 128.0f + __builtin_convertvector(low[i][v], Vec)) * scale;
            }
        }
    }
    for (int i = 0; i < R; i++) {
        float scale;
        std::memcpy(&scale, A + i * ldA + 3 * blocks, sizeof scale);
        for (int v = 0; v < VS; v++) {
            const Vec product = total[i][v] * scale;
            store(C.row(i) + v * W, ADD ? load(C.row(i) + v * W) + product : product);
        }
    }
}

// VS vectors of columns of all rows, R rows at a time and then the rest.
template <int R, int VS, bool ADD>
INLINE void int8_rows(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t blocks) {
    int64_t i = 0;
    const auto from = [&](int64_t row) { return FixedRows{A.data + row * A.ld, A.ld}; };
    for (; i + R <= rows; i += R) int8_block<R, VS, ADD>(C.from(i), from(i), B, blocks);
    if constexpr (R > 1) int8_rows<R / 2, VS, ADD>(C.from(i), from(i), B, rows - i, blocks);
}

// Columns from c on, R rows by VS vectors at a time, and then fewer vectors.
template <int R, int VS, bool ADD>
INLINE void int8_columns(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t c, int64_t cols,
                         int64_t blocks) {
    for (; c + VS * W <= cols; c += VS * W)
        int8_rows<R, VS, ADD>(C.from(0, c), A, {B.data + c, B.ld}, rows, blocks);
    if constexpr (VS > 1) int8_columns<R, VS - 1, ADD>(C, A, B, rows, c, cols, blocks);
}

template <bool ADD>
void int8_product(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t blocks) {
    rows == 1 ? int8_columns<1, WIDE, ADD>(C, A, B, 1, 0, cols, blocks)
              : int8_columns<ROWS, VECS, ADD>(C, A, B, rows, 0, cols, blocks);
}

// `factor`, a power of 2, scales a row to INT8_BITS bits. scale: 1 / factor; NaN if largest is not finite.
struct Scale {
    float factor, scale;

    explicit Scale(float largest) {
        constexpr uint32_t FRACTION = 23, INF = 0xffu << FRACTION;  // the bits of a float's fraction; infinity
        constexpr uint32_t KEPT = INT8_BITS - 2;                    // fraction bits of the largest number
        const uint32_t bits = bit_cast<uint32_t>(largest);
        // The rounded number's exponent; a tiny row takes a larger one, so that its scale is not denormal.
        const uint32_t exponent = std::max((bits + (1u << (FRACTION - 1 - KEPT))) >> FRACTION, KEPT + 1);
        factor = bit_cast<float>((254 + KEPT - exponent) << FRACTION);
        scale = bit_cast<float>(bits < INF ? (exponent - KEPT) << FRACTION : INF + 1);
    }
};

}  // namespace

void to_fixed(uint32_t* row, const float* x, int64_t n) {
    const int64_t blocks = int8_blocks(n);
    const auto magnitude = [](Vec v) { return bit_cast<IntVec>(v) & 0x7fffffff; };  // in the order of integers
    const auto larger = [](IntVec a, IntVec b) { return b > a ? b : a; };
    IntVec most[2] = {};
    fold(x, n, 0.0f, [&](int chain, Vec v) { most[chain] = larger(most[chain], magnitude(v)); });
    int64_t i = 0;
    const int32_t largest = reduce(larger(most[0], most[1]), larger, std::make_index_sequence<W>());
    const Scale scale(bit_cast<float>(largest));
    std::memcpy(row + 3 * blocks, &scale.scale, sizeof scale.scale);

    // Adding SIMD_ROUND rounds, as for 2^x. A row with NaN has no numbers, but its digits have 7 bits too.
    unsigned char* const digits = reinterpret_cast<unsigned char*>(row);
    const auto number = [&](Vec v) {
        const UintVec bits = bit_cast<UintVec>(v * scale.factor + SIMD_ROUND);
        return bits + (1u << (INT8_BITS - 1)) - bit_cast<uint32_t>(SIMD_ROUND);
    };
    const auto store_digits = [&](UintVec u, int64_t bytes) {
        if constexpr (INT8_PAIRS) {
            const UintVec pair = pairs(u >> 7 & 16383);
            std::memcpy(digits + i, &pair, bytes);
            std::memcpy(digits + 4 * blocks + i, reinterpret_cast<const char*>(&pair) + W, bytes);
        }
        for (int digit = INT8_PAIRS ? 2 : 0; digit < 3; digit++) {
            const ByteVec seven = __builtin_convertvector(u >> (14 - 7 * digit) & 127, ByteVec);
            std::memcpy(digits + 4 * blocks * digit + i, &seven, bytes);
        }
    };
    for (i = 0; i + W <= n; i += W) store_digits(number(load(x + i)), W);
    if (i < n) store_digits(number(load_part(x + i, n - i, 0.0f)), 4 * blocks - i);
}

void multiply_int8(Matrix C, FixedRows A, Int8Panel B, int64_t rows, int64_t cols, int64_t depth, bool add) {
    (add ? int8_product<true> : int8_product<false>)(C, A, B, rows, cols, int8_blocks(depth));
}

}  // namespace portable
