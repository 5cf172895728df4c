// Part 4, flash, in bfloat16: part4_flash.cpp's tiles, with Q, K, V widened to float a tile at a time.
//
// Scratch of a thread: a tile, and 2 (Bc + STEP + panel) d floats. See part4_amx.cpp and flash_decoding.cpp.
#include <algorithm>

#include "cpu/part4.h"
#include "parts.h"

namespace part4 {
namespace {

int64_t most_keys(const AttentionSizes& a) { return a.Bc + STEP + simd::panel(); }

// Rows first .. end - 1 of X as floats, in `room`.
simd::ConstMatrix widened_rows(const MatricesOf<Bf16>& X, const Bf16* of_head, int64_t first, int64_t end,
                               int64_t d, float* room) {
    for (int64_t i = first; i < end; i++) convert(room + (i - first) * d, of_head + i * X.row_stride, d);
    return {room, d};
}

// Tiles of K and V are copied, so their size is bounded: an expanded tensor's could exceed memory.
AttentionOf<Bf16> with_bounded_tiles(AttentionOf<Bf16> a) {
    constexpr int64_t MOST_KEYS_COPIED = 1024;
    a.Bc = std::min(a.Bc, MOST_KEYS_COPIED);
    return a;
}

}  // namespace

int64_t tile_floats(const AttentionOf<Bf16>& a) {
    return Tile::floats(a) + /* Kj, Vj */ 2 * most_keys(a) * a.d;
}

template <class Out>
void attend_tile(const AttentionOf<Bf16>& a, int64_t head, int64_t i0, float* scratch, Out* out, float* lse) {
    const int64_t d = a.d;
    float *Kj = scratch + Tile::floats(a), *Vj = Kj + most_keys(a) * d;
    Tile tile(a, head, i0, Scratch(scratch));

    tile.load(widened_rows(a.q, a.q_of(head), i0, i0 + tile.rows(), d, tile.room_for_Q()));
    for (int64_t j0 = 0; j0 < tile.keys(); j0 += a.Bc) {
        const int64_t end = tile.end_of_keys(j0);
        tile.attend(j0, widened_rows(a.k, a.k_of(head), j0, end, d, Kj),
                    widened_rows(a.v, a.v_of(head), j0, end, d, Vj));
    }
    tile.store(tile.room_for_O(), lse);
    convert(out, tile.room_for_O(), tile.rows() * d);
}

template void attend_tile(const AttentionOf<Bf16>&, int64_t, int64_t, float*, Bf16*, float*);
template void attend_tile(const AttentionOf<Bf16>&, int64_t, int64_t, float*, float*, float*);

}  // namespace part4

int64_t flash_bf16_scratch(const AttentionOf<Bf16>& a) {
    return amx::takes(a) ? amx::scratch(a) : part4::split_scratch(part4::with_bounded_tiles(a));
}

void flash_bf16_attention(const AttentionOf<Bf16>& a, float* scratch) {
    amx::takes(a) ? amx::attention(a, scratch) : part4::split_attention(part4::with_bounded_tiles(a), scratch);
}
