// What a block of cluster.cu holds in shared memory, and how the blocks exchange data.
//
// Macros beside those of decoder.h: BLOCKS of a cluster; TEAM, the warps that attend to a text together; STRIP,
// a lane's keys at a time; DRAFTS.
#pragma once

#include "decoder.h"
#include "ptx.h"

constexpr int TEAMS = WARPS / TEAM;           // teams of a block, which attend to a text each
constexpr int TOGETHER = DRAFTS ? TEXTS : 1;  // rows that see the same keys, which they load once
static_assert(TEAMS == 1 || !DRAFTS, "all warps attend to the rows of a text");

// A block collects its results for several texts before it sends them. Those of one text go at once.
constexpr bool COLLECTED = TEXTS > 1;
constexpr bool MERGED = TEAM > 1 || !COLLECTED;  // whether warps' results of attention are merged, then sent

// Rows of each matrix in a block's share, and of the head's, the last of which may be empty.
constexpr int SHARE = WIDTH / BLOCKS, QKV_ROWS = 3 * SHARE, FC_ROWS = 4 * SHARE;
constexpr int HEAD_ROWS = (VOCAB + BLOCKS - 1) / BLOCKS;

// Attention: a head's keys are split among blocks, and each split among the warps of a team, of which KEY_LANES
// lanes take a key. A unit is a split of a head; block b has the units b, b + BLOCKS ...
constexpr int SPLITS = most(1, BLOCKS / HEADS), UNITS = HEADS * SPLITS;
constexpr int OWN_UNITS = (UNITS + BLOCKS - 1) / BLOCKS;
constexpr int KEY_LANES = HEAD_DIM / 4, WARP_KEYS = LANES / KEY_LANES, SPLIT_KEYS = TEAM * WARP_KEYS;
constexpr int ROUND = SPLITS * SPLIT_KEYS;  // keys until a split's next ones

// The floats of a text's memory for one thing after the other: the warps' results of attention, the MLP's
// hidden numbers, the logits and the weights of the choice.
constexpr int LOGITS = BLOCKS * HEAD_ROWS, WEIGHTS = (LOGITS + 1) / 2 * 2;
constexpr int VARIOUS = (most(most(HIDDEN, TEAM* PARTIAL), WEIGHTS + 2 * VOCAB) + 3) / 4 * 4;

struct Layer {
    Weight qkv[QKV_ROWS][WIDTH], proj[SHARE][WIDTH], fc[FC_ROWS][WIDTH], out[SHARE][HIDDEN];
};
struct Weights : Model<Layer, Weight[HEAD_ROWS][WIDTH], SHARE> {};

constexpr int BARRIERS = 4;

// The result of a unit of attention: each text's output, not divided by its sum, and m and l.
struct __align__(16) Result {
    float output[TEXTS][HEAD_DIM], state[TEXTS][2];
};

struct __align__(16) Shared {
    Weights weights;
    float x[TEXTS][WIDTH], normed[TEXTS][WIDTH];
    float qkv[OWN_UNITS][TEXTS][3][HEAD_DIM];  // of the token that is read
    float various[TEXTS][VARIOUS];
    Result results[UNITS];
    double settings[SETTINGS];  // of the text whose token this block chooses
    int slot[TEXTS], length[TEXTS], token[TEXTS], next[TEXTS];
    Barrier barriers[BARRIERS];
#if CLOCKS
    long long cycles[PHASES], last;
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES && TEXTS <= BLOCKS, "engines/cuda.py counts the same");

__device__ inline Shared& own() { return *reinterpret_cast<Shared*>(shared_memory()); }

// The MLP's hidden numbers, which each block computes a share of.
__device__ inline float& hidden(int t, int k) {
    return reinterpret_cast<float*>(own().various)[(k / FC_ROWS * TEXTS + t) * FC_ROWS + k % FC_ROWS];
}

// Where a block's threads are in the sequence of phases that exchange data.
struct Exchange {
    unsigned turn = 0;

    __device__ Barrier& barrier() const { return own().barriers[turn % BARRIERS]; }

    // Expects so many bytes from now to the next wait(); called by all threads.
    __device__ void expect(int bytes) const {
        if (threadIdx.x == 0) arrive(barrier(), bytes);
    }

    __device__ void wait(Phase phase) {
        count(own(), phase);
        ::wait(barrier(), turn / BARRIERS % 2);
        turn++;
        count(own(), WAITING);
    }

    // Stores numbers at the place of `p`, which is in the own shared memory, in another block's.
    template <int n> __device__ void store(const void* p, unsigned block, const float (&x)[n]) const {
        store_async(p, block, x, barrier());
    }
    __device__ void store(const void* p, unsigned block, float x) const {
        const float one[1] = {x};
        store(p, block, one);
    }

    // Into all blocks, by `lanes` lanes, of which this is one.
    template <int n>
    __device__ void store_to_all(const void* p, const float (&x)[n], int lane, int lanes) const {
        for (unsigned block = lane; block < BLOCKS; block += lanes) store(p, block, x);
    }

    // Copies so many bytes at `p`, which all threads have stored, to the other blocks, where nothing changes
    // them before all blocks have them.
    __device__ void copy_to_others(const void* p, int bytes) const {
        publish();
        __syncthreads();
        if (threadIdx.x < BLOCKS && threadIdx.x != rank()) copy_to_block(p, threadIdx.x, bytes, barrier());
    }

    // Stores the collected numbers of each text, (texts, count), `copies` times. `run` of them stay together.
    // to(text, number, copy, store) calls store with the place and the block.
    template <int count, int run, class To>
    __device__ void store_collected(const float* collected, int texts, int copies, const To& to) const {
        constexpr int n = run % 4 == 0 ? 4 : 1;
        __syncthreads();
        for (int i = threadIdx.x; i < texts * (count / n) * copies; i += THREADS) {
            const int copy = i % copies, number = i / copies % (count / n) * n, t = i / copies / (count / n);
            float x[n];
            UNROLLED(e, n) x[e] = collected[t * count + number + e];
            to(t, number, copy, [&](const float* p, unsigned block) { store(p, block, x); });
        }
    }
};
