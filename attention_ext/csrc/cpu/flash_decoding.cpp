// Part 4 for few queries, as in a decoder's step.
//
//   for each batch, head, split of the keys, query (or tile of queries), over all threads:
//       O, l, m <- 0, 0, -inf
//       for each block of keys of the split:
//           S <- scale * Q K^T;  m', P, l, then O <- exp(m - m') O + P V
//       O <- O / l;  lse <- m + log(l)
//   merge the splits by lse
//
// Lanes span keys for at most FEW queries, and K may be transposed; more queries take part4_flash.cpp's
// tiles. The sizes, not the threads, determine the splits of the keys (flash-decoding, Dao et al. 2023).
//
// Scratch: threads x (2 d + a block of scores, in bf16 + 2 Bc d, or a tile); Nk / SPLIT results a query.
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
// Below MOST_STRIPS strips, more than MOST_KEYS keys are split. LEAST_RATIO bounds the results' memory.
constexpr int64_t MOST_STRIPS = 64, MOST_KEYS = 2048, SPLIT = 1024, LEAST_RATIO = 8;
template <class Element> constexpr bool IS_BF16 = std::is_same_v<Element, Bf16>;
constexpr int64_t WHOLE = 16;            // rows of V that are added in the same groups wherever they begin
constexpr double MOST_NUMBERS = 0x1p40;  // numbers in the splits' results
// Whether the helpers' products of several rows have the bits of each row's.
#if defined(SIMD_ELSEWHERE)
constexpr bool SAME_BITS = false;
#else
constexpr bool SAME_BITS = !portable::SMALL;
#endif

// A head's keys and values, a struct for each layout. columns(): floats of a row of V. scores(): S <- Q K^T
// of a query for keys j0 .. j0 + n - 1, S with room for whole vectors. add(): O <- O + P V for these keys.

// K and V (Nk, d), as tensors hold them.
struct Rows {
    const Attention& a;
    const float *K, *V;

    Rows(const Attention& a, int64_t head, float*) : a(a), K(a.k_of(head)), V(a.v_of(head)) {}
    int64_t block() const { return a.Bc < BLOCK ? BLOCK / a.Bc * a.Bc : a.Bc; }
    int64_t columns() const { return a.d; }
    void scores(float* S, const float* Q, int64_t j0, int64_t n) {
        simd::dot_rows(S, Q, {K + j0 * a.k.row_stride, a.k.row_stride}, n, a.d, 1.0f);
    }
    void add(float* O, const float* P, int64_t j0, int64_t n) const {
        simd::add_weighted_rows(O, P, {V + j0 * a.v.row_stride, a.v.row_stride}, n, a.d);
    }
};

// K^T (d, Nk), or panels of it, and V; with Matrix = portable::Bf16Pairs in bfloat16.
template <class Matrix> struct Panels : Rows {
    using Rows::Rows;
    static constexpr bool BF16 = std::is_same_v<Matrix, portable::Bf16Pairs>;

    static Matrix at(const float* start, int64_t words, int64_t ld) {
        return {reinterpret_cast<decltype(Matrix::data)>(start) + words, ld};
    }
    Matrix panel(int64_t j) const { return at(K, j * a.d / (BF16 ? 2 : 1), a.k.col_stride); }
    Matrix values(int64_t j) const { return at(V, j * a.v.row_stride, a.v.row_stride); }
    int64_t columns() const { return BF16 ? 2 * a.v.row_stride : a.d; }
    // Keys of the panel j of n keys in panels: whole vectors, because partial ones are slow.
    int64_t keys(int64_t j, int64_t n) const {
        return std::min(a.Bc, round_up(n - j, BF16 ? 2 * portable::lanes() : simd::lanes()));
    }
    void scores(float* S, const float* Q, int64_t j0, int64_t n) {
        if constexpr (!BF16)
            if (a.k.row_stride == 1)
                return simd::multiply({S, 0}, {Q, a.d, 1}, {K + j0, a.k.col_stride}, 1, n, a.d);
        for (int64_t j = 0; j < n; j += a.Bc)
            if constexpr (BF16)
                portable::multiply_bf16({S + j, 0}, {Q, a.d}, panel(j0 + j), 1, keys(j, n), a.d, false);
            else
                simd::multiply({S + j, 0}, {Q, a.d, 1}, panel(j0 + j), 1, keys(j, n), a.d);
    }
    void add(float* O, const float* P, int64_t j0, int64_t n) const {
        if constexpr (BF16)
            portable::add_weighted_rows(O, P, values(j0), n, columns());
        else
            simd::add_weighted_rows(O, P, values(j0), n, columns());
    }
    // The same for rows, of which row i adds its first min(n, first + i) keys; the next panel is fetched.
    void all_scores(simd::Matrix S, const float* Q, int64_t rows, int64_t j0, int64_t n) const {
        for (int64_t j = 0; j < n; j += a.Bc)
            portable::multiply_few(S.from(0, j), {Q, a.d}, panel(j0 + j), rows, keys(j, n), a.d, false,
                                   j + 2 * a.Bc <= n ? nullptr : values(j0).data);
    }
    void add_all(simd::Matrix O, simd::ConstMatrix P, int64_t rows, int64_t j0, int64_t n,
                 int64_t first) const {
        portable::add_weighted_few(O, P, values(j0), rows, n, first, columns());
    }
};
using Transposed = Panels<simd::ConstMatrix>;
using Pairs = Panels<portable::Bf16Pairs>;

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

// The online softmax of a query: its maximum, and the sum of its weights.
struct Sums {
    float m = LOW, l = 0;

    // S (n) <- the weights of a block's scores; O (columns) is rescaled. S has room for whole vectors.
    void step(float* S, int64_t n, float* O, int64_t columns, bool first) {
        const int64_t whole = round_up(n, simd::lanes());
        for (int64_t r = n; r < whole; r++) S[r] = LOW;  // partial vectors are slow in softmax too
        const float m_new = simd::row_max(S, whole, m);
        if (!first && m_new > m) {
            const float correction = simd::exp_or_zero(m - m_new);
            simd::scale_row(O, columns, correction);
            l *= correction;
        }
        l += simd::exp_sum(S, whole, finite_max(m_new));
        m = m_new;
    }
};

// The blocks of keys of a call, from the first panel with a key that is seen. They end at the same keys
// wherever they begin, so that queries together have the bits of each one's own call.
struct Blocks {
    const AttentionSizes& a;
    int64_t first, size;

    Blocks(const AttentionSizes& a, const Range& seen, int64_t size)
        : a(a), first(a.rules ? seen.first / a.Bc * a.Bc : 0), size(size) {}
    int64_t from(int64_t j) const { return a.rules ? size - j % size : size; }
};

// Attention of query i of a head; its result goes to `out` and `lse`.
template <class Keys, class Element, class Out>
void attend_one(const AttentionOf<Element>& a, int64_t head, int64_t i, float* scratch, Out* out, float* lse) {
    Keys keys(a, head, scratch + one_floats(a));
    const int64_t d = a.d, columns = keys.columns();
    const Range seen = a.keys(head, i);
    const Blocks blocks(a, seen, seen.end <= a.Bc ? a.Bc : keys.block());
    float *const Q = scratch, *const O = Q + d, *const S = O + columns;
    Sums sums;

    convert(Q, a.q_of(head) + i * a.q.row_stride, d);
    for (int64_t c = 0; c < d; c++) Q[c] *= a.scale;
    std::fill_n(O, columns, 0.0f);
    for (int64_t j0 = blocks.first, n; j0 < seen.end; j0 += n) {
        n = std::min(blocks.from(j0), seen.end - j0);
        keys.scores(S, Q, j0, n);
        a.change(head, {S, 0, 1, i, 1, j0, n, 1.0f});
        sums.step(S, n, O, columns, j0 == blocks.first);
        const int64_t hidden = std::max<int64_t>(0, seen.first - j0) / WHOLE * WHOLE;
        keys.add(O, S + hidden, j0 + hidden, n - hidden);
    }
    const float divisor = 1 / sums.l;
    for (int64_t c = 0; c < d; c++) O[c] *= divisor;
    convert(out, O, d);
    if (lse) *lse = sums.m + std::log(sums.l);
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

// attend_one() of all queries of a head, over panels of K; they read K and V once.
template <class Keys> void attend_together(const Attention& a, float* scratch) {
    Keys keys(a, 0, nullptr);
    const int64_t d = a.d, rows = a.Nq, columns = keys.columns();
    const Blocks blocks(a, a.keys(0, 0), keys.block());
    float* const Q = scratch;
    const simd::Matrix O{Q + rows * d, columns}, S{O.row(rows), round_up(std::max(a.Bc, BLOCK), simd::lanes())};
    Sums sums[FEW_TOGETHER];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < d; c++) Q[i * d + c] = a.q.data[i * a.q.row_stride + c] * a.scale;
    std::fill_n(O.data, rows * columns, 0.0f);
    for (int64_t j0 = blocks.first, n; j0 < a.Nk; j0 += n) {
        n = std::min(blocks.from(j0), a.Nk - j0);
        const int64_t from = std::max<int64_t>(0, j0 - a.seen(0) + 1);  // earlier queries see none of the block
        keys.all_scores(S.from(from), Q + from * d, rows - from, j0, n);
        for (int64_t i = from; i < rows; i++) {
            const int64_t own = std::min(n, a.seen(i) - j0);
            a.change(0, {S.row(i), 0, 1, i, 1, j0, own, 1.0f});
            sums[i].step(S.row(i), own, O.row(i), columns, j0 == blocks.first);
        }
        keys.add_all(O.from(from), S.from(from), rows - from, j0, n, a.seen(from) - j0);
    }
    for (int64_t i = 0; i < rows; i++) {
        const float divisor = 1 / sums[i].l;
        for (int64_t c = 0; c < d; c++) a.out[i * d + c] = O.row(i)[c] * divisor;
    }
}

// A few more queries than FEW, as those of grouped heads are. A block of K is transposed, so that the lanes
// span keys in the scores and features in O, and no lane is idle.
constexpr int64_t TURNED = 128;  // keys of a block

int64_t turned_floats(const AttentionSizes& a) { return FEW_TOGETHER * (2 * a.d + TURNED) + a.d * TURNED; }

void attend_turned(const Attention& a, int64_t head, float* scratch, float* out, float* lse) {
    const int64_t d = a.d, rows = a.Nq;
    const float *K = a.k_of(head), *V = a.v_of(head), *Qs = a.q_of(head);
    const simd::Matrix Q{scratch, d}, O{Q.row(rows), d}, S{O.row(rows), TURNED}, Kt{S.row(rows), TURNED};
    Sums sums[FEW_TOGETHER];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < d; c++) Q.row(i)[c] = Qs[i * a.q.row_stride + c] * a.scale;
    std::fill_n(O.data, rows * d, 0.0f);
    for (int64_t j0 = 0; j0 < a.seen(rows - 1); j0 += TURNED) {
        const int64_t n = std::min(TURNED, a.seen(rows - 1) - j0);
        for (int64_t j = 0; j < n; j++)  // V is read after K's softmax, and the next block of K after V
            for (int64_t c = 0; c < d; c += LINE_FLOATS) {
                __builtin_prefetch(V + (j0 + j) * a.v.row_stride + c);
                __builtin_prefetch(K + std::min(j0 + TURNED + j, a.Nk - 1) * a.k.row_stride + c);
            }
        simd::transpose(Kt, {K + j0 * a.k.row_stride, a.k.row_stride}, n, d, 1.0f);
        simd::multiply(S, {Q.data, d, 1}, Kt, rows, n, d);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t seen = std::clamp<int64_t>(a.seen(i) - j0, 0, n);
            if (seen > 0) sums[i].step(S.row(i), seen, O.row(i), d, j0 == 0);
            std::fill_n(S.row(i) + seen, n - seen, 0.0f);
        }
        simd::multiply_add(O, {S.data, TURNED, 1}, {V + j0 * a.v.row_stride, a.v.row_stride}, rows, d, n, n);
    }
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < d; c++) out[i * d + c] = O.row(i)[c] / sums[i].l;
        if (lse) lse[i] = sums[i].m + std::log(sums[i].l);
    }
}

// The splits of a call. All but the last end before the first query's own key, so every query sees them whole.
struct Splits {
    int64_t count, keys;
    int64_t rows, d;  // of each split's result
    float* results = nullptr;

    explicit Splits(const AttentionSizes& a) : count(1), keys(a.Nk), rows(a.B * a.H * a.Nq), d(a.d) {
        if (a.rules || a.Nk <= MOST_KEYS || a.Nk < LEAST_RATIO * a.Nq) return;
        const int64_t strips = a.B * a.H * ((a.Nq + simd::panel() - 1) / simd::panel());
        if (strips >= MOST_STRIPS) return;
        keys = round_up(SPLIT, a.Bc);
        count = 1 + (a.causal ? a.Nk - a.Nq : a.Nk - 1) / keys;
        // The results of an expanded tensor's splits might exceed memory.
        const double numbers = static_cast<double>(count) * static_cast<double>(rows) * static_cast<double>(d);
        if (numbers > MOST_NUMBERS) count = 1, keys = a.Nk;
    }

    int64_t floats() const { return count == 1 ? 0 : count * rows * (/* out */ d + /* lse */ 1); }
    float* out(int64_t s) const { return results + s * rows * d; }
    float* lse(int64_t s) const { return out(count) + s * rows; }

    // A call for split s alone.
    template <class Element> AttentionOf<Element> at(const AttentionOf<Element>& a, int64_t s) const {
        AttentionOf<Element> part = a;
        const int64_t begin = s * keys, words = a.kv == CachePrecision::bf16 ? 2 : 1;  // numbers in a word of K
        part.k.data += begin * a.k.row_stride / words;
        part.v.data += begin * a.v.row_stride;
        part.Nk = s + 1 < count ? keys : a.Nk - begin;
        part.causal = a.causal && s + 1 == count;
        return part;
    }

    // out <- sum(exp(lse_s - m) out_s) / sum(exp(lse_s - m)) for a row, in split 0's place
    template <class Element> void merge(const AttentionOf<Element>& a, int64_t r) const {
        float m = LOW, l = 0;
        for (int64_t s = 0; s < count; s++) {
            const float lse_s = lse(s)[r];
            if (m == m && !(lse_s <= m)) m = lse_s;  // NaN stays
        }
        float* O = out(0) + r * d;
        for (int64_t s = 0; s < count; s++) {
            const float lse_s = lse(s)[r], *from = out(s) + r * d;
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

bool is_turned(const AttentionSizes& a) { return !portable::SMALL && a.Nq > FEW && a.Nq <= FEW_TOGETHER; }

template <class Element> int64_t thread_floats(const AttentionOf<Element>& a) {
    if (!IS_BF16<Element> && is_turned(a)) return turned_floats(a);
    return a.Nq <= FEW ? query_floats(a) : tile_floats(a);
}

}  // namespace

template <class Element> int64_t split_scratch(const AttentionOf<Element>& a) {
    return a.threads * thread_floats(a) + Splits(a).floats();
}

template <class Element> void split_attention(const AttentionOf<Element>& a, float* scratch) {
    Splits splits(a);
    if (a.B * a.H * a.Nq * splits.count == 1) {  // a decoder's step: what follows costs as much as 30 keys
        const NoDenormals flushed;
        return attend_query(a, 0, 0, scratch, a.out, a.lse);
    }
    const bool few = a.Nq <= FEW, turned = !IS_BF16<Element> && is_turned(a);
    const int64_t heads = a.B * a.H, tiles = few ? a.Nq : turned ? 1 : (a.Nq + a.Br - 1) / a.Br;
    splits.results = scratch + a.threads * thread_floats(a);

    for_each_item(heads, splits.count * tiles, a.threads, a.pool, [&](int64_t head, int64_t item, int thread) {
        const int64_t s = item / tiles, i = tiles - 1 - item % tiles;  // causal: the longest first
        const int64_t i0 = few ? i : i * a.Br, row = head * a.Nq + i0;
        const AttentionOf<Element> part = splits.at(a, s);
        float* own = scratch + thread * thread_floats(a);
        const auto attend = [&](auto* out, float* lse) {
            if constexpr (!IS_BF16<Element>)
                if (turned) return attend_turned(part, head, own, out, lse);
            few ? attend_query(part, head, i0, own, out, lse) : attend_tile(part, head, i0, own, out, lse);
        };
        if (splits.count == 1)
            attend(a.out + row * a.d, a.lse ? a.lse + row : nullptr);
        else
            attend(splits.out(s) + row * a.d, splits.lse(s) + row);
    });
    if (splits.count == 1) return;
    for_each_item(heads, a.Nq, a.threads, a.pool,
                  [&](int64_t head, int64_t i, int) { splits.merge(a, head * a.Nq + i); });
}

template int64_t split_scratch(const AttentionOf<Bf16>&);
template void split_attention(const AttentionOf<Bf16>&, float*);

}  // namespace part4

bool flash_decoding_takes(const Attention& a) {
    if (a.rules) return a.k.col_stride > 1;  // the decoder's panels, under a window and ALiBi
    return a.Nq <= part4::FEW || part4::Splits(a).count > 1;
}

// The call of one of a head's queries.
static Attention one_query(Attention a) {
    a.Nq = 1;
    a.Br = 1;
    return a;
}

void flash_decoding_together(const Attention& a, float* scratch) {
    using namespace part4;
    Attention one = one_query(a);
    if (SAME_BITS && a.Nq > 1 && Splits(one).count == 1) {
        const NoDenormals flushed;
        return a.kv == CachePrecision::bf16 ? attend_together<Pairs>(a, scratch)
                                            : attend_together<Transposed>(a, scratch);
    }
    for (int64_t i = 0; i < a.Nq; i++) {
        one.Nk = a.seen(i);
        one.q.data = a.q.data + i * a.q.row_stride;
        one.out = a.out + i * a.d;
        split_attention(one, scratch);
    }
}
int64_t flash_decoding_together_scratch(const Attention& a) {
    return std::max(part4::split_scratch(one_query(a)), part4::FEW_TOGETHER * part4::one_floats(a));
}
int64_t flash_decoding_scratch(const Attention& a) { return part4::split_scratch(a); }
void flash_decoding_attention(const Attention& a, float* scratch) { part4::split_attention(a, scratch); }
