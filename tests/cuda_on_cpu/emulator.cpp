// Runs a KERNEL of generation/csrc/cuda on the CPU: each CUDA thread is a fiber, and fibers change at every
// point where threads wait for each other. The order of the blocks is random, blocks pause at random, and what
// a block stores into another one arrives at random times, as a GPU may do it.
//
// Built with the kernel's macros; numbers.h, mma.h and ptx.h beside it stand for CUDA's.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

namespace emulated {

// A point where `size` threads wait for each other.
struct Meeting {
    int size, arrived = 0;
    unsigned turn = 0;
};

struct Warp {
    Meeting meeting{32};
    uint64_t values[2][32];  // in turns: the next exchange begins while others still read
};

struct Block {
    Meeting meeting{THREADS};
    std::vector<Warp> warps{THREADS / 32};
    std::unique_ptr<unsigned char[]> memory{new unsigned char[SHARED_BYTES + 128]};
    unsigned char* shared = nullptr;
    long long asleep = 0;  // until this round
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool begun = false, ended = false;
    int block, thread;
};

struct Store {
    unsigned char *to, *barrier;
    const void* from;  // where a copy reads when it arrives; null: `bytes`
    unsigned char bytes[16];
    int count;
    long long due;  // round
};

constexpr size_t STACK = 64 << 10;
std::vector<Block> blocks;
std::vector<Meeting> clusters;
std::vector<Store> stores;
std::mt19937 chance;
Fiber* current;
jmp_buf scheduler;
unsigned first_block;        // the number of the first block that runs
long long rounds, progress;  // progress: the last round in which something happened

void yield() {
    if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void meet(Meeting& meeting) {
    const unsigned turn = meeting.turn;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0, meeting.turn++, progress = rounds;
    } else {
        while (meeting.turn == turn) yield();
    }
}

Block& block() { return blocks[current->block]; }
Warp& warp() { return block().warps[current->thread / 32]; }

// All lanes' numbers.
template <class T> const uint64_t* exchange(T x) {
    Warp& w = warp();
    uint64_t* values = w.values[w.meeting.turn % 2];
    values[current->thread % 32] = 0;
    std::memcpy(&values[current->thread % 32], &x, sizeof x);
    meet(w.meeting);
    return values;
}

template <class T> T from_lane(T x, int lane) {
    const uint64_t* values = exchange(x);
    std::memcpy(&x, &values[lane], sizeof x);
    return x;
}

template <class T, class Merge> T reduce(T x, const Merge& merge) {
    const uint64_t* values = exchange(x);
    for (int lane = 0; lane < 32; lane++) {
        T other;
        std::memcpy(&other, &values[lane], sizeof other);
        x = merge(x, other);
    }
    return x;
}

// The fields of a barrier.
struct Bits {
    int32_t bytes;    // expected less stored
    int16_t pending;  // arrivals
    int16_t parity;
};

template <class Change> void change(unsigned char* barrier, const Change& how) {
    Bits bits;
    std::memcpy(&bits, barrier, sizeof bits);
    how(bits);
    if (bits.pending == 0 && bits.bytes == 0) bits.pending = 1, bits.parity ^= 1, progress = rounds;
    std::memcpy(barrier, &bits, sizeof bits);
}

void deliver() {
    const auto later =
        std::partition(stores.begin(), stores.end(), [](const Store& s) { return s.due > rounds; });
    std::for_each(later, stores.end(), [](const Store& s) {
        std::memcpy(s.to, s.from ? s.from : s.bytes, s.count);
        change(s.barrier, [&](Bits& bits) { bits.bytes -= s.count; });
    });
    stores.erase(later, stores.end());
}

}  // namespace emulated

#define threadIdx (Index{static_cast<unsigned>(emulated::current->thread)})
#define blockIdx (Index{emulated::first_block + emulated::current->block})
#define gridDim (Index{static_cast<unsigned>(emulated::blocks.size())})

inline void __syncthreads() { emulated::meet(emulated::block().meeting); }
inline void __syncwarp() { emulated::exchange(0); }
template <class T> T __shfl_sync(unsigned, T x, int lane) { return emulated::from_lane(x, lane); }
template <class T> T __shfl_xor_sync(unsigned, T x, int far) {
    return emulated::from_lane(x, (emulated::current->thread % 32) ^ far);
}
template <class T> T __reduce_min_sync(unsigned, T x) {
    return emulated::reduce(x, [](T a, T b) { return std::min(a, b); });
}
template <class T> T __reduce_max_sync(unsigned, T x) {
    return emulated::reduce(x, [](T a, T b) { return std::max(a, b); });
}
inline unsigned __ballot_sync(unsigned, bool x) {
    return emulated::reduce(x ? 1u << emulated::current->thread % 32 : 0u,
                            [](unsigned a, unsigned b) { return a | b; });
}
inline int __clz(unsigned x) { return __builtin_clz(x); }
inline bool __all_sync(unsigned, bool x) { return __reduce_min_sync(~0u, static_cast<int>(x)); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline long long clock64() { return emulated::rounds; }
inline void atomicAdd(int* p, int x) { *p += x; }
inline float __log2f(float x) { return std::log2(x); }
inline int __ldcg(const int* p) { return *p; }
template <class To, class From> To bits_of(From x) {
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
    unsigned made = 0;
    for (int i = 0; i < 4; i++) made |= (bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return made;
}
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline double __longlong_as_double(long long x) { return bits_of<double>(x); }
inline long long __double_as_longlong(double x) { return bits_of<long long>(x); }
inline int __double2hiint(double x) { return static_cast<int>(bits_of<long long>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(bits_of<long long>(x)); }
inline double __hiloint2double(int high, int low) {
    return bits_of<double>(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}
using std::max;
using std::min;

#include KERNEL

extern "C" __attribute__((visibility("default"))) void begin_at(unsigned block) {
    emulated::first_block = block;
}

// Runs so many blocks; 1 if they wait forever, as seen after STUCK rounds.
extern "C" __attribute__((visibility("default"))) int run(const Work* work, int count, unsigned seed) {
    using namespace emulated;
    constexpr long long STUCK = 2000;
    static const Work* given;
    given = work;
    chance.seed(seed);
    blocks = std::vector<emulated::Block>(count);
    for (emulated::Block& b : blocks) {
        b.shared = b.memory.get() + (128 - reinterpret_cast<uintptr_t>(b.memory.get()) % 128);
        std::memset(b.shared, 0xff, SHARED_BYTES);  // NaN
    }
    clusters.assign(count / BLOCKS, Meeting{BLOCKS * THREADS});
    stores.clear();
    std::vector<Fiber> fibers(count * THREADS);
    const std::unique_ptr<unsigned char[]> stacks(new unsigned char[fibers.size() * STACK]);
    std::vector<int> order;
    for (int b = 0; b < count; b++) order.push_back(b);
    size_t ended = 0;
    for (rounds = progress = 0; ended < fibers.size(); rounds++) {
        if (rounds > progress + STUCK) return 1;
        deliver();
        std::shuffle(order.begin(), order.end(), chance);
        for (const int b : order) {
            if (blocks[b].asleep > rounds) continue;
            if (chance() % 64 == 0) blocks[b].asleep = rounds + chance() % 100;
            for (int t = 0; t < THREADS; t++) {
                Fiber& fiber = fibers[b * THREADS + t];
                if (fiber.ended) continue;
                current = &fiber;
                if (_setjmp(scheduler)) continue;
                if (fiber.begun) _longjmp(fiber.at, 1);
                fiber.begun = true, fiber.block = b, fiber.thread = t;
                getcontext(&fiber.start);
                fiber.start.uc_stack = {&stacks[(b * THREADS + t) * STACK], 0, STACK};
                makecontext(&fiber.start, reinterpret_cast<void (*)()>(+[] {
                    decode(*given);
                    current->ended = true;
                    _longjmp(scheduler, 1);
                }),
                            0);
                setcontext(&fiber.start);
            }
        }
        ended = std::count_if(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.ended; });
    }
    return 0;
}
