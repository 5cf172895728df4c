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
// bf16, as attention.h describes. in_bf16: its functions for bfloat16 tensors, or none.
//
//         number, name, tiled, transposed, in_bf16
#define EACH_PART(PART)                  \
    PART(part1, naive, false, 0, none)   \
    PART(part2, blocked, false, 0, none) \
    PART(part3, fused, false, 0, none)   \
    PART(part4, flash, true, part4::FEW, flash_in_bf16)

#define DECLARE_PART(number, name, tiled, transposed, in_bf16) \
    int64_t name##_scratch(const Attention&);                  \
    void name##_attention(const Attention&, float* scratch);
EACH_PART(DECLARE_PART)
#undef DECLARE_PART

template <class Element>
struct Kernel {
    int64_t (*scratch)(const AttentionOf<Element>&);  // in floats
    void (*attention)(const AttentionOf<Element>&, float* scratch);
};

int64_t flash_in_bf16_scratch(const AttentionOf<Bf16>&);
void flash_in_bf16_attention(const AttentionOf<Bf16>&, float* scratch);
inline constexpr Kernel<Bf16> none{}, flash_in_bf16{flash_in_bf16_scratch, flash_in_bf16_attention};

struct Part {
    const char* name;                      // the operator's
    int64_t (*scratch)(const Attention&);  // in floats
    void (*kernel)(const Attention&, float* scratch);
    bool tiled;
    int64_t transposed;
    Kernel<Bf16> in_bf16;  // null if it does not take bfloat16

    Kernel<float> of(float) const { return {scratch, kernel}; }
    Kernel<Bf16> of(Bf16) const { return in_bf16; }
};

#define PART_ROW(number, name, tiled, transposed, in_bf16) \
    {#number "_" #name, name##_scratch, name##_attention, tiled, transposed, in_bf16},
inline constexpr Part PARTS[] = {EACH_PART(PART_ROW)};
#undef PART_ROW

// The part of this name; null if there is none.
inline const Part* find_part(const std::string& name) {
    for (const Part& part : PARTS)
        if (name == part.name) return &part;
    return nullptr;
}
