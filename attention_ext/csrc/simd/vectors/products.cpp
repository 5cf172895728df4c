// Products in float32, or with a bfloat16 right operand: matrix by matrix, row by matrix. Transposition.
#include <algorithm>
#include <type_traits>

#include "simd/portable.h"
#include "simd/vectors/vectors.h"

namespace portable {
namespace {

// A register block: ROWS x VECS accumulators, and VECS + 1 registers for the operands.
#if defined(__AVX512F__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr int ROWS = 4, VECS = 4;  // Zen 4 (older compilers call it znver3)
#elif defined(__AVX512F__)
constexpr int ROWS = 8, VECS = 3;
#elif defined(__AVX__)
constexpr int ROWS = 4, VECS = 3;  // 16 registers
#elif defined(__aarch64__)
constexpr int ROWS = 8, VECS = 2;  // with the numbers of A in lanes, 26 of 32 registers
#else
// SSE has no multiply-add, and broadcasts in two instructions: few of them are better.
constexpr int ROWS = SMALL ? 4 : 2, VECS = SMALL ? 3 : 4;
#endif
constexpr int PANEL = W == 4 && !SMALL ? 4 : VECS;  // vectors
// Rows of a two-vector block for sums of at least LONG products: B's columns are read half as often.
constexpr int TALL = W == 16 ? 8 : ROWS;
constexpr int64_t LONG = 48;
constexpr int UNROLL = W == 8 ? 4 : 2;  // of the sums; 4 for short sums in 16 registers
constexpr int NARROW =
    REGISTERS == 16 && !SMALL ? 8 : ROWS;  // rows of one vector, to hide an addition's latency
constexpr int WIDE = 8;                    // vectors of one row, likewise

// C <- A B, or C + A B: A(i, k) is A[i * row_stride + k * depth_stride]. All functions with it are inlined.
template <class Element> struct Operands {
    float* C;
    int64_t ldC;
    const float* A;
    int64_t row_stride, depth_stride;
    const Element* B;
    int64_t ldB;

    INLINE Operands from_row(int64_t i) const {
        return {C + i * ldC, ldC, A + i * row_stride, row_stride, depth_stride, B, ldB};
    }
    INLINE Operands from_column(int64_t c) const {
        return {C + c, ldC, A, row_stride, depth_stride, columns(B, c), ldB};
    }
};

// acc[i][v] <- acc[i][v] + A(i, k) * B[k] in the vectors from G on; with CUT, in G only lanes after `hidden`.
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
#if defined(__clang__) && defined(__AVX__) && !defined(__AVX512F__)
        // One row after the other: Clang's order takes more than 16 registers, and 32 texts a third longer.
        if constexpr (!CUT && R * VS == 12)
            for (int v = 0; v < VS; v++) asm("" : "+x"(x[v]), "+x"(acc[i][v]));
#endif
    }
}

// ARM multiplies by a lane of a register, but a load that broadcasts takes the place of a multiply-add.
constexpr bool BY_LANE = W == 4 && REGISTERS == 32;

// Adds the first products whose numbers of A are loaded W at a time, at most `all`; returns how many.
template <int R, int VS, class Element>
INLINE int64_t add_by_lane(Vec (&acc)[R][VS], const Operands<Element>& o, int64_t all) {
    Vec a[R];
    const auto add = [&](int64_t k, auto number) {
        Vec x[VS];
        for (int v = 0; v < VS; v++) x[v] = column(o.B + k * o.ldB, v);
        for (int i = 0; i < R; i++)
            for (int v = 0; v < VS; v++) acc[i][v] += number(i) * x[v];
    };
    int64_t k = 0;
    if (o.depth_stride == 1) {
        for (; k + W <= all; k += W) {
            for (int i = 0; i < R; i++) a[i] = load(o.A + i * o.row_stride + k);
#pragma GCC unroll 4
            for (int lane = 0; lane < W; lane++) add(k + lane, [&](int i) { return a[i][lane]; });
        }
    } else if (R % W == 0 && o.row_stride == 1) {
#pragma GCC unroll UNROLL
        for (; k < all; k++) {
            for (int i = 0; i < R; i += W) a[i] = load(o.A + k * o.depth_stride + i);
            add(k, [&](int i) { return a[i / W * W][i % W]; });
        }
    }
    return k;
}

// The products from k on that only some lanes of vector G take; its first column takes `first` products.
template <int G, int R, int VS, class Element>
INLINE void descend(Vec (&acc)[R][VS], const Operands<Element>& o, int64_t k, int64_t depth, int64_t first) {
    const int64_t end = std::min(depth, first + W);
    for (; k < end; k++)
        add_products<G, true>(acc, o.A + k * o.depth_stride, o.row_stride, o.B + k * o.ldB, k - first);
    if constexpr (G + 1 < VS) descend<G + 1>(acc, o, k, depth, first + W);
}

// The first VS vectors of R rows of C, in registers. With ADD they start from C; with STAIRS k < first + c.
template <int R, int VS, bool ADD, bool STAIRS, class Element>
INLINE void register_block(const Operands<Element>& o, int64_t depth, int64_t first) {
    Vec acc[R][VS];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < VS; v++) acc[i][v] = ADD ? load(o.C + i * o.ldC + v * W) : Vec{};
    if (!STAIRS && depth <= 0)
        __builtin_unreachable();  // otherwise GCC keeps a copy of C on the stack for that case
    const int64_t all = STAIRS ? std::min(first, depth) : depth;
    int64_t k = BY_LANE ? add_by_lane(acc, o, all) : 0;
#pragma GCC unroll UNROLL
    for (; k < all; k++)
        add_products<0, false>(acc, o.A + k * o.depth_stride, o.row_stride, o.B + k * o.ldB, 0);
    if constexpr (STAIRS) descend<0>(acc, o, all, depth, first);
    for (int i = 0; i < R; i++)
        for (int v = 0; v < VS; v++) store(o.C + i * o.ldC + v * W, acc[i][v]);
}

// The last columns, n < W of them: one row at a time.
template <bool ADD>
void last_columns(const Operands<float>& o, int64_t rows, int64_t n, int64_t depth, int64_t first) {
    const IntVec lane = lane_numbers();
    for (int64_t i = 0; i < rows; i++) {
        Vec acc = ADD ? load_part(o.C + i * o.ldC, n, 0.0f) : Vec{};
        for (int64_t k = 0; k < depth; k++) {
            const Vec b = load_part(o.B + k * o.ldB, n, 0.0f);
            const Vec next = acc + o.A[i * o.row_stride + k * o.depth_stride] * b;
            acc = lane > static_cast<int>(k - first) ? next : acc;
        }
        store_part(o.C + i * o.ldC, acc, n);
    }
}

// VS vectors of columns of all rows, R rows at a time and then the rest.
template <int R, int VS, bool ADD, bool STAIRS, class Element>
INLINE void block_column(const Operands<Element>& o, int64_t rows, int64_t depth, int64_t first) {
    int64_t i = 0;
    for (; i + R <= rows; i += R) register_block<R, VS, ADD, STAIRS>(o.from_row(i), depth, first);
    if constexpr (R > 1) block_column<R / 2, VS, ADD, STAIRS>(o.from_row(i), rows - i, depth, first);
}

// One row's whole vectors from c on, at most VS at a time: a panel is one stream. Returns their end.
template <int VS, bool ADD, class Element>
INLINE int64_t one_row(const Operands<Element>& o, int64_t c, int64_t cols, int64_t depth) {
    for (; c + VS * W <= cols; c += VS * W) register_block<1, VS, ADD, false>(o.from_column(c), depth, 0);
    if constexpr (VS > 1)
        return one_row<VS - 1, ADD>(o, c, cols, depth);
    else
        return c;
}

// Whole vectors of columns from c on, VS at a time; returns where they end.
template <int VS, bool ADD, class Element>
INLINE int64_t block_columns(const Operands<Element>& o, int64_t rows, int64_t c, int64_t cols, int64_t depth,
                             int64_t first) {
    if constexpr (ADD && std::is_same_v<Element, float>)
        for (; c + VS * W <= cols && first + c < depth; c += VS * W)
            block_column<ROWS, VS, ADD, true>(o.from_column(c), rows, depth, first + c);
    constexpr int R = VS == 1 ? NARROW : ROWS;
    for (; c + VS * W <= cols; c += VS * W) block_column<R, VS, ADD, false>(o.from_column(c), rows, depth, 0);
    return c;
}

// All whole vectors of columns, the widest blocks first; bfloat16 has its vectors in pairs.
template <bool ADD, class Element>
INLINE int64_t whole_columns(const Operands<Element>& o, int64_t rows, int64_t cols, int64_t depth,
                             int64_t first) {
    constexpr int MOST = std::is_same_v<Element, float> ? VECS : 2;
    int64_t c = 0;
    if (rows == 1 && first >= depth) c = one_row<WIDE, ADD>(o, c, cols, depth);
    if constexpr (ROWS < TALL)
        for (; rows >= TALL && first >= depth && o.depth_stride == 1 && depth >= LONG && c + 2 * W <= cols;
             c += 2 * W)
            block_column<TALL, 2, ADD, false>(o.from_column(c), rows, depth, 0);
    c = block_columns<MOST, ADD>(o, rows, c, cols, depth, first);
    c = block_columns<2, ADD>(o, rows, c, cols, depth, first);
    return block_columns<1, ADD>(o, rows, c, cols, depth, first);
}

template <bool ADD>
INLINE void product(const Operands<float>& o, int64_t rows, int64_t cols, int64_t depth, int64_t first) {
    const int64_t c = whole_columns<ADD>(o, rows, cols, depth, first);
    if (!ADD && c < cols && cols >= W)  // the last whole vector: some columns are computed twice
        block_column<ROWS, 1, false, false>(o.from_column(cols - W), rows, depth, 0);
    else if (c < cols)
        last_columns<ADD>(o.from_column(c), rows, cols - c, depth, first + c);
}

// The first and the second half of a0 b0 a1 b1 ...
template <size_t... I> INLINE void interleave(Vec a, Vec b, Vec& low, Vec& high, std::index_sequence<I...>) {
    low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...);
    high = __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...);
}

// A W x W square: log2(W) interleavings of rows i and i + W / 2 transpose it.
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

constexpr int ROWS_BESIDE = 3;  // of two vectors each: with all chains they fill 24 of 32 registers
constexpr int64_t AHEAD =
    128;  // with 16 registers, rows of B fetched ahead for several rows of P, as in few_rows.cpp

// O[i] <- O[i] + sum_j P[i][j] * B[j], j < min(n, first + i), for VS vectors; the chains do not depend on R.
template <int R, int VS, class Operand>
INLINE void weighted_block(Matrix O, ConstMatrix P, const Operand& B, int64_t n, int64_t first) {
    constexpr int CHAINS = 4;
    constexpr int BESIDE = REGISTERS == 32 || R == 1 ? CHAINS : 2;  // chains that are in registers together
    Vec acc[R][CHAINS][VS];
    const int64_t shared = std::min(n, first) / CHAINS * CHAINS;
    for (int begin = 0; begin < CHAINS; begin += BESIDE) {
        Vec beside[R][BESIDE][VS] = {};
        const auto add = [&](int64_t j, auto fetches) {
            for (int k = 0; k < BESIDE; k++) {
                if constexpr (fetches) __builtin_prefetch(B.data + (j + k + AHEAD) * B.ld, 0, IN_L2);
                Vec x[VS];
                for (int v = 0; v < VS; v++) {
                    x[v] = column(B.data + (j + k) * B.ld, v);
                    if (R > 1) x[v] = kept(x[v]);
                }
                for (int i = 0; i < R; i++)
                    for (int v = 0; v < VS; v++) beside[i][k][v] += P.data[i * P.ld + j + k] * x[v];
            }
        };
        int64_t j = begin;
        if constexpr (BESIDE < CHAINS)
            for (; j < shared - AHEAD; j += CHAINS) add(j, std::true_type{});
        for (; j < shared; j += CHAINS) add(j, std::false_type{});
        for (int i = 0; i < R; i++)
            for (int k = 0; k < BESIDE; k++)
                for (int v = 0; v < VS; v++) acc[i][begin + k][v] = beside[i][k][v];
    }
    for (int i = 0; i < R; i++) {
        const int64_t rows = std::min(n, first + i);
        const auto add = [&](int64_t j, int chain) {
            for (int v = 0; v < VS; v++)
                acc[i][chain][v] += P.data[i * P.ld + j] * column(B.data + j * B.ld, v);
        };
        int64_t j = shared;
        for (; R > 1 && j + CHAINS <= rows; j += CHAINS)
            for (int k = 0; k < CHAINS; k++) add(j + k, k);
        for (; j < rows; j++) add(j, 0);
        float* o = O.row(i);
        for (int v = 0; v < VS; v++)
            store(o + v * W, load(o + v * W) + ((acc[i][0][v] + acc[i][1][v]) + (acc[i][2][v] + acc[i][3][v])));
    }
}

// All rows, at most R at a time.
template <int R, class Operand>
INLINE void weighted_rows(Matrix O, ConstMatrix P, const Operand& B, int64_t rows, int64_t n, int64_t first) {
    int64_t i = 0;
    for (; i + R <= rows; i += R) weighted_block<R, 2>(O.from(i), P.from(i), B, n, first + i);
    if constexpr (R > 1)
        if (i < rows) weighted_rows<R - 1>(O.from(i), P.from(i), B, rows - i, n, first + i);
}

// The columns from c on of one row, VS vectors at a time; returns where they end.
template <int VS, class Operand>
INLINE int64_t weighted_columns(float* o, const float* p, const Operand& B, int64_t rows, int64_t c,
                                int64_t cols) {
    for (; c + VS * W <= cols; c += VS * W)
        weighted_block<1, VS>({o + c, 0}, {p, 0}, from_column(B, c), rows, rows);
    return c;
}

}  // namespace

int64_t lanes() { return W; }

int64_t panel() { return PANEL * W; }

int64_t rows() { return ROWS; }

const char* name() {
    return W == 16 ? "portable C++, 16 floats" : W == 8 ? "portable C++, 8 floats" : "portable C++, 4 floats";
}

// The maximum and the sum; x - m and 2^x; where 2^x loses NaN, another sum.
int64_t softmax_instructions() { return 2 + (KEEPS_NAN ? 9 : W == 16 ? 13 : 11); }

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
    product<false>({C.data, C.ld, A.data, A.row_stride, A.depth_stride, B.data, B.ld}, rows, cols, depth,
                   depth);
}

void multiply_add(Matrix C, const Strided& A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth,
                  int64_t first) {
    product<true>({C.data, C.ld, A.data, A.row_stride, A.depth_stride, B.data, B.ld}, rows, cols, depth, first);
}

void multiply_bf16(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add) {
    const Operands<uint32_t> o{C.data, C.ld, A.data, A.ld, 1, B.data, B.ld};
    add ? whole_columns<true>(o, rows, cols, depth, depth) : whole_columns<false>(o, rows, cols, depth, depth);
}

void add_weighted_rows(float* o, const float* p, ConstMatrix B, int64_t rows, int64_t cols) {
    int64_t c = weighted_columns<4>(o, p, B, rows, 0, cols);
    c = weighted_columns<2>(o, p, B, rows, c, cols);
    c = weighted_columns<1>(o, p, B, rows, c, cols);
    if (c < cols) last_columns<true>({o + c, 0, p, 0, 1, B.data + c, B.ld}, 1, cols - c, rows, rows);
}

void add_weighted_rows(float* o, const float* p, Bf16Pairs B, int64_t rows, int64_t cols) {
    weighted_columns<2>(o, p, B, rows, weighted_columns<4>(o, p, B, rows, 0, cols), cols);
}

void add_weighted_few(Matrix O, ConstMatrix P, ConstMatrix B, int64_t rows, int64_t n, int64_t first,
                      int64_t cols) {
    int64_t c = 0;
    for (; c + 2 * W <= cols; c += 2 * W)
        weighted_rows<ROWS_BESIDE>(O.from(0, c), P, from_column(B, c), rows, n, first);
    for (int64_t i = 0; c < cols && i < rows; i++)
        add_weighted_rows(O.row(i) + c, P.row(i), from_column(B, c), std::min(n, first + i), cols - c);
}

void add_weighted_few(Matrix O, ConstMatrix P, Bf16Pairs B, int64_t rows, int64_t n, int64_t first,
                      int64_t cols) {
    for (int64_t c = 0; c < cols; c += 2 * W)
        weighted_rows<ROWS_BESIDE>(O.from(0, c), P, from_column(B, c), rows, n, first);
}

}  // namespace portable
