// The rules of attention_ext/rules.py in kernels 4, 5, 6, split and the backward pass, compiled in by RULES:
// which keys the loops visit, and what becomes of a query's scores there. Without RULES only range_of() is
// used, as for a causal mask.
#pragma once
#include "call.h"

#if RULES & MODIFIED
#include "score_mod.h"
#endif

constexpr bool BIASED = (RULES & (BIAS_ADDS | BIAS_HIDES)) != 0;
constexpr bool CHANGES = BIASED || (RULES & (SOFTCAP | ALIBI | MODIFIED)) != 0;  // scores, beside hiding some

// The keys `first` to `end` - 1 hold all that some query sees; those within `all` are seen by each.
struct Range {
    int first, end, all_first, all_end;
};

#if RULES
__device__ inline int first_seen(const Call& call, int query) {
    const int own = query + call.Nk - call.Nq;
    return call.rules.left >= own ? 0 : own - call.rules.left;
}
#endif

#if RULES & DOCUMENTS
// The keys of a key's document. Where numbers do not grow these are all keys, and `numbers`, else null, tell.
struct Document {
    int first, end;
    const long long* numbers;
};
__device__ inline const long long* numbers_of(const Call& call, unsigned head) {
    return call.rules.documents + head / (unsigned)call.heads * (long long)call.Nk;
}
__device__ inline Document document_of(const Call& call, unsigned head, int key) {
    const int2* const extents =
        call.rules.extents + head / (unsigned)call.heads * (long long)call.rules.extent_rows;
    const int2 keys = extents[call.rules.extent_rows - call.Nk + min(key, call.Nk - 1)];
    if (extents->x) return {0, call.Nk, numbers_of(call, head)};
    return {keys.x, keys.y, nullptr};
}
#endif

// Of the queries i to `last` of a head of all batches; may be empty.
__device__ inline Range range_of(const Call& call, long long head, int i, int last) {
#if RULES
    last = min(last, call.Nq - 1);
    i = min(i, last);
    Range range{first_seen(call, i), keys_seen(call, last), first_seen(call, last), keys_seen(call, i)};
#if RULES & DOCUMENTS
    const Document of_first = document_of(call, head, i + call.Nk - call.Nq);
    const Document of_last = document_of(call, head, last + call.Nk - call.Nq);
    range.first = max(range.first, of_first.first);
    range.end = min(range.end, of_last.end);
    range.all_first = of_last.numbers ? call.Nk : max(range.all_first, of_last.first);
    range.all_end = min(range.all_end, of_first.end);
#endif
    range.end = max(range.first, range.end);
    return range;
#else
    return {0, keys_seen(call, last), 0, keys_seen(call, i)};
#endif
}

#if RULES
constexpr float LOG2E = 1.44269504088896341f;

__device__ inline float tanh_of(float x) {
#if FORMAT == FP32
    return tanhf(x);
#else
    return tanh_approx(x);
#endif
}

// Query i of a head of all batches, and the keys from j0 on.
struct Row {
    int first, end;  // it sees the keys j0 + first to j0 + end - 1; with documents those with its number
    float own, slope, cap, cap_below;
    const long long* documents = nullptr;  // numbers that must be compared
    long long document;
    const void* bias;
    int b, h, i, j0, last;  // key j0 + last is the head's last one

    // without: the documents are left to the caller.
    __device__ inline Row(const Call& call, long long head, int i, int j0, bool without = false) {
        i = min(i, call.Nq - 1);
        first = first_seen(call, i) - j0;
        end = keys_seen(call, i) - j0;
        cap = call.rules.softcap;
        cap_below = call.rules.softcap_below;
        [[maybe_unused]] const int p = i + call.Nk - call.Nq - j0;
#if RULES & ALIBI
        own = (float)p;
        slope = call.rules.slopes[head] * LOG2E;
#endif
        this->i = i;
        this->j0 = j0;
        b = head / call.heads;
        h = head % call.heads;
        last = call.Nk - 1 - j0;
        if (BIASED) {
            const Strides& by = call.rules.bias_strides;
            const long long at = b * by.batch + h * by.head + i * by.row + j0;
            bias = RULES & BIAS_ADDS ? (const void*)((const float*)call.rules.bias + at)
                                     : (const bool*)call.rules.bias + at;
        }
#if RULES & DOCUMENTS
        if (without) return;
        const Document of = document_of(call, head, p + j0);
        first = max(first, of.first - j0);
        end = min(end, of.end - j0);
        if (of.numbers) {
            documents = of.numbers + j0;
            document = documents[p];
        }
#endif
    }
    // The score of key j0 + c, in powers of two, as all but a user's header change it. -INF: it is hidden.
    __device__ inline float given(float s, int c) const {
        if (RULES & SOFTCAP) s = cap * tanh_of(s * cap_below);
        if (RULES & ALIBI) s -= slope * fabsf(own - (float)c);
        if (RULES & BIAS_ADDS) s += (c <= last ? ((const float*)bias)[c] : 0.0f) * LOG2E;
        if (RULES & BIAS_HIDES && !(c <= last && ((const bool*)bias)[c])) s = -INF;
        return s;
    }
    // given(), as the header changes it, and the derivative of that.
    __device__ inline float modified(float s, int c) const {
#if RULES & MODIFIED
        const At at{b, h, i, j0 + min(c, last)};
        const float changed = user::score(s * LN2, at) * LOG2E;  // computed also if it is hidden: no branches
        return BIASED && s == -INF || !user::seen_of(at, 0) ? -INF : changed;
#else
        return s;
#endif
    }
    __device__ inline float modified_slope(float s, int c) const {
#if RULES & MODIFIED
        const At at{b, h, i, j0 + min(c, last)};
        const float slope = user::slope_of(s * LN2, at, 0);
        return BIASED && s == -INF || !user::seen_of(at, 0) ? 0.0f : slope;
#else
        return 1.0f;
#endif
    }
    // The score of key j0 + c, in powers of two, as it changes, and whether it is seen; then both.
    __device__ inline float changed(float s, int c) const { return modified(given(s, c), c); }
    // The derivative of given() by the score.
    __device__ inline float derivative(float s) const {
        const float x = RULES & SOFTCAP ? tanh_of(s * cap_below) : 0.0f;
        return 1.0f - x * x;
    }
    __device__ inline bool sees(int c) const {
        return c >= first && c < end && (!(RULES & DOCUMENTS) || !documents || documents[c] == document);
    }
    __device__ inline float operator()(float s, int c) const { return sees(c) ? changed(s, c) : -INF; }
};

// What becomes of a row's scores that a lane has after products of tensor cores: score(i) is that of column
// i / 2 * 8 + i % 2.
template <int count, class Score>
__device__ inline void apply(const Row& row, const Score& score, bool all_seen) {
    const auto column = [](int i) { return i / 2 * 8 + i % 2; };
    if (BIASED || RULES & MODIFIED) {  // a few at a time: the loads and indices of all would spill
        Row now = row;
        UNROLLED(i, count) {
            if (i % 2 == 0) asm volatile("" : "+r"(now.j0), "+r"(now.last)::"memory");
            score(i) = now.changed(score(i), column(i));
        }
    } else if (CHANGES) {
        UNROLLED(i, count) score(i) = row.changed(score(i), column(i));
    }
    if (all_seen) return;
    if (RULES & DOCUMENTS && row.documents) {  // one load at a time: all would spill
        static_assert(count <= 32, "bits of `seen`");
        unsigned seen = 0;
#pragma unroll 1
        for (int i = 0; i < count; i++) seen |= (unsigned)row.sees(column(i)) << i;
        UNROLLED(i, count)
            if (!(seen >> i & 1)) score(i) = -INF;
        return;
    }
    UNROLLED(i, count)
        if (column(i) < row.first || column(i) >= row.end) score(i) = -INF;
}

// The sink joins a row's sum l; the maximum m times `scale` is in powers of two. Returns what O is multiplied
// by.
__device__ inline float inverse_with_sink(const Call& call, long long head, float& m, float& l,
                                          float scale = 1.0f) {
    float shrink = 1.0f;
    if (call.rules.sinks) {
        const float sink = call.rules.sinks[head % call.heads] * LOG2E / scale, top = fmaxf(m, sink);
        shrink = exp2_approx((m - subtrahend(top)) * scale);
        l = l * shrink + exp2_approx((sink - subtrahend(top)) * scale);
        m = top;
    }
    return l == 0.0f ? 0.0f : shrink / l;
}
#endif
