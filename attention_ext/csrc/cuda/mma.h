// The PTX instructions of kernel 5: asynchronous copies, loads of matrices from shared memory to registers, and
// products on the tensor cores. All exist since sm_80; sm_75 has ldmatrix and a product of half the size in
// float16. All lanes of a warp execute ldmatrix and mma together.
//
// Source: PTX ISA, 'Instruction Set': 'cp.async', and 'Warp Level Matrix Multiply-Accumulate Instructions'.
//
// Which lanes hold what in C += A B, with lane = 4 g + t (g: 0 to 7, t: 0 to 3). X[i][j, j + 1] is two numbers,
// in 16-bit formats the lower and the upper half of one register.
//     C (16 x 8), float32     c0 c1 = C[g][2t, 2t + 1]            c2 c3 = C[g + 8][2t, 2t + 1]
//     A (16 x 16), 16-bit     a0 = A[g][2t, 2t + 1]               a1 = A[g + 8][2t, 2t + 1]
//                             a2 = A[g][2t + 8, 2t + 9]           a3 = A[g + 8][2t + 8, 2t + 9]
//     B (16 x 8), 16-bit      b0 = B[2t, 2t + 1][g]               b1 = B[2t + 8, 2t + 9][g]
//     A (16 x 8), tf32        a0 = A[g][t]                        a1 = A[g + 8][t]
//                             a2 = A[g][t + 4]                    a3 = A[g + 8][t + 4]
//     B (8 x 8), tf32         b0 = B[t][g]                        b1 = B[t + 4][g]
// Two neighbouring tiles of C, rounded in pairs, are the registers of a 16-bit A: P needs no exchange.
#pragma once

// f(n, row, piece) for the pieces that the thread copies of `rows` rows of `pieces` pieces; n counts them.
template <int rows, int pieces, class F> __device__ inline void each_piece(const F& f) {
    UNROLLED(n, (rows * pieces + THREADS - 1) / THREADS) {
        const int first = n * THREADS, at = first + threadIdx.x;
        if (rows * pieces % THREADS != 0 && at >= rows * pieces) break;
        if constexpr (THREADS % pieces == 0)
            f(n, first / pieces + threadIdx.x / pieces, threadIdx.x % pieces);
        else
            f(n, at / pieces, at % pieces);
    }
}

#if __CUDA_ARCH__ >= 800
// cp.async: copies the first `bytes` of 16 to shared memory, the others become 0. .cg bypasses L1.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
// Ends a group: all copies that this thread has started since the last one.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most OPEN of the thread's groups are under way. Other threads' copies need a barrier as well.
template <int OPEN> __device__ inline void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
}
#else
__device__ inline void close_group() {}
template <int OPEN> __device__ inline void wait_groups() {}
#endif

// bar: a barrier of two warps, which one may pass without waiting.
__device__ inline void meet_pair(int barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }
__device__ inline void arrive_at_pair(int barrier) {
    asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory");
}

__device__ inline void load_shared(unsigned (&x)[4], unsigned from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from));
}
// The same, loaded anew at each use: `volatile` keeps the compiler from holding it in registers.
__device__ inline void reload_shared(unsigned (&x)[4], unsigned from) {
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from));
}
__device__ inline void store_shared(unsigned to, const unsigned (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                 "r"(x[3])
                 : "memory");
}
__device__ inline void store_shared(unsigned to, uint4 x) { store_shared(to, {x.x, x.y, x.z, x.w}); }
__device__ inline void store_shared(unsigned to, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// ldmatrix of four 8 x 8: lane i gives row i % 8 of matrix i / 8; lane 4 g + t gets [g][2t, 2t + 1] of each.
__device__ inline void load_matrices(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row));
}
// The same transposed: the lane gets [2t, 2t + 1][g], as B of a product has it.
__device__ inline void load_transposed(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row));
}

// mma.sync: c (16 x 8) += a (16 x 16) b (16 x 8), 16-bit factors, float32 sums; on sm_75 two halves.
__device__ inline void multiply_16bit(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ < 800
    UNROLLED(half, 2)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, "
            "%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half ? b1 : b0));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND
        ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// x = high + low, both tf32: the upper 19 bits of a float32. Adding 0x1000, half of the last kept bit,
// rounds; the mask clears the other 13. Where x or its rounding is infinite, low is NaN.
__device__ inline void split(float x, unsigned& high, unsigned& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}
// `high` may be x.
__device__ inline void split(const unsigned (&x)[4], unsigned (&high)[4], unsigned (&low)[4]) {
    UNROLLED(e, 4) split(__uint_as_float(x[e]), high[e], low[e]);
}

// mma.sync: c (16 x 8) += a (16 x 8) b (8 x 8), tf32 factors, float32 sums.
__device__ inline void multiply_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
