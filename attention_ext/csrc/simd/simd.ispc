// The SIMD helpers in ISPC, as simd.h describes them. A lane is one column, or a row of a dot product;
// nothing is gathered or scattered; `uniform` numbers are broadcast.

#include "constants.h"

#define ROWS 8  // rows of a register block
#define VECS 3  // vectors of columns for which the products are fastest, at most 4 in a block

#define INF floatbits(0x7f800000)

// 2^x for x <= 8, as constants.h describes; 0 for NaN.
static inline float exp2_bounded(float x) {
    const float z = x + SIMD_ROUND;
    const float f = x - (z - SIMD_ROUND);
    float p = f * SIMD_EXP2_C5 + SIMD_EXP2_C4;
    p = p * f + SIMD_EXP2_C3;
    p = p * f + SIMD_EXP2_C2;
    p = p * f + SIMD_EXP2_C1;
    p = p * f + SIMD_EXP2_C0;
    return x >= SIMD_EXP2_LEAST ? floatbits(intbits(p) + (intbits(z) << 23)) : 0.0f;
}

static inline float larger(float a, float b) { return b > a ? b : a; }  // a where either is NaN

static inline float nan_if(float witness, float x) { return witness == witness ? x : witness; }

export uniform int64 ispc_lanes() { return programCount; }
export uniform int64 ispc_panel() { return VECS * programCount; }
export uniform int64 ispc_rows() { return ROWS; }

// The operands of C <- A B, or C + A B: A(i, k) is A[i * row_stride + k * depth_stride].
struct Operands {
    uniform float* uniform C;
    uniform int64 ldC;
    const uniform float* uniform A;
    uniform int64 row_stride, depth_stride;
    const uniform float* uniform B;
    uniform int64 ldB;
};

static inline uniform Operands from(const uniform Operands& o, uniform int64 row, uniform int64 column) {
    uniform Operands part = o;
    part.C += row * o.ldC + column;
    part.A += row * o.row_stride;
    part.B += column;
    return part;
}

// R rows by VS vectors of C in registers over the depth; with STAIRS column c takes k < first + c. Named
// accumulators: ispc keeps an array in memory. Conditions on R, VS and STAIRS are compile-time constants.
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define DECLARE(i) float x##i = 0.0f, y##i = 0.0f, z##i = 0.0f, w##i = 0.0f;
#define LOAD(i)                                                                        \
    if (add && i < R) {                                                                \
        x##i = o.C[i * o.ldC + programIndex];                                          \
        if (VS > 1) y##i = o.C[i * o.ldC + V + programIndex];                          \
        if (VS > 2) z##i = o.C[i * o.ldC + 2 * V + programIndex];                      \
        if (VS > 3) w##i = o.C[i * o.ldC + 3 * V + programIndex];                      \
    }
#define ADD_PRODUCT(i)                                                                 \
    if (i < R) {                                                                       \
        const uniform float a = o.A[i * o.row_stride + k * o.depth_stride];            \
        if (done < 1) x##i = seen ? x##i + a * x : x##i;                               \
        if (VS > 1 && done == 1) y##i = seen ? y##i + a * y : y##i;                    \
        if (VS > 1 && done < 1) y##i += a * y;                                         \
        if (VS > 2 && done == 2) z##i = seen ? z##i + a * z : z##i;                    \
        if (VS > 2 && done < 2) z##i += a * z;                                         \
        if (VS > 3) w##i += a * w;                                                     \
    }
// Products k to END: the first DONE vectors of a row are complete; the next takes products only in lanes with SEEN.
#define ADD_PRODUCTS(DONE, SEEN, END)                                                  \
    for (; k < END; k++) {                                                             \
        const uniform int done = DONE;                                                 \
        const bool seen = SEEN;                                                        \
        const float x = o.B[k * o.ldB + programIndex];                                 \
        float y = 0.0f, z = 0.0f, w = 0.0f;                                            \
        if (VS > 1) y = o.B[k * o.ldB + V + programIndex];                             \
        if (VS > 2) z = o.B[k * o.ldB + 2 * V + programIndex];                         \
        if (VS > 3) w = o.B[k * o.ldB + 3 * V + programIndex];                         \
        EACH_ROW(ADD_PRODUCT)                                                          \
    }
#define STORE(i)                                                                       \
    if (i < R) {                                                                       \
        o.C[i * o.ldC + programIndex] = x##i;                                          \
        if (VS > 1) o.C[i * o.ldC + V + programIndex] = y##i;                          \
        if (VS > 2) o.C[i * o.ldC + 2 * V + programIndex] = z##i;                      \
        if (VS > 3) o.C[i * o.ldC + 3 * V + programIndex] = w##i;                      \
    }

template <int R, int VS, int STAIRS>
static inline void register_block(const uniform Operands o, uniform int64 depth, uniform int64 first,
                                  uniform bool add) {
    const uniform int V = programCount;
    EACH_ROW(DECLARE)
    EACH_ROW(LOAD)
    uniform int64 k = 0;
    const uniform int64 all = STAIRS ? min(first, depth) : depth;
    ADD_PRODUCTS(0, true, all)
    if (STAIRS) {
        ADD_PRODUCTS(0, programIndex > (uniform int)(k - first), min(depth, first + V))
        if (VS > 1) { ADD_PRODUCTS(1, programIndex > (uniform int)(k - first - V), min(depth, first + 2 * V)) }
        if (VS > 2) { ADD_PRODUCTS(2, programIndex > (uniform int)(k - first - 2 * V), min(depth, first + 3 * V)) }
    }
    EACH_ROW(STORE)
}

// All rows of VS vectors of columns.
template <int VS, int STAIRS>
static inline void block_column(const uniform Operands o, uniform int64 rows, uniform int64 depth,
                                uniform int64 first, uniform bool add) {
    uniform int64 i = 0;
    for (; i + ROWS <= rows; i += ROWS) register_block<ROWS, VS, STAIRS>(from(o, i, 0), depth, first, add);
    for (; i + 2 <= rows; i += 2) register_block<2, VS, STAIRS>(from(o, i, 0), depth, first, add);
    for (; i < rows; i++) register_block<1, VS, STAIRS>(from(o, i, 0), depth, first, add);
}

// Whole vectors of columns from c on, VS at a time; returns where they end.
template <int VS>
static inline uniform int64 block_columns(const uniform Operands o, uniform int64 rows, uniform int64 c,
                                          uniform int64 cols, uniform int64 depth, uniform int64 first,
                                          uniform bool add) {
    const uniform int64 width = VS * programCount;
    for (; c + width <= cols && first + c < depth; c += width)
        block_column<VS, 1>(from(o, 0, c), rows, depth, first + c, add);
    for (; c + width <= cols; c += width) block_column<VS, 0>(from(o, 0, c), rows, depth, 0, add);
    return c;
}

export void ispc_product(const uniform Operands& o, uniform int64 rows, uniform int64 cols, uniform int64 depth,
                         uniform int64 first, uniform bool add) {
    uniform int64 c = 0;
    // a single row needs more vectors for enough independent sums
    for (; rows == 1 && first >= depth && c + 4 * programCount <= cols; c += 4 * programCount)
        register_block<1, 4, 0>(from(o, 0, c), depth, 0, add);
    c = block_columns<3>(o, rows, c, cols, depth, first, add);
    c = block_columns<2>(o, rows, c, cols, depth, first, add);
    c = block_columns<1>(o, rows, c, cols, depth, first, add);
    if (c + programIndex < cols) {  // the last columns, less than a vector
        for (uniform int64 i = 0; i < rows; i++) {
            float acc = add ? o.C[i * o.ldC + c + programIndex] : 0.0f;
            for (uniform int64 k = 0; k < depth; k++) {
                const float b = o.B[k * o.ldB + c + programIndex];
                const float next = acc + o.A[i * o.row_stride + k * o.depth_stride] * b;
                acc = programIndex > (uniform int)(k - first - c) ? next : acc;
            }
            o.C[i * o.ldC + c + programIndex] = acc;
        }
    }
}

// a and b hold partial sums in runs of G lanes; the result's are half as long, a's where the bit G / 2 is 0.
static inline float halve_runs(float a, float b, const uniform int G) {
    const bool has_bit = (programIndex & (G / 2)) != 0;
    const float stay = has_bit ? b : a;
    const float cross = has_bit ? a : b;
    return stay + shuffle(cross, programIndex ^ (G / 2));
}

#define EACH_LANE(DO) EACH_ROW(DO) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
#define DECLARE_DOT(i) float x##i = 0.0f;
#define ADD_TO_DOT(i) \
    if (i < programCount) x##i += a * b[i * ldB + c + programIndex];
#define HALVE(G, i, k) x##i = halve_runs(x##i, x##k, G);

// s[i] <- scale * x . B[i] for programCount rows, at most 16: each lane sums a share, then lanes are added.
static inline void dot_block(uniform float* uniform s, const uniform float* uniform x,
                             const uniform float* uniform b, uniform int64 ldB, uniform int64 depth,
                             uniform float scale) {
    EACH_LANE(DECLARE_DOT)
    const uniform int64 whole = depth / programCount * programCount;
    for (uniform int64 c = 0; c < whole; c += programCount) {
        const float a = x[c + programIndex];
        EACH_LANE(ADD_TO_DOT)
    }
    if (whole + programIndex < depth) {
        const uniform int64 c = whole;
        const float a = x[c + programIndex];
        EACH_LANE(ADD_TO_DOT)
    }
    if (programCount == 16) {
        HALVE(16, 0, 8) HALVE(16, 1, 9) HALVE(16, 2, 10) HALVE(16, 3, 11)
        HALVE(16, 4, 12) HALVE(16, 5, 13) HALVE(16, 6, 14) HALVE(16, 7, 15)
    }
    if (programCount >= 8) { HALVE(8, 0, 4) HALVE(8, 1, 5) HALVE(8, 2, 6) HALVE(8, 3, 7) }
    HALVE(4, 0, 2) HALVE(4, 1, 3) HALVE(2, 0, 1)
    s[programIndex] = scale * x0;
}

export void ispc_dot_rows(uniform float s[], const uniform float x[], const uniform float B[],
                          uniform int64 ldB, uniform int64 rows, uniform int64 depth, uniform float scale) {
    uniform int64 j = 0;
    for (; j + programCount <= rows; j += programCount)
        dot_block((uniform float * uniform) s + j, x, B + j * ldB, ldB, depth, scale);
    for (; j < rows; j++) {
        float acc = 0.0f;
        foreach (c = 0 ... (uniform int)depth) acc += x[c] * B[j * ldB + c];
        // in the order of dot_block, so that equal rows have equal sums
        for (uniform int half = programCount / 2; half > 0; half /= 2)
            acc += shuffle(acc, programIndex ^ half);
        s[j] = scale * extract(acc, 0);
    }
}

export void ispc_add_weighted_rows(uniform float o[], const uniform float p[], const uniform float B[],
                                   uniform int64 ldB, uniform int64 rows, uniform int64 cols) {
    for (uniform int64 c = 0; c < cols; c += programCount) {
        if (c + programIndex < cols) {
            float a0 = o[c + programIndex], a1 = 0.0f, a2 = 0.0f, a3 = 0.0f;  // four independent sums
            uniform int64 j = 0;
            for (; j + 4 <= rows; j += 4) {
                a0 += p[j] * B[j * ldB + c + programIndex];
                a1 += p[j + 1] * B[(j + 1) * ldB + c + programIndex];
                a2 += p[j + 2] * B[(j + 2) * ldB + c + programIndex];
                a3 += p[j + 3] * B[(j + 3) * ldB + c + programIndex];
            }
            for (; j < rows; j++) a0 += p[j] * B[j * ldB + c + programIndex];
            o[c + programIndex] = (a0 + a1) + (a2 + a3);
        }
    }
}

static inline void add_exp(uniform float x[], uniform int64 i, uniform float m, float &total, float &witness) {
    const float y = (x[i + programIndex] - m) * SIMD_LOG2E;
    const float e = exp2_bounded(y);
    x[i + programIndex] = e;
    total += e;
    witness += y;
}

// The whole vectors of a row, then the rest under a mask.
export uniform float ispc_exp_sum(uniform float x[], uniform int64 n, uniform float m) {
    float total = 0.0f, witness = 0.0f;
    uniform int64 i = 0;
    for (; i + programCount <= n; i += programCount) add_exp(x, i, m, total, witness);
    if (i + programIndex < n) add_exp(x, i, m, total, witness);
    return reduce_add(nan_if(witness, total));
}

export uniform bool ispc_online_softmax(uniform float S[], uniform int64 ldS, uniform int64 rows,
                                        uniform int64 cols, uniform int64 first, uniform float m[],
                                        uniform float l[], uniform float correction[]) {
    bool moved = false;
    for (uniform int64 c = 0; c < cols; c += programCount) {
        const uniform int64 all = min(rows, first + c), some = min(rows, first + c + programCount);
        const float before = m[c + programIndex];
        float even = before, odd = before;
        uniform int64 j = 0;
        for (; j + 1 < all; j += 2) {
            even = larger(even, S[j * ldS + c + programIndex]);
            odd = larger(odd, S[(j + 1) * ldS + c + programIndex]);
        }
        for (; j < some; j++) {
            const float s = S[j * ldS + c + programIndex];
            even = larger(even, programIndex > (uniform int)(j - first - c) ? s : -INF);
        }
        const float most = larger(even, odd);
        const float after = most > before + SIMD_MAX_LAG ? most : before;
        const float subtracted = after == -INF ? 0.0f : after;  // -inf - -inf would be NaN

        float total = 0.0f, witness = 0.0f;
        for (j = 0; j < some; j++) {
            float x = S[j * ldS + c + programIndex] - subtracted;
            if (j >= all) x = programIndex > (uniform int)(j - first - c) ? x : -INF;
            const float p = exp2_bounded(x);
            S[j * ldS + c + programIndex] = p;
            total += p;
            witness += x;
        }
        const float a = exp2_bounded(before - subtracted);
        m[c + programIndex] = after;
        l[c + programIndex] = nan_if(witness, a * l[c + programIndex] + total);
        correction[c + programIndex] = a;
        moved = moved || a != 1.0f;
    }
    return any(moved);
}
