// A user's change of scores, as a library of its own.
#include "cuda/score_mod.h"
#include "rules.h"

#pragma GCC visibility push(default)
extern "C" bool score_mod_has_slope() { return sizeof(user::slope_of(0, At{}, 0)) == sizeof(float); }

// Rules::mod. The strip's scores are in units of 1 / unit; `slopes` may be null.
extern "C" void score_mod_change(const Strip& strip, int64_t b, int64_t h, float* slopes) {
    const bool queries_span = strip.query_stride == 1;
    const int64_t outer = queries_span ? strip.keys : strip.queries;
    const int64_t inner = queries_span ? strip.queries : strip.keys;
    for (int64_t o = 0; o < outer; o++)
        for (int64_t n = 0; n < inner; n++) {
            const int64_t i = queries_span ? n : o, j = queries_span ? o : n;
            const At at{static_cast<int>(b), static_cast<int>(h), static_cast<int>(strip.i0 + i),
                        static_cast<int>(strip.j0 + j)};
            const int64_t place = i * strip.query_stride + j * strip.key_stride;
            const float s = strip.data[place] / strip.unit;
            const bool shown = strip.data[place] > HIDDEN && user::seen_of(at, 0);  // a bias may hide it
            if (slopes) slopes[place] = shown ? static_cast<float>(user::slope_of(s, at, 0)) : 0.0f;
            strip.data[place] = shown ? strip.unit * score(s, at) : HIDDEN;
        }
}
#pragma GCC visibility pop
