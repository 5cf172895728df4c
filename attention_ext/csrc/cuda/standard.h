// What a user's change of scores may use of the C++ library, which NVRTC lacks. nvrtc.py has the headers'
// names.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define M_PI 3.14159265358979323846

using int32_t = int;
using uint32_t = unsigned;
using int64_t = long long;
using uint64_t = unsigned long long;

namespace std {
using ::abs, ::fabs, ::fma, ::fmin, ::fmax, ::min, ::max, ::fmod, ::copysign, ::isnan, ::isinf, ::isfinite;
using ::ceil, ::floor, ::trunc, ::round, ::rint, ::sqrt, ::cbrt, ::hypot, ::pow;
using ::exp, ::exp2, ::expm1, ::log, ::log2, ::log10, ::log1p, ::erf, ::erfc, ::tgamma, ::lgamma;
using ::sin, ::cos, ::tan, ::asin, ::acos, ::atan, ::atan2, ::sinh, ::cosh, ::tanh;
}  // namespace std
