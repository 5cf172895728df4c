// Part 4 for few queries, as in a decoder's step.
//
//   for each batch, head, split of the keys, query (or tile of queries), over all threads:
//       O, l, m <- 0, 0, -inf
//       for each block of keys of the split:
//           S <- scale * Q K^T;  m', P, l, then O <- exp(m - m') O + P V
//       O <- O / l;  lse <- m + log(l)
//   merge the splits by lse
//
// At most FEW queries would fill a vector mostly with padding, so the lanes span keys. K may be transposed, as
// in a cache: each of its rows is then a feature, and the scores need no sums across lanes.
//
// Few queries make few tiles, and most threads would idle. So the keys are divided into splits, each attended
// to as if it were all keys (flash-decoding, Dao et al. 2023). Splits depend on the sizes, not on the threads.
// More than FEW queries go through part4_flash.cpp's tiles in each split.
//
// Scratch: threads x (2 d + a block of scores), for bfloat16 another 2 Bc d, or that of a tile; and the splits'
// results, Nk / SPLIT per query.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "buffer.h"
#include "cpu/part4.h"
#include "cpu/softmax.h"
#include "parts.h"
#include "simd/portable.h"
#include "simd/simd.h"
#include "threads.h"

namespace part4 {
namespace {

constexpr int64_t BLOCK = 512;  // keys of a query at a time, if Bc is not larger: the scores stay in L1
// Fewer strips of queries than MOST_STRIPS may leave threads idle. Then more than MOST_KEYS keys are divided
// into splits of about SPLIT keys, enough that merging costs little. With LEAST_RATIO times as many keys as
// queries, the splits' results need less memory than K.
constexpr int64_t MOST_STRIPS = 64, MOST_KEYS = 2048, SPLIT = 1024, LEAST_RATIO = 8;
constexpr double MOST_NUMBERS = 0x1p40;  // numbers in the splits' results
// Whether the helpers' products of several rows are those of each row.
#if defined(SIMD_ELSEWHERE)
constexpr bool ALIKE = false;
#else
constexpr bool ALIKE = !portable::SMALL;
#endif
constexpr float LOW = -std::numeric_limits<float>::infinity();

// A head's keys and values for one query, a struct for each layout. block(): keys whose scores are computed
// together. columns(): floats of a row of V. scores(): S <- Q K^T for the keys j0 .. j0 + n - 1; S has room for
// whole vectors. add(): O <- O + P V for the same keys.

// K and V (Nk, d), as tensors hold them.
struct Rows {
    const Attention& a;
    const float *K, *V;

    Rows(const Attention& a, int64_t head, float*) : a(a), K(a.k_of(head)), V(a.v_of(head)) {}
    int64_t block() const { return a.Bc < BLOCK ? BLOCK / a.Bc * a.Bc : a.Bc; }
    int64_t columns() const { return a.d; }
    // What a product with the panel of key j0 + j fetches: the next panel if that is full, else the first
    // values.
    const float* after(int64_t j0, int64_t j, int64_t n) const {
        return j + 2 * a.Bc <= n ? nullptr : V + j0 * a.v.row_stride;
    }
    void scores(float* S, const float* Q, int64_t j0, int64_t n) {
        simd::dot_rows(S, Q, {K + j0 * a.k.row_stride, a.k.row_stride}, n, a.d, 1.0f);
    }
    void add(float* O, const float* P, int64_t j0, int64_t n) const {
        simd::add_weighted_rows(O, P, {V + j0 * a.v.row_stride, a.v.row_stride}, n, a.d);
    }
};

// K^T (d, Nk), or panels of it.
struct Transposed : Rows {
    using Rows::Rows;
    void scores(float* S, const float* Q, int64_t j0, int64_t n) {
        const int64_t ldK = a.k.col_stride;
        if (a.k.row_stride == 1) return simd::multiply({S, 0}, {Q, a.d, 1}, {K + j0, ldK}, 1, n, a.d);
        for (int64_t j = 0; j < n; j += a.Bc) {  // panels are padded, and partial vectors are slow
            const int64_t some = std::min(a.Bc, round_up(n - j, simd::lanes()));
            simd::multiply({S + j, 0}, {Q, a.d, 1}, {K + (j0 + j) * a.d, ldK}, 1, some, a.d);
        }
    }
    // The same for several rows of Q, S and O, of panels; row i adds its first min(n, first + i) keys.
    void all_scores(simd::Matrix S, const float* Q, int64_t rows, int64_t j0, int64_t n) const {
        for (int64_t j = 0; j < n; j += a.Bc) {
            const int64_t some = std::min(a.Bc, round_up(n - j, simd::lanes()));
            portable::multiply_few({S.data + j, S.ld}, {Q, a.d}, {K + (j0 + j) * a.d, a.k.col_stride}, rows,
                                   some, a.d, false, after(j0, j, n));
        }
    }
    void add_all(simd::Matrix O, simd::ConstMatrix P, int64_t rows, int64_t j0, int64_t n,
                 int64_t first) const {
        portable::add_weighted_few(O, P, {V + j0 * a.v.row_stride, a.v.row_stride}, rows, n, first, a.d);
    }
};

// Panels of K^T and rows of V in bfloat16, both as portable::Bf16Pairs.
struct Pairs : Rows {
    using Rows::Rows;
    int64_t columns() const { return 2 * a.v.row_stride; }
    void scores(float* S, const float* Q, int64_t j0, int64_t n) {
        for (int64_t j = 0; j < n; j += a.Bc) {
            const auto panel = reinterpret_cast<const uint32_t*>(K) + (j0 + j) * a.d / 2;
            const int64_t some = std::min(a.Bc, round_up(n - j, 2 * portable::lanes()));
            portable::multiply_bf16({S + j, 0}, {Q, a.d}, {panel, a.k.col_stride}, 1, some, a.d, false);
        }
    }
    void add(float* O, const float* P, int64_t j0, int64_t n) const {
        const auto rows = reinterpret_cast<const uint32_t*>(V) + j0 * a.v.row_stride;
        portable::add_weighted_rows_bf16(O, P, {rows, a.v.row_stride}, n, columns());
    }
    void all_scores(simd::Matrix S, const float* Q, int64_t rows, int64_t j0, int64_t n) const {
        for (int64_t j = 0; j < n; j += a.Bc) {
            const auto panel = reinterpret_cast<const uint32_t*>(K) + (j0 + j) * a.d / 2;
            const int64_t some = std::min(a.Bc, round_up(n - j, 2 * portable::lanes()));
            portable::multiply_few_bf16({S.data + j, S.ld}, {Q, a.d}, {panel, a.k.col_stride}, rows, some, a.d,
                                        false, after(j0, j, n));
        }
    }
    void add_all(simd::Matrix O, simd::ConstMatrix P, int64_t rows, int64_t j0, int64_t n,
                 int64_t first) const {
        const auto values = reinterpret_cast<const uint32_t*>(V) + j0 * a.v.row_stride;
        portable::add_weighted_few_bf16(O, P, {values, a.v.row_stride}, rows, n, first, columns());
    }
};

// K and V (Nk, d) in bfloat16, widened to float a block at a time.
struct Widened {
    const AttentionOf<Bf16>& a;
    const Bf16 *K, *V;
    float *wide_K, *wide_V;

    static int64_t floats(const AttentionOf<Bf16>& a) { return 2 * a.Bc * a.d; }
    Widened(const AttentionOf<Bf16>& a, int64_t head, float* scratch)
        : a(a), K(a.k_of(head)), V(a.v_of(head)), wide_K(scratch), wide_V(scratch + a.Bc * a.d) {}
    int64_t block() const { return a.Bc; }
    int64_t columns() const { return a.d; }
    void scores(float* S, const float* Q, int64_t j0, int64_t n) {
        for (int64_t j = 0; j < n; j++) {
            convert(wide_K + j * a.d, K + (j0 + j) * a.k.row_stride, a.d);
            convert(wide_V + j * a.d, V + (j0 + j) * a.v.row_stride, a.d);
        }
        simd::dot_rows(S, Q, {wide_K, a.d}, n, a.d, 1.0f);
    }
    void add(float* O, const float* P, int64_t, int64_t n) const {
        simd::add_weighted_rows(O, P, {wide_V, a.d}, n, a.d);
    }
};

// Scratch of attend_one(), in floats.
int64_t one_floats(const AttentionSizes& a) {
    return /* Q */ a.d + /* O */ round_up(a.d, 2 * portable::lanes()) +
           /* S */ round_up(std::max(a.Bc, BLOCK), simd::lanes());
}
int64_t query_floats(const Attention& a) { return one_floats(a); }
int64_t query_floats(const AttentionOf<Bf16>& a) { return one_floats(a) + Widened::floats(a); }

// Attention of query i of a head; its result goes to `out` and `lse`.
template <class Keys, class Element, class Out>
void attend_one(const AttentionOf<Element>& a, int64_t head, int64_t i, float* scratch, Out* out, float* lse) {
    Keys keys(a, head, scratch + one_floats(a));
    const int64_t d = a.d, Nk = a.seen(i), W = simd::lanes(), columns = keys.columns();
    const int64_t block = Nk <= a.Bc ? a.Bc : keys.block();
    float *const Q = scratch, *const O = Q + d, *const S = O + columns;
    float m = LOW, l = 0;

    convert(Q, a.q_of(head) + i * a.q.row_stride, d);
    for (int64_t c = 0; c < d; c++) Q[c] *= a.scale;
    std::fill_n(O, columns, 0.0f);
    for (int64_t j0 = 0; j0 < Nk; j0 += block) {
        const int64_t n = std::min(block, Nk - j0), whole = round_up(n, W);
        keys.scores(S, Q, j0, n);
        for (int64_t r = n; r < whole; r++) S[r] = LOW;  // partial vectors are slow in softmax too
        const float m_new = simd::row_max(S, whole, m);
        if (j0 > 0 && m_new > m) {
            const float correction = simd::exp_or_zero(m - m_new);
            simd::scale_row(O, columns, correction);
            l *= correction;
        }
        l += simd::exp_sum(S, whole, finite_max(m_new));
        keys.add(O, S, j0, n);
        m = m_new;
    }
    const float divisor = 1 / l;
    for (int64_t c = 0; c < d; c++) O[c] *= divisor;
    convert(out, O, d);
    if (lse) *lse = m + std::log(l);
}

template <class Out>
void attend_query(const Attention& a, int64_t head, int64_t i, float* scratch, Out* out, float* lse) {
    if (a.kv == CachePrecision::bf16) return attend_one<Pairs>(a, head, i, scratch, out, lse);
    if (a.k.col_stride != 1) return attend_one<Transposed>(a, head, i, scratch, out, lse);
    attend_one<Rows>(a, head, i, scratch, out, lse);
}

template <class Out>
void attend_query(const AttentionOf<Bf16>& a, int64_t head, int64_t i, float* scratch, Out* out, float* lse) {
    attend_one<Widened>(a, head, i, scratch, out, lse);
}

// attend_one() of all queries of a head, over panels of K. Each has the bits of its own call, and all of them
// read K and V once.
template <class Keys>
void attend_together(const Attention& a, float* scratch) {
    Keys keys(a, 0, nullptr);
    const int64_t d = a.d, rows = a.Nq, W = simd::lanes(), columns = keys.columns(), block = keys.block();
    const int64_t ldS = round_up(std::max(a.Bc, BLOCK), W);
    float *const Q = scratch, *const O = Q + rows * d, *const S = O + rows * columns;
    float m[FEW_TOGETHER], l[FEW_TOGETHER] = {};
    for (int64_t i = 0; i < rows; i++) {
        m[i] = LOW;
        for (int64_t c = 0; c < d; c++) Q[i * d + c] = a.q.data[i * a.q.row_stride + c] * a.scale;
    }
    std::fill_n(O, rows * columns, 0.0f);
    for (int64_t j0 = 0; j0 < a.Nk; j0 += block) {
        const int64_t n = std::min(block, a.Nk - j0);
        const int64_t from = std::max<int64_t>(0, j0 - a.seen(0) + 1);  // earlier queries see none of the block
        keys.all_scores({S + from * ldS, ldS}, Q + from * d, rows - from, j0, n);
        for (int64_t i = from; i < rows; i++) {
            const int64_t own = std::min(n, a.seen(i) - j0), whole = round_up(own, W);
            float *const s = S + i * ldS, *const o = O + i * columns;
            for (int64_t r = own; r < whole; r++) s[r] = LOW;
            const float m_new = simd::row_max(s, whole, m[i]);
            if (j0 > 0 && m_new > m[i]) {
                const float correction = simd::exp_or_zero(m[i] - m_new);
                simd::scale_row(o, columns, correction);
                l[i] *= correction;
            }
            l[i] += simd::exp_sum(s, whole, finite_max(m_new));
            m[i] = m_new;
        }
        keys.add_all({O + from * columns, columns}, {S + from * ldS, ldS}, rows - from, j0, n,
                     a.seen(from) - j0);
    }
    for (int64_t i = 0; i < rows; i++) {
        const float divisor = 1 / l[i];
        for (int64_t c = 0; c < d; c++) a.out[i * d + c] = O[i * columns + c] * divisor;
    }
}

// The splits of a call. All but the last end before the first query's own key, so every query sees them whole.
struct Splits {
    int64_t count, keys;
    int64_t rows, d;  // of each split's result

    explicit Splits(const AttentionSizes& a) : count(1), keys(a.Nk), rows(a.B * a.H * a.Nq), d(a.d) {
        if (a.Nk <= MOST_KEYS || a.Nk < LEAST_RATIO * a.Nq) return;
        const int64_t strips = a.B * a.H * ((a.Nq + simd::panel() - 1) / simd::panel());
        if (strips >= MOST_STRIPS) return;
        keys = round_up(SPLIT, a.Bc);
        count = 1 + (a.causal ? a.Nk - a.Nq : a.Nk - 1) / keys;
        // The results of an expanded tensor's splits might exceed memory.
        const double numbers = static_cast<double>(count) * static_cast<double>(rows) * static_cast<double>(d);
        if (numbers > MOST_NUMBERS) count = 1, keys = a.Nk;
    }

    int64_t floats() const { return count == 1 ? 0 : count * rows * (/* out */ d + /* lse */ 1); }
    float* out(int64_t s, float* results) const { return results + s * rows * d; }
    float* lse(int64_t s, float* results) const { return out(count, results) + s * rows; }

    // A call for split s alone.
    template <class Element>
    AttentionOf<Element> at(const AttentionOf<Element>& a, int64_t s) const {
        AttentionOf<Element> part = a;
        const int64_t begin = s * keys, words = a.kv == CachePrecision::bf16 ? 2 : 1;  // numbers in a word of K
        part.k.data += begin * a.k.row_stride / words;
        part.v.data += begin * a.v.row_stride;
        part.Nk = s + 1 < count ? keys : a.Nk - begin;
        part.causal = a.causal && s + 1 == count;
        return part;
    }

    // out <- sum(exp(lse_s - m) out_s) / sum(exp(lse_s - m)) for a row of all heads' queries; the result of
    // split 0 becomes the sum
    template <class Element>
    void merge(const AttentionOf<Element>& a, int64_t r, float* results) const {
        float m = LOW, l = 0;
        for (int64_t s = 0; s < count; s++) {
            const float lse_s = lse(s, results)[r];
            if (m == m && !(lse_s <= m)) m = lse_s;  // NaN stays
        }
        float* O = out(0, results) + r * d;
        for (int64_t s = 0; s < count; s++) {
            const float lse_s = lse(s, results)[r], *from = out(s, results) + r * d;
            const bool seen = !std::isinf(lse_s);  // else no key of the split has a weight
            const float weight = seen ? simd::exp_or_zero(lse_s - m) : 0;
            l += weight;
            if (s == 0)
                for (int64_t i = 0; i < d; i++) O[i] = seen ? weight * from[i] : 0;
            else if (seen)
                for (int64_t i = 0; i < d; i++) O[i] += weight * from[i];
        }
        simd::scale_row(O, d, 1 / l);
        convert(a.out + r * d, O, d);
        if (a.lse) a.lse[r] = m + std::log(l);
    }
};

template <class Element>
int64_t thread_floats(const AttentionOf<Element>& a) {
    return a.Nq <= FEW ? query_floats(a) : tile_floats(a);
}

}  // namespace

template <class Element>
int64_t split_scratch(const AttentionOf<Element>& a) {
    return a.threads * thread_floats(a) + Splits(a).floats();
}

template <class Element>
void split_attention(const AttentionOf<Element>& a, float* scratch) {
    const Splits splits(a);
    if (a.B * a.H * a.Nq * splits.count == 1) {  // a decoder's step: what follows costs as much as 30 keys
        const NoDenormals flushed;
        return attend_query(a, 0, 0, scratch, a.out, a.lse);
    }
    const bool few = a.Nq <= FEW;
    const int64_t heads = a.B * a.H, tiles = few ? a.Nq : (a.Nq + a.Br - 1) / a.Br;
    float* results = scratch + a.threads * thread_floats(a);

    for_each_item(heads, splits.count * tiles, a.threads, [&](int64_t head, int64_t item, int thread) {
        const int64_t s = item / tiles, i = tiles - 1 - item % tiles;  // causal: the longest first
        const int64_t i0 = few ? i : i * a.Br, row = head * a.Nq + i0;
        const AttentionOf<Element> part = splits.at(a, s);
        float* own = scratch + thread * thread_floats(a);
        const auto attend = [&](auto* out, float* lse) {
            few ? attend_query(part, head, i0, own, out, lse) : attend_tile(part, head, i0, own, out, lse);
        };
        if (splits.count == 1)
            attend(a.out + row * a.d, a.lse ? a.lse + row : nullptr);
        else
            attend(splits.out(s, results) + row * a.d, splits.lse(s, results) + row);
    });
    if (splits.count == 1) return;
    for_each_item(heads, a.Nq, a.threads,
                  [&](int64_t head, int64_t i, int) { splits.merge(a, head * a.Nq + i, results); });
}

template int64_t split_scratch(const AttentionOf<Bf16>&);
template void split_attention(const AttentionOf<Bf16>&, float*);

}  // namespace part4

bool flash_decoding_takes(const Attention& a) { return a.Nq <= part4::FEW || part4::Splits(a).count > 1; }

// A head's last queries, each as its own call.
void flash_decoding_together(const Attention& a, float* scratch) {
    using namespace part4;
    Attention one = a;
    one.Nq = 1, one.Br = 1;
    if (ALIKE && a.Nq > 1 && Splits(one).count == 1) {
        const NoDenormals flushed;
        return a.kv == CachePrecision::bf16 ? attend_together<Pairs>(a, scratch)
                                            : attend_together<Transposed>(a, scratch);
    }
    for (int64_t i = 0; i < a.Nq; i++) {
        one.Nk = a.seen(i);
        one.q.data = a.q.data + i * a.q.row_stride, one.out = a.out + i * a.d;
        split_attention(one, scratch);
    }
}
int64_t flash_decoding_together_scratch(const Attention& a) {
    using namespace part4;
    Attention one = a;
    one.Nq = 1, one.Br = 1;
    return std::max(split_scratch(one), FEW_TOGETHER * one_floats(a));
}
int64_t flash_decoding_scratch(const Attention& a) { return part4::split_scratch(a); }
void flash_decoding_attention(const Attention& a, float* scratch) { part4::split_attention(a, scratch); }
