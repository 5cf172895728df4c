// AMX's eight tile registers, each of 16 rows of 64 bytes; with EMULATED_AMX arrays, for other processors.
#pragma once

#include <cstdint>
#include <cstring>

#include "bf16.h"

#if defined(EMULATED_AMX) || (defined(__x86_64__) && defined(__linux__) && !defined(__APPLE__))
#define TILES_OF_AMX
#endif

#if !defined(EMULATED_AMX) && defined(TILES_OF_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {

constexpr int64_t ROWS = 16, ROW_BYTES = 64;

#if defined(EMULATED_AMX)

struct Register {
    unsigned char row[ROWS][ROW_BYTES];
};
inline thread_local Register registers[8];

inline bool available() { return true; }
inline void configure() {}
inline void release() {}

template <int t> void zero() { std::memset(&registers[t], 0, sizeof(Register)); }

template <int t> void load(const void* from, int64_t stride) {
    for (int64_t r = 0; r < ROWS; r++)
        std::memcpy(registers[t].row[r], static_cast<const char*>(from) + r * stride, ROW_BYTES);
}

template <int t> void store(void* to, int64_t stride) {
    for (int64_t r = 0; r < ROWS; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, registers[t].row[r], ROW_BYTES);
}

template <int c, int a, int b> void multiply_add() {
    float sums[ROWS][ROWS];
    Bf16 A[ROWS][2 * ROWS], B[ROWS][ROWS][2];
    std::memcpy(sums, &registers[c], sizeof sums);
    std::memcpy(A, &registers[a], sizeof A);
    std::memcpy(B, &registers[b], sizeof B);
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t k = 0; k < 2 * ROWS; k++)
            for (int64_t n = 0; n < ROWS; n++) sums[r][n] += widened(A[r][k]) * widened(B[k / 2][n][k % 2]);
    std::memcpy(&registers[c], sums, sizeof sums);
}

#elif defined(TILES_OF_AMX)

// Whether the processor has AMX for bfloat16 and the kernel lets this process use it, which it asks.
inline bool available() {
    static const bool permitted = [] {
        constexpr unsigned LEAF = 7, BF16 = 1u << 22, TILE = 1u << 24;  // bits of EDX
        constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        unsigned eax, ebx, ecx, edx = 0;
        if (!__get_cpuid_count(LEAF, 0, &eax, &ebx, &ecx, &edx)) return false;
        return (edx & BF16) && (edx & TILE) && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }();
    return permitted;
}

// Makes all eight registers whole tiles, for this thread.
inline void configure() {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes{};
    shapes.palette = 1;
    for (int t = 0; t < 8; t++) shapes.row_bytes[t] = ROW_BYTES, shapes.rows[t] = ROWS;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
}

inline void release() { asm volatile("tilerelease"); }

template <int t> inline __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(t));
}

template <int t> inline __attribute__((always_inline)) void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
}

template <int t> inline __attribute__((always_inline)) void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
}

// c <- c + a b, where row k of b holds the rows 2 k and 2 k + 1 of a matrix in pairs.
template <int c, int a, int b> inline __attribute__((always_inline)) void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#endif

}  // namespace amx
