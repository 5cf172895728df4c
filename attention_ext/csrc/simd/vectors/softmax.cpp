// The softmax down the columns of a tile of scores: the online one, and its gradient.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd/portable.h"
#include "simd/vectors/vectors.h"

namespace portable {
namespace {

// of() gives 2^(x - m) for x <= m + SIMD_MAX_LAG + 1/2; m is -inf or from reference(). NEAR: near() holds.
#if defined(__AVX512F__)
struct Powers {
    Vec m, witness{};

    explicit Powers(Vec m) : m(m) {}
    static INLINE Vec reference(Vec most) { return most; }
    INLINE bool near() const { return false; }
    template <bool NEAR> INLINE Vec of(Vec x) {
        const Vec y = x - m;
        if (!KEEPS_NAN) witness += y;
        return exp2_bounded(y);
    }
};
#else
// As exp2_bounded(), with m, a whole number, in the constant that rounds x. At m - 127 the factor is 0.
struct Powers {
    static constexpr float FAR = 1 << 21;  // z is not exact beyond it: m is subtracted first
    static constexpr Vec witness{};        // NaN stays NaN
    Vec far, round, least;

    static INLINE IntVec is_far(Vec m) { return (m > FAR) | (m < -FAR); }
    static INLINE Vec reference(Vec most) { return is_far(most) ? most : (most + SIMD_ROUND) - SIMD_ROUND; }
    INLINE explicit Powers(Vec m) : far(is_far(m) ? m : Vec{}) {
        const Vec in_constant = is_far(m) ? Vec{} : m;
        round = SIMD_ROUND + 127.0f - in_constant;
        least = in_constant - 127.0f;
    }
    INLINE bool near() const { return !any(far != 0.0f); }
    template <bool NEAR> INLINE Vec of(Vec x) const {
        const Vec y = max(NEAR ? x : x - far, least), z = y + round;
        return exp2_near_0(y - (z - round)) * bit_cast<Vec>(bit_cast<UintVec>(z) << 23);
    }
};
#endif

}  // namespace

bool online_softmax(Matrix S, int64_t rows, int64_t cols, int64_t first, float* m, float* l,
                    float* correction) {
    const int64_t ldS = S.ld;
    const IntVec lane = lane_numbers();
    const Vec low = splat(-INFINITY);
    IntVec moved{};
    for (int64_t c = 0; c < cols; c += W) {
        const int64_t all = std::min(rows, first + c), some = std::min(rows, first + c + W);
        const auto live = [&](int64_t j, Vec x) {  // in the lanes that see row j
            return lane > static_cast<int>(j - first - c) ? x : low;
        };
        const Vec before = load(m + c);
        Vec even = before, odd = before;  // two independent chains of maxima
        int64_t j = 0;
#pragma GCC unroll 2
        for (; j + 1 < all; j += 2) {
            even = max(even, load(S.data + j * ldS + c));
            odd = max(odd, load(S.data + (j + 1) * ldS + c));
        }
        for (; j < some; j++) even = max(even, live(j, load(S.data + j * ldS + c)));
        const Vec most = max(even, odd);
        const Vec after = most > before + SIMD_MAX_LAG ? Powers::reference(most) : before;
        const Vec subtracted = after == low ? Vec{} : after;  // -inf - -inf would be NaN

        Powers powers(subtracted);
        Vec total{};
        const auto exponentiate = [&](auto near) {
            const auto step = [&](int64_t j, auto mask) {
                float* s = S.data + j * ldS + c;
                const Vec p = powers.of<near>(mask(j, load(s)));
                store(s, p);
                total += p;
            };
            for (j = 0; j < all; j++) step(j, [](int64_t, Vec x) { return x; });
            for (; j < some; j++) step(j, live);
        };
        if (powers.near())
            exponentiate(std::true_type());
        else
            exponentiate(std::false_type());
        const Vec a = exp2_bounded(before - subtracted);
        store(m + c, after);
        store(l + c, nan_if(powers.witness, a * load(l + c) + total));
        store(correction + c, a);
        moved |= a != 1.0f;
    }
    return any(moved);
}

void softmax_gradient(Matrix S, Matrix dP, int64_t rows, int64_t cols, int64_t first, const float* lse,
                      const float* rest, const float* D) {
    const IntVec lane = lane_numbers();
    for (int64_t c = 0; c < cols; c += W) {
        const int64_t all = std::min(rows, first + c), some = std::min(rows, first + c + W);
        const Vec subtracted = load(lse + c), more = load(rest + c), of_row = load(D + c);
        float *s = S.data + c, *dp = dP.data + c;
        const auto step = [&](auto live) {
            const Vec x = load(s) - subtracted - more;  // above 0 by rounding only
            const Vec p = live(nan_if(x, exp2_bounded(x > 0 ? Vec{} : x)));
            store(s, p);
            store(dp, live(p * (load(dp) - of_row)));
            s += S.ld;
            dp += dP.ld;
        };
        for (int64_t j = 0; j < all; j++) step([](Vec x) { return x; });
        for (int64_t j = all; j < some; j++)
            step([&](Vec x) { return lane > static_cast<int>(j - first - c) ? x : Vec{}; });
    }
}

void scale_columns(Matrix C, int64_t rows, int64_t cols, const float* a) {
    int64_t c = 0;
    for (; c + W <= cols; c += W) {
        const Vec factor = load(a + c);
        for (int64_t i = 0; i < rows; i++) store(C.data + i * C.ld + c, load(C.data + i * C.ld + c) * factor);
    }
    for (; c < cols; c++)
        for (int64_t i = 0; i < rows; i++) C.data[i * C.ld + c] *= a[c];
}

}  // namespace portable
