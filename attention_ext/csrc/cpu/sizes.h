// Compile-time sizes of the kernels, shared with the code that counts their costs.
#pragma once

#include <cstdint>

namespace part2 {
constexpr int64_t T = 96;      // edge of a tile of scores: six cache lines of floats
constexpr int64_t DEPTH = 64;  // features of K transposed at a time: 24 KB
}  // namespace part2

namespace part4 {
constexpr int64_t FEW = 3;     // at most this many queries are taken one at a time, with lanes that span keys
constexpr int64_t STEP = 128;  // keys of a strip, not counting its diagonal
}  // namespace part4

namespace amx {
constexpr int64_t BLOCK = 32;  // queries of a strip, the fewest of a call; keys that are multiplied at a time
}  // namespace amx
