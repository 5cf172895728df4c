// The precisions of cached keys and values. The Python side is CachePrecision in attention_ext/parts.py.
#pragma once

#include <cstdint>

enum class CachePrecision { fp32, bf16 };

struct CachePrecisionRow {
    CachePrecision precision;
    const char* name;
    int64_t bytes;  // of a number
};

inline constexpr CachePrecisionRow CACHE_PRECISIONS[] = {{CachePrecision::fp32, "fp32", 4},
                                                         {CachePrecision::bf16, "bf16", 2}};
