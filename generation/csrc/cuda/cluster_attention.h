// The attention of a cluster's blocks to the keys of their units, for cluster.cu.
#pragma once

#include "cluster.h"

// A lane's keys and values of a strip.
struct Strip {
    float4 k[STRIP], v[STRIP];
};

// Loads a strip: keys from the element `at` on, of which the cache holds the first ones up to key `left`.
__device__ inline Strip load_strip(const Work& work, long long at, int left) {
    const Element *K = work.keys + at, *V = work.values + at;
    Strip strip;
    UNROLLED(i, STRIP) {
        const bool exists = i * ROUND < left;
        strip.k[i] = exists ? load4(K + i * ROUND * HEAD_DIM) : float4{};
        strip.v[i] = exists ? load4(V + i * ROUND * HEAD_DIM) : float4{};
    }
    return strip;
}
// The keys of text t from j0 on, without the key that this step adds.
__device__ inline Strip load_strip(const Work& work, int layer, int head, int t, int j0) {
    const Shared& s = own();
    const int lane = threadIdx.x % LANES, j = j0 + lane / KEY_LANES;
    const long long at = head_at(work, s.slot[t], layer, head) + j * HEAD_DIM + 4 * (lane % KEY_LANES);
    return load_strip(work, at, s.length[t] - j);
}

// A warp's first key of a unit.
__device__ inline int first_key(unsigned unit) {
    return unit % SPLITS * SPLIT_KEYS + threadIdx.x / LANES % TEAM * WARP_KEYS;
}

// A unit of this block, its `own`-th.
struct Unit {
    int own;
    unsigned number;
    int head, first;  // first: the warp's first key

    __device__ Unit(unsigned block, int own)
        : own(own), number(block + own * BLOCKS), head(number / SPLITS), first(first_key(number)) {}
};

// Part 4's online softmax of the rows from t0 on over the warp's keys, a strip at a time. strip: the first one.
__device__ inline void attend_to_keys(const Work& work, int layer, int texts, const Unit& unit, int t0,
                                      Strip& strip, State<1> (&rows)[TOGETHER]) {
    Shared& s = own();
    const int lane = threadIdx.x % LANES, column = 4 * (lane % KEY_LANES);
    const auto& qkv = s.qkv[unit.own];
    // The first key that this step adds, and the end of those that a row sees.
    const int added = s.length[t0], ends = added + (s.token[t0] >= 0);
    const int end = DRAFTS ? added + texts : ends;
    const float4 k_new = rounded(load4(&qkv[t0][1][column])), v_new = rounded(load4(&qkv[t0][2][column]));
    float4 q[TOGETHER];
    UNROLLED(r, TOGETHER) q[r] = load4(&qkv[t0 + r][0][column]);
#pragma unroll 1
    for (int j0 = unit.first; j0 < end; j0 += STRIP * ROUND) {
        float score[TOGETHER][STRIP], top[TOGETHER];
        UNROLLED(r, TOGETHER) top[r] = rows[r].m;
        UNROLLED(i, STRIP) {
            const int j = j0 + i * ROUND + lane / KEY_LANES;
            if (j == added) {
                strip.k[i] = k_new;
                strip.v[i] = v_new;
            }
            if (DRAFTS && j > added && j < end) {
                strip.k[i] = rounded(load4(&qkv[j - added][1][column]));
                strip.v[i] = rounded(load4(&qkv[j - added][2][column]));
            }
            UNROLLED(r, TOGETHER) {
                const float product = sum<1, KEY_LANES>(dot(0, q[r], strip.k[i]));
                score[r][i] = j < ends + r ? product : -INF;
                top[r] = fmaxf(top[r], score[r][i]);
            }
        }
        UNROLLED(r, TOGETHER) rows[r].add(score[r], top[r], [&](int i, int) { return strip.v[i]; });
        if (j0 + STRIP * ROUND < end) strip = load_strip(work, layer, unit.head, t0, j0 + STRIP * ROUND);
    }
}

// Merges the warps' results. KEY_LANES lanes take a text and, of one text, a block that its result goes to.
__device__ inline void merge_warps(const Unit& unit, int texts, const Exchange& exchange) {
    constexpr int GROUPS = THREADS / KEY_LANES, COPIES = COLLECTED ? 1 : BLOCKS;
    const int column = 4 * (threadIdx.x % KEY_LANES);
    Result& result = own().results[unit.number];
#pragma unroll 1
    for (int pair = threadIdx.x / KEY_LANES; pair < texts * COPIES; pair += GROUPS) {
        const int t = pair / COPIES;
        const float* of_warps = own().various[t];
        const State<1> row = merged<TEAM>(of_warps + column, of_warps + HEAD_DIM, PARTIAL);
        const float4 x = row.o[0];
        const float o[4] = {x.x, x.y, x.z, x.w}, state[2] = {row.m, row.l};
        if (COLLECTED) {
            store4(&result.output[t][column], x);
            if (column == 0) {
                result.state[t][0] = row.m;
                result.state[t][1] = row.l;
            }
        } else {
            exchange.store(&result.output[t][column], pair % BLOCKS, o);
            if (column == 0) exchange.store(result.state[t], pair % BLOCKS, state);
        }
    }
}

// Stores the new keys and values of a unit. The block that reads a key stores it, so the cache needs no fence.
__device__ inline void store_keys(const Work& work, int layer, int texts, const Unit& unit) {
    Shared& s = own();
#pragma unroll 1
    for (int i = threadIdx.x; i < texts * 2 * HEAD_DIM; i += THREADS) {
        const int t = i / (2 * HEAD_DIM), is_value = i / HEAD_DIM % 2, e = i % HEAD_DIM, j = s.length[t];
        if (s.token[t] < 0 || j / SPLIT_KEYS % SPLITS != unit.number % SPLITS) continue;
        Element* to = is_value ? work.values : work.keys;
        to[head_at(work, s.slot[t], layer, unit.head) + (long long)j * HEAD_DIM + e] =
            to_element(s.qkv[unit.own][t][1 + is_value][e]);
    }
}

// Attention of this block's units. `strip` is the first one. Each result goes to all blocks.
__device__ inline void attend(const Work& work, int layer, int texts, unsigned block, Strip strip,
                              const Exchange& exchange) {
    Shared& s = own();
    const int warp = threadIdx.x / LANES % TEAM, team = threadIdx.x / LANES / TEAM;
#pragma unroll 1
    for (int n = 0; n < OWN_UNITS; n++) {
        const Unit unit(block, n);
        if (UNITS % BLOCKS != 0 && unit.number >= UNITS) break;
#pragma unroll 1
        for (int t0 = team * TOGETHER; t0 < texts; t0 += TEAMS * TOGETHER) {
            State<1> rows[TOGETHER];
            attend_to_keys(work, layer, texts, unit, t0, strip, rows);
            if (t0 + TEAMS * TOGETHER < texts)
                strip = load_strip(work, layer, unit.head, t0 + TEAMS * TOGETHER, unit.first);
            UNROLLED(r, TOGETHER) {
                Result& result = s.results[unit.number];
                float* output = MERGED ? &s.various[t0 + r][warp * PARTIAL] : result.output[t0 + r];
                rows[r].store<KEY_LANES>(output, MERGED ? output + HEAD_DIM : result.state[t0 + r]);
            }
        }
        if (MERGED) {
            __syncthreads();
            merge_warps(unit, texts, exchange);
        }
        if (COLLECTED) exchange.copy_to_others(&s.results[unit.number], sizeof(Result));
        store_keys(work, layer, texts, unit);
        if (OWN_UNITS > 1) {
            __syncthreads();
            const Unit next(block, n + 1);
            if (next.number < UNITS && team < texts)
                strip = load_strip(work, layer, next.head, team, next.first);
        }
    }
}

// Four numbers of the attention's output, merged from the splits of their head.
__device__ inline float4 attended(int t, int k) {
    const Result& first = own().results[k / HEAD_DIM * SPLITS];
    const State<1> row =
        merged<SPLITS>(&first.output[t][k % HEAD_DIM], first.state[t], sizeof(Result) / sizeof(float));
    return row.o[0] * reciprocal_approx(row.l);
}
