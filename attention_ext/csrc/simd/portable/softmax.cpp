// The softmax down the columns of a tile of scores: the online one, and its gradient.
#include <algorithm>
#include <cmath>

#include "simd/portable.h"
#include "simd/portable/vectors.h"

namespace portable {

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
        for (; j + 1 < all; j += 2) {
            even = max(even, load(S.data + j * ldS + c));
            odd = max(odd, load(S.data + (j + 1) * ldS + c));
        }
        for (; j < some; j++) even = max(even, live(j, load(S.data + j * ldS + c)));
        const Vec most = max(even, odd);
        const Vec after = most > before + SIMD_MAX_LAG ? most : before;
        const Vec subtracted = after == low ? Vec{} : after;  // -inf - -inf would be NaN

        Vec total{}, witness{};
        const auto exponentiate = [&](int64_t j, Vec x) {
            const Vec p = exp2_bounded(x);
            store(S.data + j * ldS + c, p);
            total += p;
            if (!KEEPS_NAN) witness += x;
        };
        for (j = 0; j < all; j++) exponentiate(j, load(S.data + j * ldS + c) - subtracted);
        for (; j < some; j++) exponentiate(j, live(j, load(S.data + j * ldS + c) - subtracted));
        const Vec a = exp2_bounded(before - subtracted);
        store(m + c, after);
        store(l + c, nan_if(witness, a * load(l + c) + total));
        store(correction + c, a);
        moved |= a != 1.0f;
    }
    int64_t halves[sizeof moved / sizeof(int64_t)], any = 0;
    std::memcpy(halves, &moved, sizeof moved);
    for (const int64_t half : halves) any |= half;
    return any != 0;
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
            s += S.ld, dp += dP.ld;
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
