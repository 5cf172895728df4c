// Products of few rows of activations with a panel of weights or of keys, in float32 or bfloat16.
//
//   for each chunk of the panel's rows:
//       for each block of rows of A, of columns of the panel:
//           C's numbers stay in registers while the block reads the chunk
//
// So the panel is read from memory once, whatever the number of rows. Each sum goes from first to last in one
// chain, as in the other products, so a row's bits are the same.
#include <algorithm>
#include <type_traits>

#include "simd/portable.h"
#include "simd/vectors/vectors.h"

namespace portable {
namespace {

constexpr int PANEL = 8;                  // vectors of most panels
constexpr int HEAD = 6;                   // of a head's panel of q, k and v: 3 x 32 columns, by 16 floats
constexpr int64_t CHUNK = 4 * REGISTERS;  // rows of B: a panel's are a fraction of L2
constexpr int UNROLL = REGISTERS / 8;     // of the sums
constexpr int64_t MOST = REGISTERS / 4;   // rows of a block, so that registers hold three vectors of each

template <class Element> constexpr bool IS_BF16 = !std::is_same_v<Element, float>;

// Whether registers hold a block of R rows of VS vectors, with its operands and the bfloat16 mask.
template <class Element> constexpr bool fits(int R, int VS) {
    return R * VS + std::min(R, VS) + 1 + (IS_BF16<Element> ? 2 : 0) <= REGISTERS;
}

// Whether they hold it if each pair of vectors loads the numbers of A again, one by one.
template <class Element> constexpr bool fits_by_pairs(int R, int VS) {
    return IS_BF16<Element> && R * VS + /* pair */ 2 + /* mask */ 1 + /* A */ 1 <= REGISTERS;
}

// Vectors in a block of R rows, if the panel has `of`: all of them, or as many as give few blocks.
template <class Element> constexpr int vectors_beside(int R, int of) {
    for (const int VS : {of, 4, 3})
        if ((fits<Element>(R, VS) || fits_by_pairs<Element>(R, VS)) && !(IS_BF16<Element> && VS % 2)) return VS;
    return 2;
}

// Sets columns [0, VS vectors) of R rows of C, or adds to them. With 16 registers a block is less than a
// panel and may escape the hardware's prefetch, so it fetches from the next chunk.
template <int R, int VS, class Element>
INLINE void few_block(Matrix C, bool add, ConstMatrix A, const Element* B, int64_t ldB, int64_t depth,
                      const char*& next) {
    constexpr int LINE = 64, BYTES = VS * W * (IS_BF16<Element> ? 2 : 4);
    Vec acc[R][VS];
    for (int i = 0; i < R; i++)
        for (int v = 0; v < VS; v++) acc[i][v] = add ? load(C.row(i) + v * W) : Vec{};
    if (depth <= 0) __builtin_unreachable();
#pragma GCC unroll UNROLL
    for (int64_t k = 0; k < depth; k++, B += ldB) {
        if constexpr (REGISTERS == 16) {
            for (int byte = 0; byte < BYTES; byte += LINE) __builtin_prefetch(next + byte, 0, IN_L2);
            next += BYTES;
        }
        if constexpr (!fits<Element>(R, VS) && fits_by_pairs<Element>(R, VS)) {
            for (int v = 0; v < VS; v += 2) {
                const Vec x = kept(column(B, v)), y = kept(column(B, v + 1));
                const int64_t at = unknown(k);
                for (int i = 0; i < R; i++) {
                    const Vec a = kept(A.row(i)[at] - Vec{});
                    acc[i][v] += a * x;
                    acc[i][v + 1] += a * y;
                }
            }
        } else if constexpr (R < VS) {
            Vec a[R];
            for (int i = 0; i < R; i++) a[i] = kept(A.row(i)[k] - Vec{});
            for (int v = 0; v < VS; v++) {
                const Vec x = kept(column(B, v));
                for (int i = 0; i < R; i++) acc[i][v] += a[i] * x;
            }
        } else {
            Vec x[VS];
            for (int v = 0; v < VS; v++) x[v] = column(B, v);
            for (int i = 0; i < R; i++)
                for (int v = 0; v < VS; v++) acc[i][v] += A.row(i)[k] * x[v];
        }
    }
    for (int i = 0; i < R; i++)
        for (int v = 0; v < VS; v++) store(C.row(i) + v * W, acc[i][v]);
}

// Columns from c on of R rows, VS vectors at a time and then fewer.
template <int R, int VS, class Element>
INLINE void few_columns(Matrix C, bool add, ConstMatrix A, const Element* B, int64_t ldB, int64_t c,
                        int64_t cols, int64_t depth, const char* next) {
    for (; c + VS * W <= cols; c += VS * W)
        few_block<R, VS>(C.from(0, c), add, A, columns(B, c), ldB, depth, next);
    if constexpr (VS != HEAD && VS > (IS_BF16<Element> ? 2 : 1))  // heads leave no rest
        few_columns<R, VS == 3 ? 2 : VS / 2>(C, add, A, B, ldB, c, cols, depth, next);
}

// All columns of `rows` rows, at most R.
template <int R, class Element>
void few_rows(Matrix C, bool add, ConstMatrix A, const Element* B, int64_t ldB, int64_t rows, int64_t cols,
              int64_t depth, const char* next) {
    if constexpr (R > 1)
        if (rows < R) return few_rows<R - 1>(C, add, A, B, ldB, rows, cols, depth, next);
    if constexpr (vectors_beside<Element>(R, HEAD) == HEAD)
        if (cols % (HEAD * W) == 0 && cols % (PANEL * W) != 0)
            return few_columns<R, HEAD>(C, add, A, B, ldB, 0, cols, depth, next);
    few_columns<R, vectors_beside<Element>(R, PANEL)>(C, add, A, B, ldB, 0, cols, depth, next);
}

template <class Element>
void few_product(Matrix C, ConstMatrix A, const Element* B, int64_t ldB, int64_t rows, int64_t cols,
                 int64_t depth, bool add, const void* after) {
    const int64_t blocks = (rows + MOST - 1) / MOST;
    for (int64_t k = 0; k < depth; k += CHUNK) {
        const int64_t terms = std::min(CHUNK, depth - k);
        const Element* const chunk = B + k * ldB;
        const void* const next = after && k + terms == depth ? after : chunk + terms * ldB;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t r = rows * b / blocks, n = rows * (b + 1) / blocks - r;
            few_rows<MOST>(C.from(r), add || k > 0, A.from(r, k), chunk, ldB, n, cols, terms,
                           static_cast<const char*>(next));
        }
    }
}

}  // namespace

void multiply_few(Matrix C, ConstMatrix A, ConstMatrix B, int64_t rows, int64_t cols, int64_t depth, bool add,
                  const void* after) {
    few_product(C, A, B.data, B.ld, rows, cols, depth, add, after);
}

void multiply_few(Matrix C, ConstMatrix A, Bf16Pairs B, int64_t rows, int64_t cols, int64_t depth, bool add,
                  const void* after) {
    few_product(C, A, B.data, B.ld, rows, cols, depth, add, after);
}

}  // namespace portable
