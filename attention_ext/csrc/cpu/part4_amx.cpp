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
// The lanes of S, P and O are queries, so that the softmax has nothing to add up across lanes. K is read in
// place. Q and P are held in pairs, as the instruction wants its right operand. Since a bfloat16 has float's
// range, m need not be the maximum: it is that of the first 32 keys, and moves only when l exceeds MOST, which
// repeats the step. P is rounded toward 0 by leaving its lower half out; l is the sum of what is left, so that
// the mean error cancels in P / l. lse has an exact sum of its own.
//
// Shapes: Q and K tiles (16, 32), V^T tiles (16 features, 32 keys), S and O tiles (16, 16) in float32.
// Scratch: V of all heads; the last 32 rows of K, or all of it if d is not a multiple of 32; threads x (Q and O
// of Br queries, S of 32 keys, P of a step). What it improves: the two products of part4_flash.cpp take a sixth
// of the time, so that the exponentials, which AMX does not help with, are most of what is left.
#include "cpu/part4_amx.h"

#include <algorithm>
#include <cmath>

#include "cpu/tiles_of_amx.h"
#include "round_up.h"
#include "simd/constants.h"
#include "simd/simd.h"
#include "threads.h"

#if defined(TILES_OF_AMX) && defined(__AVX512BF16__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BW__)

#include <immintrin.h>

#include "simd/exp2_avx512.h"

#define INLINE inline __attribute__((always_inline))

namespace amx {
namespace {

using simd::exp2_denormal;

constexpr int64_t BLOCK = 32;         // queries of a strip, and keys that are multiplied at a time
constexpr int64_t PAIRS = 16;         // of features or keys in a row of a tile, and the lanes of a vector
constexpr int64_t HALF = 16 * 16;     // 32-bit numbers of a tile
constexpr float MOST = 0x1p60f;       // of l
constexpr float MOST_SUM = 0x1p120f;  // of l times a value, so that O is far from overflow
constexpr int64_t FLOAT_BYTES = 4;

// The sizes of a call.
struct Sizes {
    int64_t d, keys, step;  // rounded up to blocks: features, keys; keys of a step
    bool in_place;          // K but for its last block

    explicit Sizes(const AttentionOf<Bf16>& a)
        : d(round_up(a.d, BLOCK)), keys(round_up(a.Nk, BLOCK)), in_place(a.d == d) {
        // A long step reads O less often; in a short one S, P, O, Q, K and V stay in L1. At 64 and 128 features
        // O is 8 and 16 KB.
        step = (d <= 2 * BLOCK ? 4 : 8) * BLOCK;
    }

    // In pairs or floats, which have the same size.
    int64_t values() const { return keys * d / 2; }                            // of a head
    int64_t copied_keys() const { return (in_place ? BLOCK : keys) * d / 2; }  // of a head
    int64_t blocks() const { return keys / BLOCK; }
    int64_t of_thread(int64_t Br) const {
        const int64_t queries = round_up(Br, BLOCK);
        return /* Q */ queries * d / 2 + /* O */ queries * d + /* S */ BLOCK * BLOCK +
               /* P */ step * BLOCK / 2 +
               /* m, l, exact l */ 3 * queries + /* correction */ BLOCK;
    }
};

// What all threads share: V^T of all heads in tiles, copies of K, which blocks of V are not finite, and the
// largest finite magnitude in each.
struct Shared {
    uint32_t *V, *K;
    float *strange, *largest;
    float* rest;

    Shared(const AttentionOf<Bf16>& a, const Sizes& n, float* scratch) {
        const int64_t heads = a.B * a.H;
        V = reinterpret_cast<uint32_t*>(scratch);
        K = V + heads * n.values();
        strange = reinterpret_cast<float*>(K + heads * n.copied_keys());
        largest = strange + round_up(heads * n.blocks(), PAIRS);
        rest = scratch + floats(a, n);
    }

    static int64_t floats(const AttentionOf<Bf16>& a, const Sizes& n) {
        const int64_t heads = a.B * a.H;
        return heads * (n.values() + n.copied_keys()) +
               /* strange, largest */ 2 * round_up(heads * n.blocks(), PAIRS);
    }
};

// Transposes 16 x 16 numbers: interleaving row i with row i + 8, four times over, moves each to its place.
INLINE void transpose(__m512i (&v)[16]) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    for (int round = 0; round < 4; round++) {
        __m512i next[16];
        for (int i = 0; i < 8; i++) {
            next[2 * i] = _mm512_permutex2var_epi32(v[i], low, v[i + 8]);
            next[2 * i + 1] = _mm512_permutex2var_epi32(v[i], high, v[i + 8]);
        }
        for (int i = 0; i < 16; i++) v[i] = next[i];
    }
}

// The first n of up to 16 or 32 numbers, and 0.
INLINE __m256i some16(const Bf16* from, int64_t n) {
    return _mm256_maskz_loadu_epi16(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1, from);
}
INLINE __m512i some32(const Bf16* from, int64_t n) {
    return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffff : n <= 0 ? 0 : (1u << n) - 1, from);
}

// Block `block` of V of a head: its transpose in tiles of 16 features, with 0 for what is not finite. Returns
// whether all of it is finite; `largest` <- the largest finite magnitude.
bool pack_values(const AttentionOf<Bf16>& a, const Sizes& n, const Bf16* V, int64_t block, uint32_t* to,
                 float& largest) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);  // of infinities and NaN
    __m512i most = _mm512_setzero_si512();
    bool finite = true;
    for (int64_t c = 0; c < n.d; c += 16, to += HALF) {
        const auto row = [&](int64_t j) {
            const __m256i x = j < a.Nk ? some16(V + j * a.v.row_stride + c, a.d - c) : _mm256_setzero_si256();
            return _mm512_cvtepu16_epi32(x);
        };
        __m512i v[16];
        for (int64_t p = 0; p < 16; p++) {
            const int64_t j = block * BLOCK + 2 * p;
            const __m512i pair = _mm512_or_si512(row(j), _mm512_slli_epi32(row(j + 1), 16));
            const __mmask32 strange = _mm512_cmpeq_epi16_mask(_mm512_and_si512(pair, exponent), exponent);
            v[p] = _mm512_maskz_mov_epi16(~strange, pair);
            most = _mm512_max_epu16(most, _mm512_and_si512(v[p], _mm512_set1_epi16(0x7fff)));
            finite = finite && strange == 0;
        }
        transpose(v);
        for (int64_t r = 0; r < 16; r++) _mm512_storeu_si512(to + 16 * r, v[r]);
    }
    uint16_t lanes[BLOCK];
    _mm512_storeu_si512(lanes, most);
    largest = widened(Bf16{*std::max_element(lanes, lanes + BLOCK)});
    return finite;
}

// Block `block` of K of a head, with rows of n.d numbers.
void copy_keys(const AttentionOf<Bf16>& a, const Sizes& n, const Bf16* K, int64_t block, uint32_t* to) {
    for (int64_t r = 0; r < BLOCK; r++) {
        const int64_t j = block * BLOCK + r;
        for (int64_t c = 0; c < n.d; c += 32, to += 16) {
            const bool inside = j < a.Nk;
            _mm512_storeu_si512(to, some32(inside ? K + j * a.k.row_stride + c : K, inside ? a.d - c : 0));
        }
    }
}

// 16 queries and 32 features as the right operand: rows of pairs of features.
INLINE void pack_queries(const Bf16* Q, int64_t ld, int64_t queries, int64_t features, uint32_t* to) {
    __m512i v[16];
    for (int64_t r = 0; r < 16; r++) v[r] = some32(r < queries ? Q + r * ld : Q, r < queries ? features : 0);
    transpose(v);
    for (int64_t r = 0; r < 16; r++) _mm512_storeu_si512(to + 16 * r, v[r]);
}

// A strip of 32 queries of a head.
template <bool LSE>
struct Strip {
    // Its own part of the thread's scratch.
    const uint32_t* Q;   // (d / 32, 2) tiles
    float* O;            // (d, 32)
    float *m, *l, *all;  // 32 each; all: the exact sum
    // Shared by the thread's strips.
    float *S, *correction;  // (32 keys, 32 queries); 32
    uint32_t* P;            // (step / 32, 2) tiles

    const AttentionOf<Bf16>& a;
    const Sizes& n;
    const Bf16 *K, *V;        // of the head
    const uint32_t *Kc, *Vt;  // of the head: copied blocks of K; tiles of V^T
    const float* strange;     // of the head's blocks
    int64_t i0;               // the first query
    float scale;
    float most_l;

    // Keys from block `begin` to before block `end`.
    void attend(int64_t begin, int64_t end) const {
        for (int64_t first = begin; first < end; first += n.step / BLOCK) {
            const int64_t last = std::min(first + n.step / BLOCK, end);
            const Sums before = sums();
            Sums now = before;
            for (int64_t block = first; block < last; block++) {
                scores(block);
                if (block == 0) now.m = most(now.m, block);
                exponentials(now, now.m, block, P + (block - first) * 2 * HALF);
            }
            const __m512 limit = _mm512_set1_ps(most_l);
            const __mmask16 low = _mm512_cmp_ps_mask(now.l.low, limit, _CMP_NLE_UQ),
                            high = _mm512_cmp_ps_mask(now.l.high, limit, _CMP_NLE_UQ);
            if (low | high) now = with_their_maximum(before, now.m, low, high, first, last);
            _mm512_storeu_ps(m, now.m.low), _mm512_storeu_ps(m + PAIRS, now.m.high);
            _mm512_storeu_ps(l, now.l.low), _mm512_storeu_ps(l + PAIRS, now.l.high);
            if (LSE) _mm512_storeu_ps(all, now.all.low), _mm512_storeu_ps(all + PAIRS, now.all.high);
            add_values(first, last);
        }
    }

    // Keys that the last query of the strip sees, in blocks.
    int64_t blocks() const { return (seen(i0 + BLOCK - 1) + BLOCK - 1) / BLOCK; }

    struct Both {  // of 32 queries
        __m512 low, high;
    };
    struct Sums {
        Both m, l, all;
    };

    int64_t seen(int64_t i) const { return std::min(a.visible(i), a.Nk); }

    Sums sums() const {
        const auto both = [](const float* x) { return Both{_mm512_loadu_ps(x), _mm512_loadu_ps(x + PAIRS)}; };
        return {both(m), both(l), both(all)};
    }

    // S <- K Q^T for a block of keys.
    INLINE void scores(int64_t block) const {
        const bool copied = !n.in_place || (block + 1) * BLOCK > a.Nk;
        const char* rows = copied
                               ? reinterpret_cast<const char*>(Kc + (n.in_place ? 0 : block * BLOCK * n.d / 2))
                               : reinterpret_cast<const char*>(K + block * BLOCK * a.k.row_stride);
        const int64_t stride = 2 * (copied ? n.d : a.k.row_stride);
        zero<0>(), zero<1>(), zero<2>(), zero<3>();
        const uint32_t* q = Q;
        for (int64_t c = 0; c < n.d; c += BLOCK, rows += ROW_BYTES, q += 2 * HALF) {
            load<4>(rows, stride);
            load<6>(q, ROW_BYTES);
            multiply_add<0, 4, 6>();
            load<7>(q + HALF, ROW_BYTES);
            multiply_add<1, 4, 7>();
            load<5>(rows + 16 * stride, stride);
            multiply_add<2, 5, 6>();
            multiply_add<3, 5, 7>();
        }
        constexpr int64_t ld = BLOCK * FLOAT_BYTES;
        float* below = S + PAIRS * BLOCK;
        store<0>(S, ld), store<1>(S + PAIRS, ld), store<2>(below, ld), store<3>(below + PAIRS, ld);
    }

    // Whether every query sees all keys of a block.
    bool whole(int64_t block) const { return (block + 1) * BLOCK <= seen(i0); }

    // x, but -inf for the queries that do not see key j of a block.
    template <bool MASKED>
    INLINE __m512 hidden(__m512 x, int64_t block, int64_t j, int64_t lane) const {
        if (!MASKED) return x;
        const int64_t key = block * BLOCK + j;
        // query i0 + lane + n sees it if n >= the first that does
        const int64_t from = a.causal ? std::clamp<int64_t>(key - (a.Nk - a.Nq) - i0 - lane, 0, PAIRS) : 0;
        const __mmask16 visible = key < a.Nk ? 0xffff << from : 0;
        return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), visible, x);
    }

    // max(m, scale S)
    Both most(Both m, int64_t block) const {
        const auto larger = [&](__m512 than, int64_t j, int64_t lane) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(S + j * BLOCK + lane), _mm512_set1_ps(scale));
            return _mm512_max_ps(hidden<true>(x, block, j, lane), than);  // `than` where x is NaN
        };
        for (int64_t j = 0; j < BLOCK; j++) m = {larger(m.low, j, 0), larger(m.high, j, PAIRS)};
        return m;
    }

    // P <- 2^(scale S - m) in pairs of keys, which are added to the sums. A bfloat16 shows no error of 9e-5.
    // Denormal results are flushed, as threads.h has the processor do: AMX would take them for 0 anyway.
    INLINE void exponentials(Sums& now, const Both& m, int64_t block, uint32_t* to) const {
        if (whole(block)) {
            exponentials<false>(now.l.low, now.all.low, m.low, block, 0, to);
            exponentials<false>(now.l.high, now.all.high, m.high, block, PAIRS, to + HALF);
        } else {
            exponentials<true>(now.l.low, now.all.low, m.low, block, 0, to);
            exponentials<true>(now.l.high, now.all.high, m.high, block, PAIRS, to + HALF);
        }
    }

    template <bool MASKED>
    INLINE void exponentials(__m512& l, __m512& exact, __m512 m, int64_t block, int64_t lane,
                             uint32_t* to) const {
        constexpr uint32_t ODD = 0xaaaaaaaa;
        const __m512 c = _mm512_set1_ps(scale);
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        const float* from = S + lane;
        for (int64_t j = 0; j < BLOCK; j += 2, from += 2 * BLOCK, to += PAIRS) {
            const __m512 even = hidden<MASKED>(_mm512_fmsub_ps(_mm512_loadu_ps(from), c, m), block, j, lane),
                         odd = hidden<MASKED>(_mm512_fmsub_ps(_mm512_loadu_ps(from + BLOCK), c, m), block,
                                              j + 1, lane);
            const __m512i lower = _mm512_srli_epi32(_mm512_castps_si512(exp2_denormal<3>(even)), 16),
                          upper = _mm512_castps_si512(exp2_denormal<3>(odd)),
                          pair = _mm512_mask_blend_epi16(ODD, lower, upper);
            _mm512_storeu_si512(to, pair);
            l = _mm512_dpbf16_ps(l, (__m512bh)pair, ones);
            if (LSE) exact = _mm512_add_ps(exact, _mm512_add_ps(exp2_denormal<5>(even), exp2_denormal<5>(odd)));
        }
    }

    // The step once more, with its maximum as m in some lanes. The others keep m and all bits of their results.
    __attribute__((noinline)) Sums with_their_maximum(const Sums& before, Both m, __mmask16 low_lanes,
                                                      __mmask16 high_lanes, int64_t begin, int64_t end) const {
        Both largest = before.m;
        for (int64_t block = begin; block < end; block++) {
            scores(block);
            largest = most(largest, block);
        }
        m.low = _mm512_mask_mov_ps(m.low, low_lanes, largest.low);
        m.high = _mm512_mask_mov_ps(m.high, high_lanes, largest.high);
        const __m512 lowest = _mm512_set1_ps(-INFINITY);
        const auto finite = [&](__m512 x) {  // -inf - -inf would be NaN
            return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, lowest, _CMP_EQ_OQ), _mm512_setzero_ps());
        };
        const Both subtracted{finite(m.low), finite(m.high)};
        const __m512 low = exp2_denormal<5>(_mm512_sub_ps(before.m.low, subtracted.low)),
                     high = exp2_denormal<5>(_mm512_sub_ps(before.m.high, subtracted.high));
        _mm512_storeu_ps(correction, low), _mm512_storeu_ps(correction + PAIRS, high);
        simd::scale_columns({O, BLOCK}, n.d, BLOCK, correction);
        const auto times = [&](const Both& x) {
            return Both{_mm512_mul_ps(x.low, low), _mm512_mul_ps(x.high, high)};
        };
        Sums now{m, times(before.l), times(before.all)};
        for (int64_t block = begin; block < end; block++) {
            scores(block);
            exponentials(now, subtracted, block, P + (block - begin) * 2 * HALF);
        }
        return now;
    }

    // O^T <- O^T + V^T P^T
    INLINE void add_values(int64_t begin, int64_t end) const {
        constexpr int64_t ld = BLOCK * FLOAT_BYTES;
        for (int64_t c = 0; c < n.d; c += BLOCK) {
            float *o = O + c * BLOCK, *below = o + PAIRS * BLOCK;
            load<0>(o, ld), load<1>(o + PAIRS, ld), load<2>(below, ld), load<3>(below + PAIRS, ld);
            for (int64_t block = begin; block < end; block++) {
                const uint32_t *p = P + (block - begin) * 2 * HALF, *v = Vt + (block * n.d + c) / PAIRS * HALF;
                load<4>(v, ROW_BYTES);
                load<6>(p, ROW_BYTES);
                multiply_add<0, 4, 6>();
                load<7>(p + HALF, ROW_BYTES);
                multiply_add<1, 4, 7>();
                load<5>(v + HALF, ROW_BYTES);
                multiply_add<2, 5, 6>();
                multiply_add<3, 5, 7>();
            }
            store<0>(o, ld), store<1>(o + PAIRS, ld), store<2>(below, ld), store<3>(below + PAIRS, ld);
        }
        for (int64_t block = begin; block < end; block++)
            if (strange[block]) add_strange_values(block, P + (block - begin) * 2 * HALF);
    }

    // The infinities and NaN of a block, for the queries that see them: times a hidden key's weight, 0, they
    // would be NaN.
    __attribute__((noinline)) void add_strange_values(int64_t block, const uint32_t* pairs) const {
        for (int64_t key = block * BLOCK; key < std::min((block + 1) * BLOCK, a.Nk); key++) {
            for (int64_t c = 0; c < a.d; c++) {
                const float v = widened(V[key * a.v.row_stride + c]);
                for (int64_t r = 0; r < BLOCK && !std::isfinite(v); r++) {
                    if (key >= seen(i0 + r)) continue;
                    const int64_t j = key % BLOCK;
                    const uint32_t pair = pairs[r / PAIRS * HALF + j / 2 * PAIRS + r % PAIRS];
                    O[c * BLOCK + r] += v * widened(Bf16{static_cast<uint16_t>(pair >> 16 * (j % 2))});
                }
            }
        }
    }
};

// A tile of queries of a head, from i0 on.
template <bool LSE>
void attend_tile(const AttentionOf<Bf16>& a, const Sizes& n, const Shared& shared, int64_t head, int64_t i0,
                 float* scratch) {
    const int64_t b = head / a.H, h = head % a.H, rows = std::min(round_up(a.Br, BLOCK), a.Nq - i0);
    const int64_t strips = (rows + BLOCK - 1) / BLOCK, queries = strips * BLOCK;
    const Bf16* Qi = a.q.at(b, h) + i0 * a.q.row_stride;
    uint32_t* Q = reinterpret_cast<uint32_t*>(scratch);
    float* O = scratch + queries * n.d / 2;
    float *m = O + queries * n.d, *l = m + queries, *all = l + queries;
    float *S = all + queries, *correction = S + BLOCK * BLOCK;
    uint32_t* P = reinterpret_cast<uint32_t*>(correction + BLOCK);

    const float* of_blocks = shared.largest + head * n.blocks();
    const float largest = *std::max_element(of_blocks, of_blocks + n.blocks());
    configure();
    const auto strip = [&](int64_t s) {
        const int64_t r0 = s * BLOCK;
        return Strip<LSE>{Q + r0 * n.d / 2,
                          O + r0 * n.d,
                          m + r0,
                          l + r0,
                          all + r0,
                          S,
                          correction,
                          P,
                          a,
                          n,
                          a.k.at(b, h),
                          a.v.at(b, h),
                          shared.K + head * n.copied_keys(),
                          shared.V + head * n.values(),
                          shared.strange + head * n.blocks(),
                          i0 + r0,
                          a.scale * SIMD_LOG2E,
                          std::min(MOST, MOST_SUM / largest)};
    };
    for (int64_t r0 = 0; r0 < queries; r0 += PAIRS)
        for (int64_t c = 0; c < n.d; c += BLOCK)
            pack_queries(Qi + r0 * a.q.row_stride + c, a.q.row_stride, rows - r0, a.d - c,
                         Q + (r0 / BLOCK * n.d + c) * BLOCK / 2 + r0 % BLOCK / PAIRS * HALF);
    std::fill_n(O, queries * n.d, 0.0f);
    std::fill_n(m, queries, -INFINITY);
    std::fill_n(l, 2 * queries, 0.0f);

    const int64_t tile = round_up(a.Bc, BLOCK) / BLOCK;
    for (int64_t j0 = 0; j0 < n.blocks(); j0 += tile) {
        for (int64_t s = 0; s < strips; s++) {
            const Strip<LSE> some = strip(s);
            const int64_t end = std::min(j0 + tile, some.blocks());
            if (j0 < end) some.attend(j0, end);
        }
    }
    release();

    Bf16* out = a.out_at(b, h) + i0 * a.d;
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK, out += BLOCK * a.d) {
        const int64_t some = std::min(BLOCK, rows - r0);
        for (int64_t r = 0; r < some; r++) {
            correction[r] = 1 / l[r0 + r];
            if (LSE) a.lse_at(b, h)[i0 + r0 + r] = m[r0 + r] * SIMD_LN2 + std::log(all[r0 + r]);
        }
        simd::scale_columns({O + r0 * n.d, BLOCK}, a.d, some, correction);
        for (int64_t c = 0; c < a.d; c += BLOCK) {
            const int64_t features = std::min(BLOCK, a.d - c);
            simd::transpose({S, BLOCK}, {O + r0 * n.d + c * BLOCK, BLOCK}, features, some, 1.0f);
            for (int64_t r = 0; r < some; r++) convert(out + r * a.d + c, S + r * BLOCK, features);
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
    return Shared::floats(a, n) + a.threads * n.of_thread(a.Br);
}

void attention(const AttentionOf<Bf16>& a, float* scratch) {
    constexpr int64_t TOGETHER = 8;  // blocks that are packed by one thread
    const Sizes n(a);
    const Shared shared(a, n, scratch);
    const int64_t heads = a.B * a.H, tile = round_up(a.Br, BLOCK), tiles = (a.Nq + tile - 1) / tile;

    for_each_item(
        heads, (n.blocks() + TOGETHER - 1) / TOGETHER, a.threads, [&](int64_t head, int64_t item, int) {
            const int64_t b = head / a.H, h = head % a.H;
            for (int64_t block = item * TOGETHER; block < std::min((item + 1) * TOGETHER, n.blocks());
                 block++) {
                uint32_t* V = shared.V + head * n.values() + block * BLOCK * n.d / 2;
                const int64_t at = head * n.blocks() + block;
                shared.strange[at] = !pack_values(a, n, a.v.at(b, h), block, V, shared.largest[at]);
                uint32_t* K = shared.K + head * n.copied_keys() + (n.in_place ? 0 : block * BLOCK * n.d / 2);
                if (!n.in_place || (block + 1) * BLOCK > a.Nk) copy_keys(a, n, a.k.at(b, h), block, K);
            }
        });
    for_each_item(heads, tiles, a.threads, [&](int64_t head, int64_t item, int thread) {
        const int64_t i0 = (tiles - 1 - item) * tile;  // causal: the longest first
        float* own = shared.rest + thread * n.of_thread(a.Br);
        (a.lse ? attend_tile<true> : attend_tile<false>)(a, n, shared, head, i0, own);
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
