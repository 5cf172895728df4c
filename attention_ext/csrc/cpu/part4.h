// What the files of part 4 share: a tile of queries, and the keys in splits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "buffer.h"
#include "parts.h"
#include "simd/simd.h"

namespace part4 {

// each(j, r, n) for the keys j .. j + n - 1 and the queries from r on, of which query r sees the first `first +
// r` keys: all queries for the keys before the staircase, then fewer queries with every W keys.
template <class Each> inline void staircase(int64_t keys, int64_t first, int64_t W, const Each& each) {
    each(0, 0, std::min(keys, first + W));
    for (int64_t r = W; first + r < keys; r += W) each(first + r, r, std::min(W, keys - first - r));
}

// A tile of Br queries from i0 on: FlashAttention-2's Algorithm 1, lines 4 to 15, in part4_flash.cpp.
class Tile {
  public:
    static int64_t floats(const AttentionSizes&);  // scratch
    Tile(const AttentionSizes&, int64_t head, int64_t i0, Scratch scratch);

    int64_t rows() const { return n; }
    Range seen() const { return a.keys(head, i0, n); }  // the keys that any of its queries may see
    int64_t keys() const { return seen().end; }
    // The end of the keys that attend(j0, ...) reads: a strip's diagonal may extend beyond the tile of keys.
    int64_t end_of_keys(int64_t j0) const;

    // Room for (rows(), d) floats: a tile of Q before load(), O after the last attend().
    float* room_for_Q() const { return Ot; }
    float* room_for_O() const { return Qt; }

    void load(simd::ConstMatrix Qi);                                      // lines 4, 5
    void attend(int64_t j0, simd::ConstMatrix Kj, simd::ConstMatrix Vj);  // lines 7 to 10
    void store(float* Oi, float* lse);                                    // lines 12 to 15; lse may be null

  private:
    int64_t last_step(int64_t r0) const;
    void strip(int64_t r0, int64_t j, const float* K, int64_t ldK, const float* V, int64_t ldV, int64_t keys,
               int64_t first);

    const AttentionSizes& a;
    int64_t head, i0, n, padded, R;
    float *Qt, *Ot, *St, *m, *l, *correction;
    int64_t taken;  // of the scratch
};

// Attention of a head's tile of queries from i0 on; `out` and `lse` are its rows. Scratch: tile_floats().
inline int64_t tile_floats(const Attention& a) { return Tile::floats(a); }
void attend_tile(const Attention&, int64_t head, int64_t i0, float* scratch, float* out, float* lse);
int64_t tile_floats(const AttentionOf<Bf16>&);
template <class Out>
void attend_tile(const AttentionOf<Bf16>&, int64_t head, int64_t i0, float* scratch, Out* out, float* lse);

// flash_decoding.cpp in either format: queries one at a time or in tiles, keys whole or in splits.
template <class Element> int64_t split_scratch(const AttentionOf<Element>&);
template <class Element> void split_attention(const AttentionOf<Element>&, float* scratch);

}  // namespace part4

// With AMX, Intel's instructions that multiply tiles of matrices: part4_amx.cpp.
namespace amx {

// Whether this processor, its kernel, the build and the shape permit it. Asks the kernel once.
bool takes(const AttentionOf<Bf16>&);

int64_t scratch(const AttentionOf<Bf16>&);  // in floats
void attention(const AttentionOf<Bf16>&, float* scratch);

}  // namespace amx
