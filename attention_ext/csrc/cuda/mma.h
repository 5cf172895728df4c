// The instructions of step 5: copies that do not wait, matrices between shared memory and registers, and
// products on the tensor cores. All are PTX since sm_80.
//
// Who holds what (PTX, "matrix fragments"): lane = 4 g + t. In every product C += A B
//   C (16 x 8):   c0 c1 = C[g][2t, 2t + 1],      c2 c3 = C[g + 8][2t, 2t + 1]
//   16-bit:       A (16 x 16): a0 = A[g][2t, 2t + 1], a1 = A[g + 8][2t, 2t + 1], a2 a3 = the same 8 columns on
//                 B (16 x 8):  b0 = B[2t, 2t + 1][g], b1 = B[2t + 8, 2t + 9][g]
//   tf32:         A (16 x 8):  a0 = A[g][t], a1 = A[g + 8][t], a2 = A[g][t + 4], a3 = A[g + 8][t + 4]
//                 B (8 x 8):   b0 = B[t][g], b1 = B[t + 4][g]
#pragma once

__device__ inline unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// 16 bytes to shared memory, of which the first `bytes` are read and the others are 0.
__device__ inline void copy_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ inline void copy_async(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN>  // wait until at most this many groups of copies are under way
__device__ inline void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
}

__device__ inline uint4 load_shared(unsigned from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from));
    return x;
}
// The same, loaded again at each use: the compiler does not keep it in registers from one use to the next.
__device__ inline uint4 reload_shared(unsigned from) {
    uint4 x;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from));
    return x;
}
__device__ inline void store_shared(unsigned to, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ inline void store_shared(unsigned to, unsigned x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

#if FORMAT != FP32

// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row));
}
__device__ inline void load_transposed(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row));
}

#if FORMAT == FP16
#define MMA_16 "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
#define MMA_16 "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
// c += a b, 16 x 8 += 16 x 16 16 x 8
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm(MMA_16 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else

// x = high + low, both tf32: 11 significant bits each. The tensor cores ignore the other bits of `low`.
// An infinite x gives low = NaN, and so do numbers that round to infinity.
__device__ inline void split(float x, unsigned& high, unsigned& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// c += a b, 16 x 8 += 16 x 8 8 x 8
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
