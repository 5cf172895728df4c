// The limits of this processor, measured on one thread: the best of several runs within `seconds`.
#pragma once

#include <cstdint>

// The work that fma_peak() times: independent sums in registers. Returns the floating-point operations.
double multiply_adds(int64_t steps);

// Floating-point operations per second: of multiply-adds, and of AMX's products in bfloat16, 0 without AMX.
double fma_peak(double seconds);
double amx_peak(double seconds);

// Seconds of a multiply-add that depends on the one before it.
double fma_latency(double seconds);

// Seconds of a loop of NOPs, some 10 us at full rate. Other programs on the core slow it more than FMAs.
double nops();

// Reads floats several times, whole blocks of independent sums; returns the bytes.
double read_floats(const float* data, int64_t floats, int64_t passes);

// Bytes per second read from a buffer of `bytes`: the bandwidth of the cache or memory that holds it.
double read_bandwidth(int64_t bytes, double seconds);
