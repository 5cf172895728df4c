// A user's change of scores on the CPU and on CUDA: SCORE_MOD is the path of a header with
//
//   float score(float s, At at)                  the score of query at.i and key at.j of batch at.b, head at.h
//   bool seen(At at)                             optional: whether the query sees the key
//   float slope(float s, At at)                  optional: score's derivative by s, for gradients
#pragma once

struct At {
    int b, h, i, j;
};

#ifdef __CUDACC_RTC__
#include "standard.h"
namespace user {
#include SCORE_MOD
#else
#include <cmath>
#include <cstdint>
#ifdef SCORE_MOD
#include SCORE_MOD
#else
static float score(float s, At) { return s; }
#endif
namespace user {
#endif

// The functions that the header leaves out: of two that fit, the one that takes an int is chosen.
template <class Where> auto seen_of(Where at, int) -> decltype(seen(at)) { return seen(at); }
template <class Where> bool seen_of(Where, long) { return true; }
template <class Where> auto slope_of(float s, Where at, int) -> decltype(slope(s, at)) { return slope(s, at); }
struct None {
    operator float() const { return 0; }
};
template <class Where> None slope_of(float, Where, long) { return {}; }

}  // namespace user
