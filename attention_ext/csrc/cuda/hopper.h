// The PTX instructions of kernel 6 (sm_90a), one function each: TMA copies, products of a warpgroup (wgmma),
// named barriers and register counts. A warpgroup is four warps, from a multiple of 4 on.
//
// Source: PTX ISA, 'Instruction Set': 'bar', 'cp.async.bulk.tensor', 'setmaxnreg', and 'Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate Instructions'. Addresses in shared memory are those of shared_address().
#pragma once
#include "mbarrier.h"
#include "mma.h"

// CUtensorMap, encoded by the host; a kernel takes it as a `const __grid_constant__` parameter.
struct alignas(64) TensorMap {
    char bytes[128];
};

// One thread starts the copy of a box. What lies beyond the tensor becomes 0; `barrier` counts the bytes.
__device__ inline void copy_box(unsigned to, const TensorMap* map, int column, int row, int head, int batch,
                                unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}

// The same for bytes that lie side by side; all addresses and sizes are multiples of 16.
__device__ inline void copy_bytes(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The other way: one thread starts the copy of floats to global memory, or their addition to what is there.
__device__ inline void copy_out(float* to, unsigned from, int bytes, bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                     "r"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                     "r"(bytes)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the thread's copies have read shared memory; then until they are done.
__device__ inline void copies_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void copies_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A counter in global memory, which orders what threads of other blocks and their copies have written there.
__device__ inline unsigned load_acquired(const unsigned* from) {
    unsigned number;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    return number;
}
__device__ inline void store_released(unsigned* to, unsigned number) {
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}

// Fetches a map into the cache before its first copy.
__device__ inline void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// setmaxnreg: a warpgroup's registers a thread, a multiple of 8 from 24 to 256; waits until they are free.
template <int count> __device__ inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> __device__ inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// What store_shared() has written, at an address of shared_address(), which takes one register.
__device__ inline unsigned get(unsigned from) {
    unsigned number;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(number) : "r"(from) : "memory");
    return number;
}

// Named barriers (bar) of two warpgroups, which arrive, waiting or not. Number 0 is that of __syncthreads().
__device__ inline void turn_wait(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }
__device__ inline void turn_pass(int barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }

// The turns in which warpgroups begin products: each as often as the others.
template <int GROUPS> struct Turns {
    const int group;
    bool first = group == 0;
    __device__ inline void begin() {
        if (!first) turn_wait(1 + group);  // with the warpgroup before
        first = false;
    }
    __device__ inline void end() const { turn_pass(1 + (group + 1) % GROUPS); }
    // Takes the last turn that was passed on.
    __device__ inline void finish() const {
        if (group == 0 && !first) turn_wait(1);
    }
};

// The lower half of wgmma's descriptor of a tile in shared memory, in units of 16 bytes: bits 0 to 13 the
// address, bits 16 to 29 `next`, the distance of the next columns of a wider B.
__device__ inline unsigned tile_at(unsigned address, int next) {
    return address >> 4 | (unsigned)(next >> 4) << 16;
}
// The upper half: bits 0 to 13 the bytes from 8 rows to the next 8, in 16 bytes; bits 30 and 31 the swizzle, 1
// for 128 bytes and 2 for 64.
constexpr unsigned swizzled(int row) { return (8 * row >> 4) | (row == 128 ? 1u : 2u) << 30; }
constexpr unsigned SWIZZLED = swizzled(box_row);

// wgmma.fence: orders the registers that other instructions wrote before the products that use them.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group: the products that the warpgroup has started since the last one.
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns once at most `pending` of the committed groups are under way.
template <int pending> __device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Ties the values of registers to this place: the compiler does not know when wgmma reads and writes them.
template <int n> __device__ inline void hold(float (&x)[n]) {
    UNROLLED(i, n) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n> __device__ inline void hold(unsigned (&x)[n]) {
    UNROLLED(i, n) asm volatile("" : "+r"(x[i])::"memory");
}
// Gives registers to sums that begin anew: what they had before is not kept until here.
template <int n> __device__ inline void renew(float (&x)[n]) {
    UNROLLED(i, n) asm volatile("" : "=f"(x[i])::"memory");
}
__device__ inline void hold(int& x) { asm volatile("" : "+r"(x)); }

// Inline assembly names its operands %0, %1, ...: TEN() is %0 to %9, TEN(1) is %10 to %19, and TWO(t) to
// EIGHT(t) are the first of a ten. F4(i) to F64(i) are the operands themselves, from sum[i] on.
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define TWO(t) "%" #t "0,%" #t "1"
#define FOUR(t) TWO(t) ",%" #t "2,%" #t "3"
#define SIX(t) FOUR(t) ",%" #t "4,%" #t "5"
#define EIGHT(t) SIX(t) ",%" #t "6,%" #t "7"
#define TENS_4 TEN() "," TEN(1) "," TEN(2) "," TEN(3)
#define TENS_7 TENS_4 "," TEN(4) "," TEN(5) "," TEN(6)
#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define F16(i) F8(i), F8(i + 8)
#define F32(i) F16(i), F16(i + 16)
#define F64(i) F32(i), F32(i + 32)

// wgmma.mma_async: starts C (64 x N) <- A (64 x 16) B (16 x N) + C, where C is `sum`; 16-bit factors, float32
// sums. Which threads hold what: thread w of the warpgroup has the rows r = 16 (w / 32) + w % 32 / 4 and r + 8.
// With c = 2 (w % 4), it has two of each 8 columns:
//     sum[4 i], sum[4 i + 1]      = C[r][8 i + c, 8 i + c + 1]
//     sum[4 i + 2], sum[4 i + 3]  = C[r + 8][8 i + c, 8 i + c + 1]
//     a[0], a[1]                  = A[r][c, c + 1], A[r + 8][c, c + 1]
//     a[2], a[3]                  = A[r][c + 8, c + 9], A[r + 8][c + 8, c + 9]
// So two neighbouring groups of sum, rounded in pairs, are an A: P needs no exchange.
//   multiply       A and B are in shared memory, the 16 along the rows of both (K-major). add = 0 drops sum.
//   multiply_from  A is in registers; B is in shared memory, 16 rows of N (MN-major).
//   multiply_down  A is in shared memory, in rows of 128 bytes: K-major, or MN-major if `turned` is 1. B is as
//   that
//                  of multiply_from.
// After `add` come the signs of A and B, and 1 for each MN-major factor in shared memory. NAMES: the operands
// of sum, the last arguments; A to F: the numbers of the other operands.
#define PRODUCT(N, NAMES, A, B, C, D, E, F, ...)                                                          \
    __device__ inline void multiply(float (&sum)[N / 2], unsigned a, unsigned b, int add) {               \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #C                                          \
                     ", 0;\n"                                                                             \
                     ".reg .b64 a, b;\nmov.b64 a, {%" #A ", %" #D "};\nmov.b64 b, {%" #B ", %" #D         \
                     "};\n"                                                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" NAMES           \
                     "}, a, b, "                                                                          \
                     "add, 1, 1, 0, 0;\n}"                                                                \
                     : __VA_ARGS__                                                                        \
                     : "r"(a), "r"(b), "r"(add), "n"(SWIZZLED)                                            \
                     : "memory");                                                                         \
    }                                                                                                     \
    __device__ inline void multiply_from(float (&sum)[N / 2], const unsigned* a, unsigned b) {            \
        asm volatile(                                                                                     \
            "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n"                                                \
            ".reg .b64 b;\nmov.b64 b, {%" #E ", %" #F                                                     \
            "};\n"                                                                                        \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" NAMES "}, {%" #A ",%" #B \
            ",%" #C ",%" #D "}, b, add, 1, 1, 1;\n}"                                                      \
            : __VA_ARGS__                                                                                 \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(SWIZZLED)                           \
            : "memory");                                                                                  \
    }                                                                                                     \
    template <int turned>                                                                                 \
    __device__ inline void multiply_down(float (&sum)[N / 2], unsigned a, unsigned b, int add) {          \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #C                                          \
                     ", 0;\n"                                                                             \
                     ".reg .b64 a, b;\nmov.b64 a, {%" #A ", %" #D "};\nmov.b64 b, {%" #B ", %" #E         \
                     "};\n"                                                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" NAMES           \
                     "}, a, b, "                                                                          \
                     "add, 1, 1, %" #F ", 1;\n}"                                                          \
                     : __VA_ARGS__                                                                        \
                     : "r"(a), "r"(b), "r"(add), "n"(swizzled(128)), "n"(SWIZZLED), "n"(turned)           \
                     : "memory");                                                                         \
    }

PRODUCT(32, TEN() "," SIX(1), 16, 17, 18, 19, 20, 21, F16(0))
PRODUCT(64, TEN() "," TEN(1) "," TEN(2) "," TWO(3), 32, 33, 34, 35, 36, 37, F32(0))
PRODUCT(80, TENS_4, 40, 41, 42, 43, 44, 45, F32(0), F8(32))
PRODUCT(112, TENS_4 "," TEN(4) "," SIX(5), 56, 57, 58, 59, 60, 61, F32(0), F16(32), F8(48))
PRODUCT(128, TENS_4 "," TEN(4) "," TEN(5) "," FOUR(6), 64, 65, 66, 67, 68, 69, F64(0))
PRODUCT(192, TENS_7 "," TEN(7) "," TEN(8) "," SIX(9), 96, 97, 98, 99, 100, 101, F64(0), F32(64))
PRODUCT(256, TENS_7 "," TEN(7) "," TEN(8) "," TEN(9) "," TEN(10) "," TEN(11) "," EIGHT(12), 128, 129, 130, 131,
        132, 133, F64(0), F64(64))

// stmatrix of four 8 x 8, transposed: the lane's word n is [2t, 2t + 1][g] of matrix n, whose row i is at the
// address that lane 8 n + i gives.
__device__ inline void store_transposed(unsigned row, const unsigned* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// The same, not transposed: the lane's word n is [g][2t, 2t + 1] of matrix n.
__device__ inline void store_matrices(unsigned row, const unsigned* x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Adds four floats to global memory, where 16 bytes begin at `to`.
__device__ inline void add_global(float* to, const float* x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}

// What the thread has stored to shared memory is there for wgmma and the copy engine, once a barrier says so.
__device__ inline void stores_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Transposes 4 x 4 words in the four threads of a quad. Before, word n of a thread is its piece of group n of 8
// columns. After, thread t has the four pieces of group t, 16 bytes side by side.
__device__ inline void transpose_quad(unsigned (&word)[4]) {
    const auto swap = [&](int a, int b, int far) {  // word[b] with the word[a] of the next thread
        const bool upper = threadIdx.x & far;
        const unsigned other = __shfl_xor_sync(~0u, upper ? word[a] : word[b], far);
        (upper ? word[a] : word[b]) = other;
    };
    swap(0, 1, 1), swap(2, 3, 1);
    swap(0, 2, 2), swap(1, 3, 2);
}

// Rounds and stores `columns` sums times `factor` of the row r + 8 h, at `to`, which all threads of a quad
// call.
template <int columns, int n>
__device__ inline void store_row(Element* to, const float (&sum)[n], int h, float factor, bool inside) {
    UNROLLED(b, n / 16) {
        unsigned word[4];
        UNROLLED(i, 4) {
            const int c = 16 * b + 4 * i + 2 * h;
            word[i] = pack(sum[c] * factor, sum[c + 1] * factor);
        }
        transpose_quad(word);
        const int column = 32 * b + threadIdx.x % 4 * 8;
        if (inside && column < columns) *(uint4*)(to + column) = make_uint4(word[0], word[1], word[2], word[3]);
    }
}
