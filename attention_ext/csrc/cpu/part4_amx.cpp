// Part 4, flash, in bfloat16 with AMX: tiles of 16 x 32 numbers are multiplied by one instruction.
//
//   V <- V^T in tiles, once for each head
//   for each batch, head, tile i of Br queries, over all threads:
//       for each tile j of Bc keys, strip of 32 queries:
//           for each step of some keys:
//               for each 32 of them:  S^T <- Kj Qi^T;  P <- 2^(scale S - m), rounded;  l <- l + rowsum(P)
//               O^T <- O^T + V^T P^T
//       O <- diag(1 / l) O;  lse <- m + log(l)
//
// amx_packing.h packs the operands, amx_strip.h has the loop over the keys of a strip. K is read in place. Q
// and P are held in pairs, as the instruction wants its right operand.
//
// Shapes: Q and K tiles (16, 32), V^T tiles (16 features, 32 keys), S and O tiles (16, 16) in float32.
// Scratch: V of all heads; the last 32 rows of K, or all of it if d is not a multiple of 32; threads x (Q and O
// of Br queries, S of 32 keys, P of a step). What it improves: the two products of part4_flash.cpp take a sixth
// of the time, so that the exponentials, which AMX does not help with, are most of what is left.
#include "cpu/part4_amx.h"

#include "cpu/tiles_of_amx.h"

#if defined(TILES_OF_AMX) && defined(__AVX512BF16__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BW__)

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/amx_packing.h"
#include "cpu/amx_strip.h"
#include "scratch.h"
#include "simd/simd.h"
#include "threads.h"

namespace amx {
namespace {

// Queries of a tile: whole strips.
int64_t tile_queries(const AttentionSizes& a) { return round_up(a.Br, BLOCK); }

// The scratch of a call: V^T of all heads in tiles, with the largest finite magnitude of each block, the copied
// rows of K, and each thread's own.
struct Shared {
    uint32_t *V, *K;
    float* largest;
    std::vector<TileScratch> tiles;  // each thread's
    int64_t taken;                   // of the scratch

    Shared(const AttentionSizes& a, const Sizes& n, Scratch scratch) {
        const int64_t heads = a.B * a.H;
        V = reinterpret_cast<uint32_t*>(scratch.take(heads * n.values()));
        K = reinterpret_cast<uint32_t*>(scratch.take(heads * n.copied_keys()));
        largest = scratch.take(heads * n.blocks());
        for (int thread = 0; thread < a.threads; thread++) tiles.emplace_back(n, tile_queries(a), scratch);
        taken = scratch.taken();
    }

    void pack(const AttentionOf<Bf16>& a, const Sizes& n, int64_t head, int64_t block) const {
        uint32_t* values = V + head * n.values() + n.values_at(block);
        largest[head * n.blocks() + block] = pack_values(a, n, a.v_of(head), block, values);
        if (n.copied(block, a.Nk))
            copy_keys(a, n, a.k_of(head), block, K + head * n.copied_keys() + n.copy_at(block));
    }

    Keys keys(const AttentionOf<Bf16>& a, const Sizes& n, int64_t head) const {
        const float* of_blocks = largest + head * n.blocks();
        Keys keys;
        keys.K = a.k_of(head);
        keys.copied_K = K + head * n.copied_keys();
        keys.Vt = V + head * n.values();
        keys.largest = *std::max_element(of_blocks, of_blocks + n.blocks());
        return keys;
    }
};

// A tile of queries of a head, from i0 on.
template <bool LSE>
void attend_tile(const AttentionOf<Bf16>& a, const Sizes& n, const Shared& shared, int64_t head, int64_t i0,
                 const TileScratch& t) {
    const int64_t rows = std::min(tile_queries(a), a.Nq - i0), queries = round_up(rows, BLOCK);
    const Bf16* Qi = a.q_of(head) + i0 * a.q.row_stride;
    const Keys keys = shared.keys(a, n, head);

    configure();
    for (int64_t r0 = 0; r0 < queries; r0 += PAIRS)
        for (int64_t c = 0; c < n.d; c += BLOCK)
            pack_queries(Qi + r0 * a.q.row_stride + c, a.q.row_stride, rows - r0, a.d - c,
                         t.Q + (r0 / BLOCK * n.d + c) * BLOCK / 2 + r0 % BLOCK / PAIRS * HALF);
    std::fill_n(t.O, queries * n.d, 0.0f);
    std::fill_n(t.m, queries, -INFINITY);
    std::fill_n(t.l, queries, 0.0f);
    std::fill_n(t.all, queries, 0.0f);

    const int64_t blocks = round_up(a.Bc, BLOCK) / BLOCK;  // of a tile of keys
    for (int64_t j0 = 0; j0 < n.blocks(); j0 += blocks) {
        for (int64_t r0 = 0; r0 < queries; r0 += BLOCK) {
            const Strip<LSE> strip(a, n, keys, t, r0, i0 + r0);
            const int64_t end = std::min(j0 + blocks, strip.blocks());
            if (j0 < end) strip.attend(j0, end);
        }
    }
    release();

    Bf16* out = a.out + (head * a.Nq + i0) * a.d;
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK, out += BLOCK * a.d) {
        const int64_t some = std::min(BLOCK, rows - r0);
        for (int64_t r = 0; r < some; r++) {
            t.correction[r] = 1 / t.l[r0 + r];
            if (LSE) a.lse[head * a.Nq + i0 + r0 + r] = t.m[r0 + r] * SIMD_LN2 + std::log(t.all[r0 + r]);
        }
        simd::scale_columns({t.O + r0 * n.d, BLOCK}, a.d, some, t.correction);
        for (int64_t c = 0; c < a.d; c += BLOCK) {
            const int64_t features = std::min(BLOCK, a.d - c);
            simd::transpose({t.S, BLOCK}, {t.O + r0 * n.d + c * BLOCK, BLOCK}, features, some, 1.0f);
            for (int64_t r = 0; r < some; r++) convert(out + r * a.d + c, t.S + r * BLOCK, features);
        }
    }
}

}  // namespace

// Fewer queries than a strip would leave most of its lanes idle. A copy of an expanded V might have more
// numbers than 63 bits count.
bool takes(const AttentionOf<Bf16>& a) {
    constexpr double MOST_NUMBERS = 0x1p60;
    const Sizes n(a);
    const double heads = static_cast<double>(a.B) * static_cast<double>(a.H);
    const bool countable = heads * static_cast<double>(n.keys) * static_cast<double>(n.d) < MOST_NUMBERS;
    return a.Nq >= BLOCK && countable && simd::may_use_tiles() && available();
}

int64_t scratch(const AttentionOf<Bf16>& a) {
    const Sizes n(a);
    return Shared(a, n, Scratch()).taken;
}

void attention(const AttentionOf<Bf16>& a, float* scratch) {
    constexpr int64_t TOGETHER = 8;  // blocks that are packed by one thread
    const Sizes n(a);
    const Shared shared(a, n, Scratch(scratch));
    const int64_t heads = a.B * a.H, tile = tile_queries(a), tiles = (a.Nq + tile - 1) / tile;

    for_each_item(heads, (n.blocks() + TOGETHER - 1) / TOGETHER, a.threads,
                  [&](int64_t head, int64_t item, int) {
                      const int64_t first = item * TOGETHER, end = std::min(first + TOGETHER, n.blocks());
                      for (int64_t block = first; block < end; block++) shared.pack(a, n, head, block);
                  });
    for_each_item(heads, tiles, a.threads, [&](int64_t head, int64_t item, int thread) {
        const int64_t i0 = (tiles - 1 - item) * tile;  // causal: the longest first
        (a.lse ? attend_tile<true> : attend_tile<false>)(a, n, shared, head, i0, shared.tiles[thread]);
    });
}

}  // namespace amx

#else

namespace amx {

bool takes(const AttentionOf<Bf16>&) { return false; }
int64_t scratch(const AttentionOf<Bf16>&) { return 0; }
void attention(const AttentionOf<Bf16>&, float*) {}

}  // namespace amx

#endif
