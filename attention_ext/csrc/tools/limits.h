// What this processor can do at most, measured.
#pragma once

#include <cstdint>

// The FMA peak of one thread, in floating-point operations per second.
double fma_peak(double seconds);

// Seconds of a multiply-add that waits for the one before it.
double fma_latency(double seconds);

// Bytes per second that one thread reads, over and over, from a buffer of so many.
double read_bandwidth(int64_t bytes, double seconds);
