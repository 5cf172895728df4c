// mbarriers (since sm_90): 8 bytes of shared memory at a shared_address(). A phase ends when all arrivals and
// all announced bytes are in; parities 0 and 1 alternate. Source: PTX ISA, 'mbarrier'.
#pragma once

// One thread sets the number of arrivals of each phase.
__device__ inline void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Shows the initialised barriers to the copy engine; a __syncthreads() follows.
__device__ inline void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives; what the thread read and wrote before is done for those that wait.
__device__ inline void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces the bytes that copies will bring in this phase.
__device__ inline void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits for the end of this parity's phase; on a new barrier parity 1 has ended. try_wait may give up.
__device__ inline void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
