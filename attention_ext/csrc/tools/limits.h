// The limits of this processor, measured.
#pragma once

#include <cstdint>

// The work that fma_peak() times: independent sums in registers. Returns the floating-point operations.
double multiply_adds(int64_t steps);

// The FMA peak of one thread, in floating-point operations per second.
double fma_peak(double seconds);

// The same for AMX's products in bfloat16; 0 without AMX.
double amx_peak(double seconds);

// Seconds of a multiply-add that depends on the one before it.
double fma_latency(double seconds);

// Bytes per second that one thread reads repeatedly from a buffer of `bytes`.
double read_bandwidth(int64_t bytes, double seconds);
