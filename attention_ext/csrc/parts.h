// The table of the parts that are kernels, PARTS. Its Python side is attention_ext/parts.py.
#pragma once

#include <cstdint>
#include <string>

#include "attention.h"

// Sizes of the kernels, which the code that counts their costs asks for too.
namespace part2 {
constexpr int64_t T = 96;      // edge of a tile of scores: six cache lines of floats
constexpr int64_t DEPTH = 64;  // features of K transposed at a time: 24 KB
}  // namespace part2

namespace part4 {
constexpr int64_t FEW = 3;  // at most this many queries are taken one at a time, with lanes that span keys
constexpr int64_t FEW_TOGETHER = 8;  // the most queries of flash_decoding_together()
constexpr int64_t STEP = 128;        // keys of a strip, not counting its diagonal
}  // namespace part4

namespace amx {
constexpr int64_t BLOCK = 32;  // queries of a strip, the fewest of a call; keys that are multiplied at a time
}  // namespace amx

// Part `number` with the kernel `name` has the functions name_scratch and name_attention, the file
// cpu/number_name.cpp and the operator number_name; perhaps others for few queries and for bfloat16 tensors.
//
//         number, name, few, bf16
#define EACH_PART(PART)              \
    PART(part1, naive, none, none)   \
    PART(part2, blocked, none, none) \
    PART(part3, fused, none, none)   \
    PART(part4, flash, flash_decoding, flash_bf16)

template <class Element> struct Kernel {
    int64_t (*scratch)(const AttentionOf<Element>&);  // in floats
    void (*attention)(const AttentionOf<Element>&, float* scratch);
};

// takes: whether a call is for these functions. For at most `queries` queries K may be transposed, K and V in
// bf16; with rules every query then sees a key, and there are no sinks. together: a head's last queries over
// panels of K, each with the bits of its own call.
struct FewQueries : Kernel<float> {
    bool (*takes)(const Attention&);
    int64_t queries;
    Kernel<float> together;
};

struct Part {
    const char* name;  // the operator's name
    Kernel<float> whole;
    FewQueries few;
    Kernel<Bf16> bf16;

    const Kernel<float>& kernel(const Attention& a) const {
        return few.takes && few.takes(a) ? static_cast<const Kernel<float>&>(few) : whole;
    }
    const Kernel<Bf16>& kernel(const AttentionOf<Bf16>&) const { return bf16; }

    template <class Element> int64_t scratch(const AttentionOf<Element>& a) const {
        return kernel(a).scratch(a);
    }
    template <class Element> void attention(const AttentionOf<Element>& a, float* scratch) const {
        kernel(a).attention(a, scratch);
    }
    bool takes_bf16() const { return bf16.attention != nullptr; }
};

#define DECLARE_PART(number, name, few, bf16) \
    int64_t name##_scratch(const Attention&); \
    void name##_attention(const Attention&, float* scratch);
EACH_PART(DECLARE_PART)
#undef DECLARE_PART

int64_t flash_decoding_scratch(const Attention&);
void flash_decoding_attention(const Attention&, float* scratch);
bool flash_decoding_takes(const Attention&);
int64_t flash_decoding_together_scratch(const Attention&);
void flash_decoding_together(const Attention&, float* scratch);
int64_t flash_bf16_scratch(const AttentionOf<Bf16>&);
void flash_bf16_attention(const AttentionOf<Bf16>&, float* scratch);

struct None {
    template <class Functions> constexpr operator Functions() const { return {}; }
};
inline constexpr None none{};
inline constexpr FewQueries flash_decoding{{flash_decoding_scratch, flash_decoding_attention},
                                           flash_decoding_takes,
                                           part4::FEW,
                                           {flash_decoding_together_scratch, flash_decoding_together}};
inline constexpr Kernel<Bf16> flash_bf16{flash_bf16_scratch, flash_bf16_attention};

#define PART_ROW(number, name, few, bf16) {#number "_" #name, {name##_scratch, name##_attention}, few, bf16},
inline constexpr Part PARTS[] = {EACH_PART(PART_ROW)};
#undef PART_ROW

// The part of this name; null if there is none.
inline const Part* find_part(const std::string& name) {
    for (const Part& part : PARTS)
        if (name == part.name) return &part;
    return nullptr;
}
