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
// K is read in place. Q and P are held in pairs, as the instruction takes its right operand. Tiles: Q and K
// (16, 32), V^T (16 features, 32 keys), S and O (16, 16) in float32. The lanes of S, P and O are queries.
//
// m, the maximum of the first 32 keys, moves only when l exceeds a limit, which repeats the step. P is
// truncated and l sums the truncated weights, so the mean error cancels in P / l; lse has an exact sum.
//
// Scratch: V of all heads; 32 rows of K, or all if d is not a multiple of 32; threads x (Q and O of Br
// queries, S of 32 keys, P of a step). What it improves: the products take a sixth of part4_flash.cpp's time.
#include "cpu/part4.h"
#include "cpu/tiles_of_amx.h"

#if defined(TILES_OF_AMX) && defined(__AVX512BF16__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BW__)

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd/vectors/vectors.h"
#include "threads.h"

namespace amx {

// ---- What the tiles are loaded from, padded with zeros to whole tiles ----

constexpr int64_t PAIRS = 16;      // pairs of features or keys in a row of a tile; the lanes of a vector
constexpr int64_t HALF = 16 * 16;  // 32-bit numbers of a tile

// The sizes of a call.
struct Sizes {
    int64_t d, keys, step;  // features and keys, rounded up to blocks; keys of a step
    bool in_place;          // all of K is read in place, except for its last block

    explicit Sizes(const AttentionSizes& a)
        : d(round_up(a.d, BLOCK)), keys(round_up(a.Nk, BLOCK)), in_place(a.d == d) {
        // A long step reads O less often; in a short one S, P, O, Q, K and V stay in L1.
        step = (d <= 2 * BLOCK ? 4 : 8) * BLOCK;
    }

    int64_t blocks() const { return keys / BLOCK; }
    // Words of 32 bits of a head: V^T, and copied rows of K.
    int64_t values() const { return keys * d / 2; }
    int64_t copied_keys() const { return (in_place ? BLOCK : keys) * d / 2; }
    // Where a block of keys is in each.
    int64_t values_at(int64_t block) const { return block * BLOCK * d / 2; }
    int64_t copy_at(int64_t block) const { return in_place ? 0 : block * BLOCK * d / 2; }
    bool copied(int64_t block, int64_t Nk) const { return !in_place || (block + 1) * BLOCK > Nk; }
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

// V^T of a block, in tiles of 16 features, each in pairs of keys. Returns the largest finite magnitude.
inline float pack_values(const AttentionOf<Bf16>& a, const Sizes& n, const Bf16* V, int64_t block,
                         uint32_t* to) {
    const __m512i magnitudes = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(0x7f80);
    __m512i most = _mm512_setzero_si512();
    for (int64_t c = 0; c < n.d; c += 16, to += HALF) {
        const auto row = [&](int64_t j) {
            const __m256i x = j < a.Nk ? some16(V + j * a.v.row_stride + c, a.d - c) : _mm256_setzero_si256();
            return _mm512_cvtepu16_epi32(x);
        };
        __m512i v[16];
        for (int64_t p = 0; p < 16; p++) {
            const int64_t j = block * BLOCK + 2 * p;
            v[p] = _mm512_or_si512(row(j), _mm512_slli_epi32(row(j + 1), 16));
            const __m512i x = _mm512_and_si512(v[p], magnitudes);
            most = _mm512_mask_max_epu16(most, _mm512_cmplt_epu16_mask(x, infinity), most, x);
        }
        transpose(v);
        for (int64_t r = 0; r < 16; r++) _mm512_storeu_si512(to + 16 * r, v[r]);
    }
    uint16_t lanes[BLOCK];
    _mm512_storeu_si512(lanes, most);
    return widened(Bf16{*std::max_element(lanes, lanes + BLOCK)});
}

// A block of a head's K: rows of n.d numbers.
inline void copy_keys(const AttentionOf<Bf16>& a, const Sizes& n, const Bf16* K, int64_t block, uint32_t* to) {
    for (int64_t r = 0; r < BLOCK; r++) {
        const int64_t j = block * BLOCK + r;
        for (int64_t c = 0; c < n.d; c += 32, to += 16) {
            const bool inside = j < a.Nk;
            _mm512_storeu_si512(to, some32(inside ? K + j * a.k.row_stride + c : K, inside ? a.d - c : 0));
        }
    }
}

// 16 queries and 32 features as the right operand of a product: rows of pairs of features.
INLINE void pack_queries(const Bf16* Q, int64_t ld, int64_t queries, int64_t features, uint32_t* to) {
    __m512i v[16];
    for (int64_t r = 0; r < 16; r++) v[r] = some32(r < queries ? Q + r * ld : Q, r < queries ? features : 0);
    transpose(v);
    for (int64_t r = 0; r < 16; r++) _mm512_storeu_si512(to + 16 * r, v[r]);
}

// ---- a strip of 32 queries of a head: its scores, its softmax, its part of O ----

using portable::exp2_denormal;

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
        Q = words(queries * n.d / 2);
        O = scratch.take(queries * n.d);
        for (float** each : {&m, &l, &all}) *each = scratch.take(queries);
        S = scratch.take(BLOCK * BLOCK);
        correction = scratch.take(BLOCK);
        P = words(n.step * BLOCK / 2);
    }
};

// The keys and values of a head. largest: the largest finite magnitude of its values.
struct Keys {
    const Bf16* K;
    const uint32_t *copied_K, *Vt;  // blocks of K that are not read in place; tiles of V^T
    float largest;
};

// LSE: whether the logsumexp is computed.
template <bool LSE> class Strip : TileScratch {
  public:
    // The strip from query r0 of a tile on, which is query i0 of its head.
    Strip(const AttentionOf<Bf16>& a, const Sizes& n, const Keys& keys, const TileScratch& tile, int64_t r0,
          int64_t i0)
        : TileScratch(tile),
          a(a),
          n(n),
          keys(keys),
          i0(i0),
          scale(a.scale * SIMD_LOG2E),
          most_l(std::min(MOST, MOST_SUM / keys.largest)) {
        Q += r0 * n.d / 2;
        O += r0 * n.d;
        for (float** each : {&m, &l, &all}) *each += r0;
    }

    // Attends to the blocks begin .. end - 1 of keys, a step at a time.
    void attend(int64_t begin, int64_t end) const {
        for (int64_t first = begin; first < end; first += n.step / BLOCK) {
            const int64_t last = std::min(first + n.step / BLOCK, end);
            const Sums before{loaded(m), loaded(l), loaded(all)};
            Sums now = before;
            for (int64_t block = first; block < last; block++) {
                scores(block);
                if (block == 0) now.m = most(now.m, block);
                exponentials(now, now.m, block, P + (block - first) * 2 * HALF);
            }
            __mmask16 above[2];
            for (int h = 0; h < 2; h++)
                above[h] = _mm512_cmp_ps_mask(now.l[h], _mm512_set1_ps(most_l), _CMP_NLE_UQ);
            if (above[0] | above[1]) now = with_their_maximum(before, now.m, above, first, last);
            stored(m, now.m), stored(l, now.l);
            if (LSE) stored(all, now.all);
            add_values(first, last);
        }
    }

    // Blocks of keys that the last query of the strip sees.
    int64_t blocks() const { return (seen(i0 + BLOCK - 1) + BLOCK - 1) / BLOCK; }

  private:
    struct Both {  // a number for each of the 32 queries, in two vectors
        __m512 halves[2];
        INLINE __m512& operator[](int h) { return halves[h]; }
        INLINE __m512 operator[](int h) const { return halves[h]; }
    };
    struct Sums {
        Both m, l, all;
    };

    template <class Half> static INLINE Both both(const Half& half) { return {half(0), half(1)}; }
    static INLINE Both loaded(const float* x) {
        return both([&](int h) { return _mm512_loadu_ps(x + h * PAIRS); });
    }
    static INLINE void stored(float* to, const Both& x) {
        for (int h = 0; h < 2; h++) _mm512_storeu_ps(to + h * PAIRS, x[h]);
    }

    int64_t seen(int64_t i) const { return std::min(a.seen(i), a.Nk); }

    // Four tiles: 32 x 32 floats of S or O, and their sum with 32 rows of pairs times a step of Q or P.
    static constexpr int64_t LD_BYTES = BLOCK * FLOAT_BYTES;
    static INLINE void store_tiles(float* to) {
        store<0>(to, LD_BYTES), store<1>(to + PAIRS, LD_BYTES);
        store<2>(to + PAIRS * BLOCK, LD_BYTES), store<3>(to + PAIRS * BLOCK + PAIRS, LD_BYTES);
    }
    static INLINE void add_tiles(const char* rows, int64_t stride, const uint32_t* columns) {
        load<4>(rows, stride);
        load<6>(columns, ROW_BYTES);
        multiply_add<0, 4, 6>();
        load<7>(columns + HALF, ROW_BYTES);
        multiply_add<1, 4, 7>();
        load<5>(rows + 16 * stride, stride);
        multiply_add<2, 5, 6>();
        multiply_add<3, 5, 7>();
    }

    // S <- K Q^T for a block of keys.
    INLINE void scores(int64_t block) const {
        const bool copied = n.copied(block, a.Nk);
        const char* rows = copied ? reinterpret_cast<const char*>(keys.copied_K + n.copy_at(block))
                                  : reinterpret_cast<const char*>(keys.K + block * BLOCK * a.k.row_stride);
        const int64_t stride = 2 * (copied ? n.d : a.k.row_stride);
        zero<0>(), zero<1>(), zero<2>(), zero<3>();
        const uint32_t* q = Q;
        for (int64_t c = 0; c < n.d; c += BLOCK, rows += ROW_BYTES, q += 2 * HALF) add_tiles(rows, stride, q);
        store_tiles(S);
    }

    // Whether every query sees all keys of a block.
    bool whole(int64_t block) const { return (block + 1) * BLOCK <= seen(i0); }

    // x, but -inf for the queries that do not see key j of a block.
    template <bool MASKED> INLINE __m512 masked(__m512 x, int64_t block, int64_t j, int64_t lane) const {
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
        for (int64_t j = 0; j < BLOCK; j++) m = {larger(m[0], j, 0), larger(m[1], j, PAIRS)};
        return m;
    }

    // P <- 2^(scale S - m) to 9e-5, in pairs, added to the sums. Denormals are flushed, as by AMX.
    INLINE void exponentials(Sums& now, const Both& m, int64_t block, uint32_t* to) const {
        for (int h = 0; h < 2; h++, to += HALF)
            if (whole(block))
                half_of_exponentials<false>(now.l[h], now.all[h], m[h], block, h * PAIRS, to);
            else
                half_of_exponentials<true>(now.l[h], now.all[h], m[h], block, h * PAIRS, to);
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

    // Repeats the step with its maximum as m in the lanes `above`. The others keep all bits.
    __attribute__((noinline)) Sums with_their_maximum(const Sums& before, Both m, const __mmask16 (&above)[2],
                                                      int64_t begin, int64_t end) const {
        Both largest = before.m;
        for (int64_t block = begin; block < end; block++) {
            scores(block);
            largest = most(largest, block);
        }
        m = both([&](int h) { return _mm512_mask_mov_ps(m[h], above[h], largest[h]); });
        const Both subtracted = both([&](int h) {  // -inf - -inf would be NaN
            const __mmask16 lowest = _mm512_cmp_ps_mask(m[h], _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
            return _mm512_mask_mov_ps(m[h], lowest, _mm512_setzero_ps());
        });
        const Both factor =
            both([&](int h) { return exp2_denormal<5>(_mm512_sub_ps(before.m[h], subtracted[h])); });
        stored(correction, factor);
        simd::scale_columns({O, BLOCK}, n.d, BLOCK, correction);
        Sums now{m, both([&](int h) { return _mm512_mul_ps(before.l[h], factor[h]); }),
                 both([&](int h) { return _mm512_mul_ps(before.all[h], factor[h]); })};
        for (int64_t block = begin; block < end; block++) {
            scores(block);
            exponentials(now, subtracted, block, P + (block - begin) * 2 * HALF);
        }
        return now;
    }

    // O^T <- O^T + V^T P^T
    INLINE void add_values(int64_t begin, int64_t end) const {
        for (int64_t c = 0; c < n.d; c += BLOCK) {
            float *o = O + c * BLOCK, *below = o + PAIRS * BLOCK;
            load<0>(o, LD_BYTES), load<1>(o + PAIRS, LD_BYTES);
            load<2>(below, LD_BYTES), load<3>(below + PAIRS, LD_BYTES);
            for (int64_t block = begin; block < end; block++)
                add_tiles(reinterpret_cast<const char*>(keys.Vt + (block * n.d + c) / PAIRS * HALF), ROW_BYTES,
                          P + (block - begin) * 2 * HALF);
            store_tiles(o);
        }
    }

    const AttentionOf<Bf16>& a;
    const Sizes& n;
    const Keys& keys;
    int64_t i0;
    float scale;   // of the scores, in units of log(2)
    float most_l;  // before m must move
};

// ---- a tile of queries, and a call ----

namespace {

// Queries of a tile: whole strips.
int64_t tile_queries(const AttentionSizes& a) { return round_up(a.Br, BLOCK); }

// The scratch of a call. largest: the largest finite magnitude of each block of V.
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
        return {a.k_of(head), K + head * n.copied_keys(), V + head * n.values(),
                *std::max_element(of_blocks, of_blocks + n.blocks())};
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
    for (float* sums : {t.l, t.all}) std::fill_n(sums, queries, 0.0f);

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

// Fewer queries than a strip would leave lanes idle. The copy of an expanded V must have a size below 2^63.
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

    for_each_item(heads, (n.blocks() + TOGETHER - 1) / TOGETHER, a.threads, a.pool,
                  [&](int64_t head, int64_t item, int) {
                      const int64_t first = item * TOGETHER, end = std::min(first + TOGETHER, n.blocks());
                      for (int64_t block = first; block < end; block++) shared.pack(a, n, head, block);
                  });
    for_each_item(heads, tiles, a.threads, a.pool, [&](int64_t head, int64_t item, int thread) {
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
