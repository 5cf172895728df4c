// The rules of rules.h on strips of scores, a struct a rule. The lanes span what lies contiguous: queries in
// part 4, keys in the others.
#include "rules.h"

#include <algorithm>

#include "attention.h"
#include "simd/constants.h"
#include "simd/portable.h"
#include "simd/vectors/vectors.h"

using namespace portable;

namespace {

constexpr int64_t NO_LIMIT = int64_t{1} << 50;  // of rules.py

// Some neighbours of a strip: the scores of query i0 + i[lane] and key j0 + j[lane]. Lanes beyond the strip
// repeat its last query or key.
struct Lanes {
    IntVec i, j;
};

struct Of {  // a head's strip
    const Rules& rules;
    const AttentionSizes& a;
    const Strip& s;
    int64_t b, h;

    int64_t own(int64_t i) const { return i + a.Nk - a.Nq; }  // the key beside query i
};

// rule(score, lanes) for all scores of the strip, W neighbours at a time.
template <class Rule> void apply(const Strip& s, const Rule& rule) {
    const bool queries_span = s.query_stride == 1;
    const int64_t outer = queries_span ? s.keys : s.queries, inner = queries_span ? s.queries : s.keys;
    const int64_t stride = queries_span ? s.key_stride : s.query_stride;
    for (int64_t o = 0; o < outer; o++)
        for (int64_t n = 0; n < inner; n += W) {
            const IntVec row = IntVec{} + static_cast<int>(o), most = IntVec{} + static_cast<int>(inner - 1);
            IntVec lane = lane_numbers() + static_cast<int>(n);
            lane = lane < most ? lane : most;
            const Lanes at = queries_span ? Lanes{lane, row} : Lanes{row, lane};
            float* const score = s.data + o * stride + n;
            if (n + W <= inner)
                store(score, rule(load(score), at));
            else
                store_part(score, rule(load_part(score, inner - n, 0.0f), at), inner - n);
        }
}

// tanh(x): for |x| < 0.625 by the polynomial of (tanh(x) - x) / x^3 in x^2 that is best in least squares at
// Chebyshev points, whose error is 8e-8 of tanh(x); else by e^(2 |x|).
INLINE Vec tanh_of(Vec x) {
    constexpr float P[] = {-0.00588082163f, 0.020806661f, -0.0537947911f, 0.133321562f, -0.333333108f};
    const Vec square = x * x;
    Vec p = splat(P[0]);
    for (int n = 1; n < 5; n++) p = p * square + P[n];
    const Vec size = bit_cast<Vec>(bit_cast<IntVec>(x) & 0x7fffffff);
    const Vec power = exp2_bounded(size * (-2 * SIMD_LOG2E));
    const Vec large = (1.0f - power) / (1.0f + power);
    return size < 0.625f ? x + x * square * p : nan_if(x, x < 0 ? -large : large);
}

struct Softcap {
    static bool given(const Rules& r) { return r.softcap != 0; }
    const float cap;

    Softcap(const Of& o) : cap(o.rules.softcap * o.s.unit) {}
    INLINE Vec operator()(Vec score, const Lanes&) const { return cap * tanh_of(score / cap); }
    INLINE Vec slope(Vec score) const {
        const Vec t = tanh_of(score / cap);
        return 1.0f - t * t;
    }
};

struct Alibi {
    static bool given(const Rules& r) { return r.slopes != nullptr; }
    const float slope;
    const int own;

    Alibi(const Of& o)
        : slope(o.rules.slopes[o.b * o.a.H + o.h] * o.s.unit), own(static_cast<int>(o.own(o.s.i0) - o.s.j0)) {}
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        const Vec distance = __builtin_convertvector(at.i + own - at.j, Vec);
        return score - slope * bit_cast<Vec>(bit_cast<IntVec>(distance) & 0x7fffffff);
    }
};

// score <- sum(score, the number beside it) for an array (Nq, Nk) of numbers; -inf hides.
template <class Number, class Sum> void add_beside(const Of& o, const Number* array, const Sum& sum) {
    constexpr int64_t MOST = 128;  // queries at a time
    const Strip& s = o.s;
    const Number* const start =
        array + o.b * o.rules.bias_batch + o.h * o.rules.bias_head + s.i0 * o.rules.bias_row + s.j0;
    float rows[MOST * W], columns[W * MOST];  // a block as it lies there, and as part 4's strip has it
    const bool queries_span = s.query_stride == 1;
    for (int64_t i = 0; i < s.queries; i += MOST)
        for (int64_t j = 0; j < s.keys; j += W) {
            const int64_t queries = std::min(MOST, s.queries - i), keys = std::min<int64_t>(W, s.keys - j);
            for (int64_t r = 0; r < queries; r++)
                for (int64_t c = 0; c < keys; c++)
                    rows[r * W + c] = static_cast<float>(start[(i + r) * o.rules.bias_row + j + c]);
            if (queries_span) transpose({columns, MOST}, {rows, W}, queries, keys, 1.0f);
            const float* const block = queries_span ? columns : rows;
            const int64_t ld = queries_span ? MOST : W, stride = queries_span ? s.key_stride : s.query_stride;
            const int64_t outer = queries_span ? keys : queries, inner = queries_span ? queries : keys;
            float* const scores = s.data + i * s.query_stride + j * s.key_stride;
            for (int64_t n = 0; n < outer; n++)
                for (int64_t m = 0; m < inner; m += W) {
                    const int64_t rest = std::min<int64_t>(W, inner - m);
                    float* const score = scores + n * stride + m;
                    const Vec changed =
                        sum(load_part(score, rest, 0.0f), load_part(block + n * ld + m, rest, 0.0f));
                    store_part(score, changed < HIDDEN ? splat(HIDDEN) : changed, rest);
                }
        }
}

struct Window {
    const int first, last;  // of the keys that query i0 sees, from j0 on

    Window(const Of& o) : first(near(o, -o.rules.left)), last(near(o, o.s.right ? o.rules.right : NO_LIMIT)) {}
    static int near(const Of& o, int64_t away) {  // beyond the strip any number will do
        const int64_t far = o.s.queries + o.s.keys;
        return static_cast<int>(std::clamp(o.own(o.s.i0) + away - o.s.j0, -far, far));
    }
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        return ((at.j >= at.i + first) & (at.j <= at.i + last)) ? score : splat(HIDDEN);
    }
    // Applies it where some query's keys end.
    static void apply_to(const Of& o) {
        const Window all(o);
        const int64_t left = std::clamp<int64_t>(all.first + o.s.queries - 1, 0, o.s.keys);
        const int64_t right = std::clamp<int64_t>(all.last + 1, left, o.s.keys);
        for (const auto& [begin, end] : {Range{0, left}, Range{right, o.s.keys}}) {
            Strip part = o.s;
            part.data += begin * part.key_stride;
            part.j0 += begin;
            part.keys = end - begin;
            if (part.keys > 0) apply(part, Window({o.rules, o.a, part, o.b, o.h}));
        }
    }
};

struct Documents {
    static bool given(const Rules& r) { return r.documents != nullptr; }
    const int64_t *of_query, *of_key;

    Documents(const Of& o)
        : of_query(o.rules.documents + o.b * o.a.Nk + o.own(o.s.i0)),
          of_key(o.rules.documents + o.b * o.a.Nk + o.s.j0) {}
    // Whether the strip has one document: the first and the last of its queries and keys have it.
    bool idle(const Of& o) const {
        const int64_t one = of_query[0];
        return o.rules.apart && of_query[o.s.queries - 1] == one && of_key[0] == one &&
               of_key[o.s.keys - 1] == one;
    }
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        Vec found = score;
        for (int64_t lane = 0; lane < W; lane++)
            if (of_query[at.i[lane]] != of_key[at.j[lane]]) found[lane] = HIDDEN;
        return found;
    }
};

template <class Rule> void apply_if(const Of& o) {
    if (Rule::given(o.rules)) apply(o.s, Rule(o));
}

}  // namespace

Range Rules::keys(const AttentionSizes& a, int64_t head, int64_t i, int64_t count) const {
    const int64_t own = i + a.Nk - a.Nq, b = head / a.H;
    // The ends of a window may be as far as any number, so they are not added to first.
    Range seen{left >= own ? 0 : own - left, right >= a.Nk - own - count ? a.Nk : own + count + right};
    if (extents) {
        Range all{a.Nk, 0};
        for (int64_t p = own; p < own + count; p++) {
            all.first = std::min(all.first, extents[b * a.Nk + p].first);
            all.end = std::max(all.end, extents[b * a.Nk + p].end);
        }
        seen = {std::max(seen.first, all.first), std::min(seen.end, all.end)};
    }
    seen.first = std::min(seen.first, a.Nk);
    return {seen.first, std::max(seen.first, seen.end)};
}

int64_t Rules::staircase(const AttentionSizes& a, int64_t head, int64_t i, const Range& seen) const {
    const Range first = keys(a, head, i, 1);
    return documents || first.count() == 0 ? seen.end : first.end;
}

void Rules::change(const AttentionSizes& a, int64_t head, const Strip& strip, float* slope,
                   float* of_mod) const {
    Strip s = strip;
    s.queries = std::min(s.queries, a.Nq - s.i0);  // part 4's panels have more
    const Of o{*this, a, s, head / a.H, head % a.H};
    if (slope) {  // of the change by the score: other rules add to it
        Strip of = s;
        of.data = slope;
        for (int64_t j = 0; j < s.keys; j++)
            std::copy_n(s.data + j * s.key_stride, s.queries, slope + j * s.key_stride);
        apply(of, [cap = Softcap(o)](Vec score, const Lanes&) { return cap.slope(score); });
    }
    apply_if<Softcap>(o);
    apply_if<Alibi>(o);
    if (bias) add_beside(o, bias, [&](Vec score, Vec number) { return score + s.unit * number; });
    if (mask) add_beside(o, mask, [](Vec score, Vec number) { return number != 0.0f ? score : splat(HIDDEN); });
    if (mod) mod(s, o.b, o.h, of_mod);
    Window::apply_to(o);
    if (!documents) return;
    if (const Documents rule(o); !rule.idle(o)) apply(s, rule);
}
