// The table of the parts that are kernels. Everything that needs one iterates over PARTS: the operators, the
// decoder, the program of tools/alone.cpp and the tests. Its Python side is attention_ext/parts.py.
#pragma once

#include <cstdint>
#include <string>

#include "attention.h"
#include "cpu/sizes.h"

// A row for each part. Part `number` with the kernel `name` has the functions name_scratch and name_attention,
// the file cpu/number_name.cpp and the operator number_name.
// tiled: takes Br and Bc. transposed: for up to so many queries it also takes K transposed, and then K and V in
// bf16, as attention.h describes.
//
//         number, name, tiled, transposed
#define EACH_PART(PART)            \
    PART(part1, naive, false, 0)   \
    PART(part2, blocked, false, 0) \
    PART(part3, fused, false, 0)   \
    PART(part4, flash, true, part4::FEW)

#define DECLARE_PART(number, name, tiled, transposed) \
    int64_t name##_scratch(const Attention&);         \
    void name##_attention(const Attention&, float* scratch);
EACH_PART(DECLARE_PART)
#undef DECLARE_PART

struct Part {
    const char* name;                      // the operator's
    int64_t (*scratch)(const Attention&);  // in floats
    void (*kernel)(const Attention&, float* scratch);
    bool tiled;
    int64_t transposed;
};

#define PART_ROW(number, name, tiled, transposed) \
    {#number "_" #name, name##_scratch, name##_attention, tiled, transposed},
inline constexpr Part PARTS[] = {EACH_PART(PART_ROW)};
#undef PART_ROW

// The part of this name; null if there is none.
inline const Part* find_part(const std::string& name) {
    for (const Part& part : PARTS)
        if (name == part.name) return &part;
    return nullptr;
}
