#pragma once

#include <cstdint>

// n rounded up to a multiple of `unit`.
constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
