// generation/csrc/cuda/ptx.h, without PTX.
#pragma once

using Barrier = unsigned long long;

inline unsigned char* shared_memory() { return emulated::block().shared; }
inline unsigned rank() { return emulated::current->block % BLOCKS; }
inline void sync_cluster() { emulated::meet(emulated::clusters[emulated::current->block / BLOCKS]); }

inline unsigned char* at(const Barrier& barrier) {
    return reinterpret_cast<unsigned char*>(const_cast<Barrier*>(&barrier));
}

inline void initialise(Barrier& barrier) {
    const emulated::Bits bits{0, 1, 0};
    std::memcpy(at(barrier), &bits, sizeof bits);
}

inline void arrive(Barrier& barrier, int bytes) {
    emulated::change(at(barrier), [&](emulated::Bits& bits) { bits.bytes += bytes, bits.pending--; });
}

inline void wait(Barrier& barrier, unsigned parity) {
    for (;;) {
        emulated::Bits bits;
        std::memcpy(&bits, at(barrier), sizeof bits);
        if (static_cast<unsigned>(bits.parity) != parity) break;
        emulated::yield();
    }
    __syncwarp();
}

inline unsigned char* in_block(const void* p, unsigned block) {
    using namespace emulated;
    const int first = current->block / BLOCKS * BLOCKS;
    return blocks[first + block].shared + (static_cast<const unsigned char*>(p) - emulated::block().shared);
}

inline long long some_time_later() {
    return emulated::rounds + emulated::chance() % (emulated::chance() % 8 == 0 ? 60 : 4);
}

template <int n> void store_async(const void* p, unsigned block, const float (&x)[n], const Barrier& barrier) {
    emulated::Store store{in_block(p, block), in_block(&barrier, block), nullptr, {}, 4 * n, some_time_later()};
    std::memcpy(store.bytes, x, sizeof x);
    emulated::stores.push_back(store);
}

inline void publish() {}
inline void copy_to_block(const void* p, unsigned block, int bytes, const Barrier& barrier) {
    emulated::stores.push_back(
        {in_block(p, block), in_block(&barrier, block), p, {}, bytes, some_time_later()});
}

inline void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void wait_for_copies() {}

inline void announce(unsigned* arrived, unsigned count = 1) {
    __syncthreads();
    if (emulated::current->thread == 0) *arrived += count, emulated::progress = emulated::rounds;
}
inline void await(const unsigned* arrived, unsigned count) {
    while (emulated::current->thread == 0 && *arrived < count) emulated::yield();
    __syncthreads();
}
