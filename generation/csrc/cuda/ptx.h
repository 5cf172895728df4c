// PTX of the kernels: clusters' shared memory, barriers that count stored bytes, a barrier of all blocks.
#pragma once

#include "call.h"
#include "mbarrier.h"

extern __shared__ __align__(128) unsigned char memory[];

// The block's shared memory.
__device__ inline unsigned char* shared_memory() { return memory; }

// The block's number in its cluster.
__device__ inline unsigned rank() {
    unsigned r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

// Waits for all threads of the cluster; what they stored before is seen after it.
__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// An mbarrier. A phase ends when arrive() was called and the bytes it expects were stored, in either order.
using Barrier = unsigned long long;

// Call sync_cluster() before others store.
__device__ inline void initialise(Barrier& barrier) {
    barrier_init(shared_address(&barrier), 1);
    barrier_init_done();
}
__device__ inline void arrive(Barrier& barrier, int bytes) { barrier_expect(shared_address(&barrier), bytes); }
// Waits for the end of the barrier's phase with this parity; by whole warps.
__device__ inline void wait(Barrier& barrier, unsigned parity) {
    barrier_wait(shared_address(&barrier), parity);
    __syncwarp();
}

// The address, in another block's shared memory, of what is at `p` in the own.
__device__ inline unsigned in_block(const void* p, unsigned block) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(block));
    return address;
}

// Stores 1, 2 or 4 numbers at the place of `p` in another block, whose barrier counts them.
template <int n>
__device__ inline void store_async(const void* p, unsigned block, const float (&x)[n], const Barrier& barrier) {
#define ST_ASYNC "st.async.shared::cluster.mbarrier::complete_tx::bytes"
    const unsigned to = in_block(p, block), counted = in_block(&barrier, block);
    if constexpr (n == 1)
        asm volatile(ST_ASYNC ".f32 [%0], %2, [%1];" ::"r"(to), "r"(counted), "f"(x[0]) : "memory");
    else if constexpr (n == 2)
        asm volatile(ST_ASYNC ".v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to), "r"(counted), "f"(x[0]), "f"(x[1])
                     : "memory");
    else
        asm volatile(ST_ASYNC ".v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to), "r"(counted), "f"(x[0]),
                     "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
}

// Makes what the thread stored in shared memory known to copies that are begun after a barrier.
__device__ inline void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies bytes, a multiple of 16, at `p` to the same place in another block, whose barrier counts them.
__device__ inline void copy_to_block(const void* p, unsigned block, int bytes, const Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            in_block(p, block)),
        "r"(shared_address(p)), "r"(bytes), "r"(in_block(&barrier, block))
        : "memory");
}

__device__ inline void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Counts what blocks have done, and waits until it is so much. All blocks run at a time. What a block stored
// before is seen by those that waited. Called by all threads.
__device__ inline void announce(unsigned* arrived, unsigned count = 1) {
    __syncthreads();
    if (threadIdx.x > 0) return;
    __threadfence();
    atomicAdd(arrived, count);
}
__device__ inline void await(const unsigned* arrived, unsigned count) {
    unsigned seen = threadIdx.x > 0 ? count : 0;
    while (seen < count) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    __syncthreads();
}
