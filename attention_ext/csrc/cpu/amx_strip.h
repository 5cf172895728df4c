// A strip of 32 queries of a head: its scores, its softmax, its part of O. For part4_amx.cpp alone.
//
// The lanes of S, P and O are queries, so that the softmax has nothing to add up across lanes. m need not be
// the maximum, since a bfloat16 has float's range: it is that of the first 32 keys, and moves only when l
// exceeds a limit, which repeats the step. P is rounded toward 0 by leaving its lower half out; l is the sum of
// what is left, so that the mean error cancels in P / l. lse has an exact sum of its own.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "cpu/amx_packing.h"
#include "cpu/tiles_of_amx.h"
#include "scratch.h"
#include "simd/exp2_avx512.h"
#include "simd/simd.h"

namespace amx {

using simd::exp2_denormal;

constexpr float MOST = 0x1p60f;       // of l
constexpr float MOST_SUM = 0x1p120f;  // of l times a value, so that O is far from overflow
constexpr int64_t FLOAT_BYTES = 4;

// A thread's scratch for a tile of queries, whose number is a multiple of BLOCK.
struct TileScratch {
    // Each strip has a part of these. Q: (d / 32, 2) tiles; O: (d, 32); m, l and all, the exact sum: 32 each.
    uint32_t* Q;
    float *O, *m, *l, *all;
    // The strips share these. S: (32 keys, 32 queries); correction: 32; P: (step / 32, 2) tiles.
    float *S, *correction;
    uint32_t* P;

    TileScratch(const Sizes& n, int64_t queries, Scratch& scratch) {
        const auto words = [&](int64_t count) { return reinterpret_cast<uint32_t*>(scratch.take(count)); };
        Q = words(queries * n.d / 2), O = scratch.take(queries * n.d);
        for (float** each : {&m, &l, &all}) *each = scratch.take(queries);
        S = scratch.take(BLOCK * BLOCK), correction = scratch.take(BLOCK), P = words(n.step * BLOCK / 2);
    }
};

// The keys and values of a head. largest: the largest finite magnitude of its values.
struct Keys {
    const Bf16* K;
    const uint32_t *copied_K, *Vt;  // blocks of K that are not read in place; tiles of V^T
    float largest;
};

// LSE: whether the logsumexp is computed.
template <bool LSE>
class Strip {
  public:
    // The strip from query r0 of a tile on, which is query i0 of its head.
    Strip(const AttentionOf<Bf16>& a, const Sizes& n, const Keys& keys, const TileScratch& tile, int64_t r0,
          int64_t i0)
        : a(a), n(n), keys(keys), i0(i0) {
        Q = tile.Q + r0 * n.d / 2;
        O = tile.O + r0 * n.d;
        m = tile.m + r0;
        l = tile.l + r0;
        all = tile.all + r0;
        S = tile.S;
        correction = tile.correction;
        P = tile.P;
        scale = a.scale * SIMD_LOG2E;
        most_l = std::min(MOST, MOST_SUM / keys.largest);
    }

    // Attends to the blocks begin .. end - 1 of keys, a step at a time.
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

    // Blocks of keys that the last query of the strip sees.
    int64_t blocks() const { return (seen(i0 + BLOCK - 1) + BLOCK - 1) / BLOCK; }

  private:
    struct Both {  // a number for each of the 32 queries
        __m512 low, high;
    };
    struct Sums {
        Both m, l, all;
    };

    int64_t seen(int64_t i) const { return std::min(a.seen(i), a.Nk); }

    Sums sums() const {
        const auto both = [](const float* x) { return Both{_mm512_loadu_ps(x), _mm512_loadu_ps(x + PAIRS)}; };
        return {both(m), both(l), both(all)};
    }

    // S <- K Q^T for a block of keys.
    INLINE void scores(int64_t block) const {
        const bool copied = n.copied(block, a.Nk);
        const char* rows = copied ? reinterpret_cast<const char*>(keys.copied_K + n.copy_at(block))
                                  : reinterpret_cast<const char*>(keys.K + block * BLOCK * a.k.row_stride);
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
    INLINE __m512 masked(__m512 x, int64_t block, int64_t j, int64_t lane) const {
        if (!MASKED) return x;
        const int64_t key = block * BLOCK + j;
        // query i0 + lane + n sees it if n >= the first that does
        const int64_t from = a.causal ? std::clamp<int64_t>(key - (a.Nk - a.Nq) - i0 - lane, 0, PAIRS) : 0;
        const __mmask16 seen_lanes = key < a.Nk ? 0xffff << from : 0;
        return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen_lanes, x);
    }

    // max(m, scale S)
    Both most(Both m, int64_t block) const {
        const auto larger = [&](__m512 than, int64_t j, int64_t lane) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(S + j * BLOCK + lane), _mm512_set1_ps(scale));
            return _mm512_max_ps(masked<true>(x, block, j, lane), than);  // `than` where x is NaN
        };
        for (int64_t j = 0; j < BLOCK; j++) m = {larger(m.low, j, 0), larger(m.high, j, PAIRS)};
        return m;
    }

    // P <- 2^(scale S - m) in pairs of keys, which are added to the sums. A bfloat16 shows no error of 9e-5.
    // Denormal results are flushed, as threads.h has the processor do: AMX would take them for 0 anyway.
    INLINE void exponentials(Sums& now, const Both& m, int64_t block, uint32_t* to) const {
        if (whole(block)) {
            half_of_exponentials<false>(now.l.low, now.all.low, m.low, block, 0, to);
            half_of_exponentials<false>(now.l.high, now.all.high, m.high, block, PAIRS, to + HALF);
        } else {
            half_of_exponentials<true>(now.l.low, now.all.low, m.low, block, 0, to);
            half_of_exponentials<true>(now.l.high, now.all.high, m.high, block, PAIRS, to + HALF);
        }
    }

    // The same for 16 of the queries, from `lane` on.
    template <bool MASKED>
    INLINE void half_of_exponentials(__m512& l, __m512& exact, __m512 m, int64_t block, int64_t lane,
                                     uint32_t* to) const {
        constexpr uint32_t ODD = 0xaaaaaaaa;
        const __m512 c = _mm512_set1_ps(scale);
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        const float* from = S + lane;
        for (int64_t j = 0; j < BLOCK; j += 2, from += 2 * BLOCK, to += PAIRS) {
            const __m512 even = masked<MASKED>(_mm512_fmsub_ps(_mm512_loadu_ps(from), c, m), block, j, lane),
                         odd = masked<MASKED>(_mm512_fmsub_ps(_mm512_loadu_ps(from + BLOCK), c, m), block,
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
                const uint32_t *p = P + (block - begin) * 2 * HALF,
                               *v = keys.Vt + (block * n.d + c) / PAIRS * HALF;
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
    }

    const AttentionOf<Bf16>& a;
    const Sizes& n;
    const Keys& keys;
    int64_t i0;
    const uint32_t* Q;
    float *O, *m, *l, *all, *S, *correction;
    uint32_t* P;
    float scale;   // of the scores, in units of log(2)
    float most_l;  // before m must move
};

}  // namespace amx
