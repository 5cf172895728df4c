// The table of the precisions of cached keys and values. Its Python side is CachePrecision in
// attention_ext/parts.py.
#pragma once

#include <cstdint>
#include <string>

// A row for each precision: name, bytes of a number.
#define EACH_CACHE_PRECISION(PRECISION) \
    PRECISION(fp32, 4)                  \
    PRECISION(bf16, 2)

#define CACHE_PRECISION_NAME(name, bytes) name,
enum class CachePrecision { EACH_CACHE_PRECISION(CACHE_PRECISION_NAME) };
#undef CACHE_PRECISION_NAME

struct CachePrecisionRow {
    CachePrecision precision;
    const char* name;
    int64_t bytes;
};

#define CACHE_PRECISION_ROW(name, bytes) {CachePrecision::name, #name, bytes},
inline constexpr CachePrecisionRow CACHE_PRECISIONS[] = {EACH_CACHE_PRECISION(CACHE_PRECISION_ROW)};
#undef CACHE_PRECISION_ROW

inline const CachePrecisionRow& row_of(CachePrecision precision) {
    return CACHE_PRECISIONS[static_cast<int>(precision)];
}
