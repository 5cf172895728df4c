// Part 4, flash: Br x Bc tiles with an online softmax, so that no row of scores is ever whole.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 1; the line numbers below are its own.
//
//   for each batch, head, tile i of Br queries, over all threads:          lines 3-5
//       O, l, m <- 0, 0, -inf
//       for each tile j of Bc keys:                                        line 6
//           S   <- scale * Qi Kj^T                                         line 8
//           m', P, l, then O <- diag(exp(m - m')) O + P Vj                 lines 9-10
//       O <- diag(1 / l) O;  lse <- m + log(l)                             lines 12-13
//
// The lanes span queries: Qi, S, P and O are kept transposed, so that K and V are read as they lie, one
// number broadcast to all lanes, and the softmax runs down the columns with nothing to add up across
// lanes. Inside a tile the work goes in strips of a panel of queries and STEP keys, whose scores stay in
// the nearest caches. Under a causal mask the last step of each strip takes its part of the diagonal along.
// m' may lag behind the maximum a little (simd::online_softmax), so that O is seldom corrected.
//
// A few queries have few tiles, so that most threads would idle. Their keys are divided into spans, as if each
// span were all keys, and the results are merged by lse. Spans depend on the sizes alone, not on the threads.
//
// bfloat16 is widened to float a tile at a time; part4_amx.cpp has a way of its own for it.
//
// Scratch: threads x (2 Br d + strip + 3 Br) floats, for bfloat16 another 2 Bc d, whatever N is; with spans
// also their results, Nk / SPAN for each of the few queries. What it improves: part 3 reads K and V once per
// query, this once per Br queries, and the scores that part 2 keeps in memory never leave the cache.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "cpu/part4_amx.h"
#include "cpu/sizes.h"
#include "cpu/softmax.h"
#include "denormals.h"
#include "round_up.h"
#include "simd/constants.h"
#include "simd/simd.h"
#include "threads.h"

using part4::FEW, part4::STEP;

namespace {

constexpr int64_t LINE_FLOATS = 16;   // of a cache line, at least the lanes
constexpr int64_t MOST_SCORES = 512;  // of one query at a time, if Bc is not larger: they stay in L1
// Fewer strips of queries than this may leave threads idle. Then more than MOST_KEYS keys are divided into
// spans, each long enough that merging costs little, if they are so many times as many as the queries that the
// spans' results need less memory than K.
constexpr int64_t MOST_STRIPS = 64, MOST_KEYS = 2048, SPAN = 1024, LEAST_RATIO = 8;
constexpr double MOST_NUMBERS = 0x1p40;  // in the spans' results

// One thread's scratch. A row of queries is an odd number of cache lines long: the rows of a strip would share
// few sets of L1 if it were a power of two, which costs 2 to 4 % at Br = 256.
struct Tile {
    int64_t d, R;
    float *Qt, *Ot, *St, *m, *l, *correction;

    template <class Element>
    static int64_t floats(const AttentionOf<Element>& a) {
        const int64_t R = row(a.Br);
        return /* Qt, Ot */ 2 * a.d * R + /* St */ (STEP + simd::panel()) * simd::panel() +
               /* m, l, correction */ 3 * R;
    }

    static int64_t row(int64_t Br) { return round_up(Br, LINE_FLOATS) | LINE_FLOATS; }

    template <class Element>
    Tile(const AttentionOf<Element>& a, float* scratch) : d(a.d), R(row(a.Br)) {
        Qt = scratch;
        Ot = Qt + d * R;
        St = Ot + d * R;
        m = St + (STEP + simd::panel()) * simd::panel();
        l = m + R;
        correction = l + R;
    }
};

// Some rows of K and V of a head.
struct Rows {
    const float* K;
    int64_t ldK;
    const float* V;
    int64_t ldV;
};

// A head's K and V as floats: where they are, or those of bfloat16 in scratch, `load`ed before they are used.
template <class Element>
class Keys {
  public:
    static int64_t floats(const AttentionOf<Element>& a) { return IN_PLACE ? 0 : 2 * most(a) * a.d; }

    Keys(const AttentionOf<Element>& a, int64_t b, int64_t h, float* scratch)
        : a(a), K(a.k.at(b, h)), V(a.v.at(b, h)), space(scratch) {}

    void load(int64_t j, int64_t n) {
        if (IN_PLACE) return;
        first = j;
        for (int64_t i = 0; i < n; i++) convert(space + i * a.d, K + (j + i) * a.k.row_stride, a.d);
        for (int64_t i = 0; i < n; i++) convert(values() + i * a.d, V + (j + i) * a.v.row_stride, a.d);
    }

    // Row j and those after it.
    Rows at(int64_t j) const {
        if constexpr (IN_PLACE)
            return {K + j * a.k.row_stride, a.k.row_stride, V + j * a.v.row_stride, a.v.row_stride};
        return {space + (j - first) * a.d, a.d, values() + (j - first) * a.d, a.d};
    }

    // Room for a panel of rows, while nothing is loaded.
    float* room() const { return space; }

  private:
    static constexpr bool IN_PLACE = std::is_same_v<Element, float>;
    static int64_t most(const AttentionOf<Element>& a) { return std::max(a.Bc, STEP + simd::panel()); }
    float* values() const { return space + most(a) * a.d; }

    const AttentionOf<Element>& a;
    const Element *K, *V;
    float* space;
    int64_t first = 0;
};

// Lines 8 to 10 for the queries r0 .. r0 + queries - 1 of a tile and `keys` keys; query r0 + r sees the first
// `first + r` of them.
void attend(const Tile& t, int64_t r0, int64_t queries, const Rows& j, int64_t keys, int64_t first) {
    const int64_t d = t.d, ldS = simd::panel(), W = simd::lanes();
    float *Qt = t.Qt + r0, *Ot = t.Ot + r0;
    // S^T <- K Q^T: all queries for the keys before the staircase, then fewer queries with every W keys
    const auto scores = [&](int64_t i, int64_t r, int64_t n) {
        simd::multiply({t.St + i * ldS + r, ldS}, {j.K + i * j.ldK, j.ldK, 1}, {Qt + r, t.R}, n, queries - r,
                       d);
    };
    scores(0, 0, std::min(keys, first + W));
    for (int64_t r = W; first + r < keys; r += W) scores(first + r, r, std::min(W, keys - first - r));
    // m_new <- max(m, rowmax(S)), P <- 2^(S - m_new), l <- 2^(m - m_new) * l + rowsum(P)
    if (simd::online_softmax({t.St, ldS}, keys, queries, first, t.m + r0, t.l + r0, t.correction + r0))
        // O^T <- O^T diag(2^(m - m_new))
        simd::scale_columns({Ot, t.R}, d, queries, t.correction + r0);
    // O^T <- O^T + V^T P^T
    simd::multiply_add({Ot, t.R}, {j.V, 1, j.ldV}, {t.St, ldS}, d, queries, keys, first);
}

// Rows as floats: in place, or those of bfloat16 in `room`.
float* floats_of(float* rows, float*) { return rows; }
float* floats_of(Bf16*, float* room) { return room; }

simd::ConstMatrix floats_of(const float* rows, int64_t ld, int64_t, int64_t, float*) { return {rows, ld}; }

simd::ConstMatrix floats_of(const Bf16* rows, int64_t ld, int64_t n, int64_t d, float* room) {
    for (int64_t i = 0; i < n; i++) convert(room + i * d, rows + i * ld, d);
    return {room, d};
}

bool in_pairs(const Attention& a) { return a.kv == CachePrecision::bf16; }
bool in_pairs(const AttentionOf<Bf16>&) { return false; }

// Keys whose scores are taken together: whole tiles of them.
int64_t block_of(const Attention& a) { return a.Bc < MOST_SCORES ? MOST_SCORES / a.Bc * a.Bc : a.Bc; }
int64_t block_of(const AttentionOf<Bf16>& a) { return a.Bc; }

// S <- Q K^T for the keys j0 .. j0 + keys - 1 of a head.
void score(const Attention& a, const float* K, const float* Q, float* S, int64_t j0, int64_t keys) {
    const int64_t d = a.d, Bc = a.Bc, ldK = a.k.col_stride;
    if (ldK == 1) return simd::dot_rows(S, Q, {K + j0 * a.k.row_stride, a.k.row_stride}, keys, d, 1.0f);
    // A panel is padded, so whole vectors are taken: a remainder is slow.
    if (in_pairs(a)) {
        for (int64_t j = 0; j < keys; j += Bc) {
            const auto panel = reinterpret_cast<const uint32_t*>(K) + (j0 + j) * d / 2;
            const int64_t n = std::min(Bc, round_up(keys - j, 2 * simd::lanes()));
            simd::multiply_bf16({S + j, 0}, {Q, d}, {panel, ldK}, 1, n, d, false);
        }
    } else if (a.k.row_stride == 1) {
        simd::multiply({S, 0}, {Q, d, 1}, {K + j0, ldK}, 1, keys, d);
    } else {
        for (int64_t j = 0; j < keys; j += Bc) {
            const int64_t n = std::min(Bc, round_up(keys - j, simd::lanes()));
            simd::multiply({S + j, 0}, {Q, d, 1}, {K + (j0 + j) * d, ldK}, 1, n, d);
        }
    }
}

// Of a thread that takes one query at a time, in floats; S is padded to whole vectors.
template <class Element>
int64_t one_floats(const AttentionOf<Element>& a) {
    const int64_t W = simd::lanes();
    return /* Q */ a.d + /* O */ round_up(a.d, 2 * W) + /* S */ round_up(block_of(a), W);
}

// One query of a head, whose result goes to `out` and `lse`. For at most FEW queries a vector of them would be
// mostly padding, so the lanes span keys. A token that continues a long text is one query. A tile of K that is
// held transposed is multiplied row by row, a feature a row, without sums across lanes. Scratch: one_floats()
// and that of Keys.
template <class Element, class Out>
void attend_one(const AttentionOf<Element>& a, int64_t b, int64_t h, int64_t i, float* scratch, Out* out,
                float* lse) {
    constexpr float LOW = -std::numeric_limits<float>::infinity();
    const int64_t d = a.d, n = a.visible(i), ldV = a.v.row_stride, W = simd::lanes();
    const int64_t block = n <= a.Bc ? a.Bc : block_of(a);
    const bool pairs = in_pairs(a);
    const int64_t columns = pairs ? 2 * ldV : d;  // of the padded rows of V
    float *const Q = scratch, *const O = Q + d, *const S = O + columns;
    Keys<Element> keys_of_head(a, b, h, scratch + one_floats(a));
    float m = LOW, l = 0;

    convert(Q, a.q.at(b, h) + i * a.q.row_stride, d);
    for (int64_t c = 0; c < d; c++) Q[c] *= a.scale;
    std::fill_n(O, columns, 0.0f);
    for (int64_t j0 = 0; j0 < n; j0 += block) {
        const int64_t keys = std::min(block, n - j0), whole = round_up(keys, W);
        keys_of_head.load(j0, keys);
        const Rows j = keys_of_head.at(j0);
        if constexpr (std::is_same_v<Element, float>)
            score(a, a.k.at(b, h), Q, S, j0, keys);
        else
            simd::dot_rows(S, Q, {j.K, j.ldK}, keys, d, 1.0f);
        for (int64_t r = keys; r < whole; r++) S[r] = LOW;  // a remainder is slow in softmax too
        const float m_new = simd::row_max(S, whole, m);
        if (j0 > 0 && m_new > m) {
            const float correction = simd::exp_or_zero(m - m_new);
            simd::scale_row(O, columns, correction);
            l *= correction;
        }
        l += simd::exp_sum(S, whole, finite_max(m_new));
        if (pairs)
            simd::add_weighted_rows_bf16(O, S, {reinterpret_cast<const uint32_t*>(j.V), ldV}, keys, columns);
        else
            simd::add_weighted_rows(O, S, {j.V, j.ldV}, keys, d);
        m = m_new;
    }
    const float divisor = 1 / l;
    for (int64_t c = 0; c < d; c++) O[c] *= divisor;
    convert(out, O, d);
    if (lse) *lse = m + std::log(l);
}

// A tile of queries of a head, from i0 on; the results of its queries go to `out` and `lse` on.
template <class Element, class Out>
void attend_tile(const AttentionOf<Element>& a, int64_t b, int64_t h, int64_t i0, float* scratch, Out* out,
                 float* lse) {
    const int64_t Nq = a.Nq, d = a.d, Br = a.Br, Bc = a.Bc;
    const int64_t W = simd::lanes(), panel = simd::panel();
    const int64_t rows = std::min(Br, Nq - i0), padded = round_up(rows, W);

    const Element* Qi = a.q.at(b, h) + i0 * a.q.row_stride;
    const Tile t(a, scratch);
    Keys<Element> keys_of_head(a, b, h, scratch + Tile::floats(a));

    std::fill_n(t.Qt, d * t.R, 0.0f);
    std::fill_n(t.Ot, d * t.R, 0.0f);
    std::fill_n(t.m, padded, -std::numeric_limits<float>::infinity());
    std::fill_n(t.l, padded, 0.0f);
    for (int64_t r0 = 0; r0 < rows; r0 += panel) {
        const int64_t n = std::min(panel, rows - r0);
        const simd::ConstMatrix Q =
            floats_of(Qi + r0 * a.q.row_stride, a.q.row_stride, n, d, keys_of_head.room());
        // Scores and m are in units of log(2), so that softmax takes powers of 2.
        simd::transpose({t.Qt + r0, t.R}, Q, n, d, a.scale * SIMD_LOG2E);
    }

    // Where the last step of strip r0 begins: with a key that all of its queries see, less than a panel and
    // a step before the last one that any of them sees.
    const int64_t step = std::min(STEP, Bc);
    const auto last_step = [&](int64_t r0) { return a.causal ? (a.visible(i0 + r0) - 1) / step * step : a.Nk; };

    for (int64_t j0 = 0; j0 < a.visible(i0 + rows - 1); j0 += Bc) {
        keys_of_head.load(j0, std::min(Bc, a.Nk - j0));
        for (int64_t r0 = 0; r0 < padded; r0 += panel) {
            const int64_t end = std::min(j0 + Bc, last_step(r0));
            for (int64_t j = j0; j < end; j += step) {
                const int64_t keys = std::min(step, end - j);
                attend(t, r0, std::min(panel, padded - r0), keys_of_head.at(j), keys, keys);
            }
        }
    }

    // The last steps, each with its strip's part of the diagonal.
    for (int64_t r0 = 0; a.causal && r0 < padded; r0 += panel) {
        const int64_t j = last_step(r0), last = i0 + std::min(r0 + panel, rows) - 1;
        keys_of_head.load(j, a.visible(last) - j);
        attend(t, r0, std::min(panel, padded - r0), keys_of_head.at(j), a.visible(last) - j,
               a.visible(i0 + r0) - j);
    }

    for (int64_t r = 0; r < rows; r++) {
        t.correction[r] = 1 / t.l[r];
        if (lse) lse[r] = t.m[r] * SIMD_LN2 + std::log(t.l[r]);
    }
    simd::scale_columns({t.Ot, t.R}, d, rows, t.correction);
    for (int64_t r0 = 0; r0 < rows; r0 += panel) {
        const int64_t n = std::min(panel, rows - r0);
        float* to = floats_of(out + r0 * d, keys_of_head.room());
        simd::transpose({to, d}, {t.Ot + r0, t.R}, d, n, 1.0f);
        if (!std::is_same_v<Out, float>) convert(out + r0 * d, to, n * d);
    }
}

// The spans of keys of a call: all but the last end before the first query's own key, so that every query sees
// them whole.
template <class Element>
struct Spans {
    int64_t count, keys;

    explicit Spans(const AttentionOf<Element>& a) : count(1), keys(a.Nk) {
        if (a.Nk <= MOST_KEYS || a.Nk < LEAST_RATIO * a.Nq) return;
        const int64_t strips = a.B * a.H * ((a.Nq + simd::panel() - 1) / simd::panel());
        if (strips >= MOST_STRIPS) return;
        keys = round_up(SPAN, a.Bc);
        count = 1 + (a.causal ? a.Nk - a.Nq : a.Nk - 1) / keys;
        // The results of an expanded tensor's spans might have more numbers than memory.
        const double numbers =
            static_cast<double>(count) * static_cast<double>(rows(a)) * static_cast<double>(a.d);
        if (numbers > MOST_NUMBERS) count = 1, keys = a.Nk;
    }

    // Of each span's result.
    int64_t rows(const AttentionOf<Element>& a) const { return count > 1 ? a.B * a.H * a.Nq : 0; }
    int64_t floats(const AttentionOf<Element>& a) const {
        return count * rows(a) * (/* out */ a.d + /* lse */ 1);
    }
    float* out(const AttentionOf<Element>& a, int64_t s, float* results) const {
        return results + s * rows(a) * a.d;
    }
    float* lse(const AttentionOf<Element>& a, int64_t s, float* results) const {
        return out(a, count, results) + s * rows(a);
    }

    // Span s as a call of its own.
    AttentionOf<Element> at(const AttentionOf<Element>& a, int64_t s) const {
        AttentionOf<Element> part = a;
        const int64_t begin = s * keys;
        part.k.data += begin * a.k.row_stride / (in_pairs(a) ? 2 : 1);  // two numbers of a panel share a word
        part.v.data += begin * a.v.row_stride;
        part.Nk = s + 1 < count ? keys : a.Nk - begin;
        part.causal = a.causal && s + 1 == count;
        return part;
    }

    // out <- sum(exp(lse_s - m) out_s) / sum(exp(lse_s - m)) for the row r of all heads' queries; the result of
    // span 0 becomes the sum
    void merge(const AttentionOf<Element>& a, int64_t r, float* results) const {
        float m = -std::numeric_limits<float>::infinity(), l = 0;
        for (int64_t s = 0; s < count; s++) {
            const float of_span = lse(a, s, results)[r];
            if (m == m && !(of_span <= m)) m = of_span;  // NaN stays
        }
        float* O = out(a, 0, results) + r * a.d;
        for (int64_t s = 0; s < count; s++) {
            const float of_span = lse(a, s, results)[r], *from = out(a, s, results) + r * a.d;
            const bool seen = !std::isinf(of_span);  // else no key of the span has a weight
            const float weight = seen ? simd::exp_or_zero(of_span - m) : 0;
            l += weight;
            if (s == 0)
                for (int64_t i = 0; i < a.d; i++) O[i] = seen ? weight * from[i] : 0;
            else if (seen)
                for (int64_t i = 0; i < a.d; i++) O[i] += weight * from[i];
        }
        simd::scale_row(O, a.d, 1 / l);
        convert(a.out + r * a.d, O, a.d);
        if (a.lse) a.lse[r] = m + std::log(l);
    }
};

// Of a thread, in floats.
template <class Element>
int64_t thread_scratch(const AttentionOf<Element>& a) {
    return Keys<Element>::floats(a) + (a.Nq <= FEW ? one_floats(a) : Tile::floats(a));
}

template <class Element>
int64_t scratch_of(const AttentionOf<Element>& a) {
    return a.threads * thread_scratch(a) + Spans(a).floats(a);
}

template <class Element>
void flash(const AttentionOf<Element>& a, float* scratch) {
    const Spans<Element> spans(a);
    if (a.B * a.H * a.Nq * spans.count == 1) {  // a decoder's step: what follows takes as long as 30 keys
        const NoDenormals flushed;
        return attend_one(a, 0, 0, 0, scratch, a.out, a.lse);
    }
    const int64_t heads = a.B * a.H, tiles = a.Nq <= FEW ? a.Nq : (a.Nq + a.Br - 1) / a.Br;
    float* results = scratch + a.threads * thread_scratch(a);

    for_each_item(heads, spans.count * tiles, a.threads, [&](int64_t head, int64_t item, int thread) {
        const int64_t s = item / tiles, i = tiles - 1 - item % tiles;  // causal: the longest first
        const int64_t i0 = a.Nq <= FEW ? i : i * a.Br, row = head * a.Nq + i0;
        const AttentionOf<Element> part = spans.at(a, s);
        const auto run = [&](auto* out, float* lse) {
            const auto attend_some = a.Nq <= FEW ? attend_one<Element, std::remove_pointer_t<decltype(out)>>
                                                 : attend_tile<Element, std::remove_pointer_t<decltype(out)>>;
            attend_some(part, head / a.H, head % a.H, i0, scratch + thread * thread_scratch(a), out + row * a.d,
                        lse ? lse + row : nullptr);
        };
        if (spans.count == 1)
            run(a.out, a.lse);
        else
            run(spans.out(a, s, results), spans.lse(a, s, results));
    });
    if (spans.count == 1) return;
    for_each_item(heads, a.Nq, a.threads,
                  [&](int64_t head, int64_t i, int) { spans.merge(a, head * a.Nq + i, results); });
}

}  // namespace

int64_t flash_scratch(const Attention& a) { return scratch_of(a); }

void flash_attention(const Attention& a, float* scratch) { flash(a, scratch); }

// Tiles of K and V are copied, so they are smaller than those of an expanded tensor might be.
static AttentionOf<Bf16> with_bounded_tiles(AttentionOf<Bf16> a) {
    constexpr int64_t MOST_KEYS_COPIED = 1024;
    a.Bc = std::min(a.Bc, MOST_KEYS_COPIED);
    return a;
}

int64_t flash_in_bf16_scratch(const AttentionOf<Bf16>& a) {
    return amx::takes(a) ? amx::scratch(a) : scratch_of(with_bounded_tiles(a));
}

void flash_in_bf16_attention(const AttentionOf<Bf16>& a, float* scratch) {
    amx::takes(a) ? amx::attention(a, scratch) : flash(with_bounded_tiles(a), scratch);
}
