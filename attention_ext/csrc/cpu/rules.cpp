// The rules of rules.h on strips of scores, a struct a rule. The lanes span what lies contiguous: queries in
// part 4, keys in the others.
#include "rules.h"

#include <algorithm>

#include "attention.h"
#include "simd/constants.h"
#include "simd/portable.h"
#include "simd/portable/vectors.h"

using namespace portable;

namespace {

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

// tanh(x): for small x a polynomial, whose relative error is 1e-7, else by e^(2 |x|)
INLINE Vec tanh_of(Vec x) {
    constexpr float P[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                           -3.33332819422e-1f};
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

// What a number of an array (Nq, Nk) does to a score.
template <class Number>
struct Beside {
    const Number* const start;
    const int64_t row;

    Beside(const Of& o, const Number* array)
        : start(array + o.b * o.rules.bias_batch + o.h * o.rules.bias_head + o.s.i0 * o.rules.bias_row +
                o.s.j0),
          row(o.rules.bias_row) {}
    INLINE Vec numbers(const Lanes& at) const {
        Vec found;
        for (int64_t lane = 0; lane < W; lane++) found[lane] = start[at.i[lane] * row + at.j[lane]];
        return found;
    }
};

struct Bias : Beside<float> {
    static bool given(const Rules& r) { return r.bias != nullptr; }
    const float unit;

    Bias(const Of& o) : Beside(o, o.rules.bias), unit(o.s.unit) {}
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        const Vec sum = score + unit * numbers(at);
        return sum < HIDDEN ? splat(HIDDEN) : sum;  // -inf hides
    }
};

struct Mask : Beside<bool> {
    static bool given(const Rules& r) { return r.mask != nullptr; }
    Mask(const Of& o) : Beside(o, o.rules.mask) {}
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        return numbers(at) != 0.0f ? score : splat(HIDDEN);
    }
};

struct Window {
    static bool given(const Rules&) { return true; }  // also of `causal`
    const int first, last;                            // of the keys that query i0 sees, from j0 on

    Window(const Of& o) : first(near(o, -o.rules.left)), last(near(o, o.rules.right)) {}
    static int near(const Of& o, int64_t away) {  // beyond the strip any number will do
        const int64_t far = o.s.queries + o.s.keys;
        return static_cast<int>(std::clamp(o.own(o.s.i0) + away - o.s.j0, -far, far));
    }
    // Whether a query's keys end within the strip.
    bool idle(const Of& o) const { return first + o.s.queries - 1 <= 0 && last >= o.s.keys - 1; }
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        return (at.j >= at.i + first) & (at.j <= at.i + last) ? score : splat(HIDDEN);
    }
};

struct Documents {
    static bool given(const Rules& r) { return r.documents != nullptr; }
    const int64_t *of_query, *of_key;

    Documents(const Of& o)
        : of_query(o.rules.documents + o.b * o.a.Nk + o.own(o.s.i0)),
          of_key(o.rules.documents + o.b * o.a.Nk + o.s.j0) {}
    // Whether the strip has one document: extents keep other keys out.
    bool idle(const Of& o) const { return o.rules.apart && of_query[0] == of_query[o.s.queries - 1]; }
    INLINE Vec operator()(Vec score, const Lanes& at) const {
        Vec found = score;
        for (int64_t lane = 0; lane < W; lane++)
            if (of_query[at.i[lane]] != of_key[at.j[lane]]) found[lane] = HIDDEN;
        return found;
    }
};

// rule(score, lanes) for all scores of the strip, W neighbours at a time.
template <class Rule>
void apply(const Strip& s, const Rule& rule) {
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

template <class Rule>
void apply_if(const Of& o) {
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

void Rules::change(const AttentionSizes& a, int64_t head, const Strip& strip, float* slope) const {
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
    apply_if<Bias>(o);
    apply_if<Mask>(o);
    if (const Window window(o); !window.idle(o)) apply(s, window);
    if (!documents) return;
    if (const Documents rule(o); !rule.idle(o)) apply(s, rule);
}
