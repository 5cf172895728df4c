// A user's change of scores, as a library of its own: SCORE_MOD is the path of a header with
//
//   float score(float s, At at)                  the score of query at.i and key at.j of batch at.b, head at.h
//   bool seen(At at)                             optional: whether the query sees the key
//   float slope(float s, At at)                  optional: score's derivative by s, for gradients
#include <cmath>
#include <cstdint>

#include "rules.h"

struct At {
    int b, h, i, j;
};

#ifdef SCORE_MOD
#include SCORE_MOD
#else
static float score(float s, At) { return s; }
#endif

namespace {

// The functions that the header leaves out: of two that fit, the one that takes an int is chosen.
template <class Where> auto seen_of(Where at, int) -> decltype(seen(at)) { return seen(at); }
template <class Where> bool seen_of(Where, long) { return true; }
template <class Where> auto slope_of(float s, Where at, int) -> decltype(slope(s, at)) { return slope(s, at); }
struct None {
    operator float() const { return 0; }
};
template <class Where> None slope_of(float, Where, long) { return {}; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" bool score_mod_has_slope() { return sizeof(slope_of(0, At{}, 0)) == sizeof(float); }

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
            const bool shown = seen_of(at, 0);
            if (slopes) slopes[place] = shown ? static_cast<float>(slope_of(s, at, 0)) : 0.0f;
            strip.data[place] = shown ? strip.unit * score(s, at) : HIDDEN;
        }
}
#pragma GCC visibility pop
