// The GPT for few texts, in one launch that writes many tokens: layers, attention and the choice of a token.
//
// A cluster of BLOCKS blocks holds all matrices in its shared memory, each block the same share of the rows of
// every matrix. A pass of up to TEXTS texts goes through a layer in five phases: q, k and v; attention; its
// projection; the two halves of the MLP. In each, a block computes its share and stores it into the shared
// memory of the blocks that need it. A store counts its bytes at a barrier (mbarrier) of the block that gets
// it, so a block waits for its data alone and not for the cluster. Source: PTX ISA, 'st.async' and 'mbarrier'.
//
// A number is summed in the same order whatever else a pass holds, so a text has the same bits alone and in a
// pass. grid.cu reads the prompts.
//
// Why no block overwrites what another still reads, or completes its barrier too soon: all phases but the first
// need data of all blocks, which come after these have read the data of the phase before. So a block is at most
// two phases ahead of another, or three at a choice, and four barriers in turn are enough. What it stores goes
// to another buffer than those that the blocks behind still read.
//
// Macros beside those of decoder.h: BLOCKS of a cluster; TEAM, the warps that attend to a text together; STRIP,
// a lane's keys at a time.
#include "choose.h"
#include "ptx.h"

constexpr int TEAMS = WARPS / TEAM;  // warps that attend to a text together

// Rows of each matrix in a block's share, and of the head's, the last of which may be empty.
constexpr int SHARE = WIDTH / BLOCKS, QKV_ROWS = 3 * SHARE, FC_ROWS = 4 * SHARE;
constexpr int HEAD_ROWS = (VOCAB + BLOCKS - 1) / BLOCKS;

// Attention: a head's keys are split among blocks, and each split among the warps of a team, of which PARTS
// lanes take a key. A unit is a split of a head; block b has the units b, b + BLOCKS ...
constexpr int SPLITS = BLOCKS / HEADS > 0 ? BLOCKS / HEADS : 1, UNITS = HEADS * SPLITS;
constexpr int OWN_UNITS = (UNITS + BLOCKS - 1) / BLOCKS;
constexpr int PARTS = HEAD_DIM / 4, WARP_KEYS = LANES / PARTS, SPLIT_KEYS = TEAM * WARP_KEYS;
constexpr int ROUND = SPLITS * SPLIT_KEYS;  // keys until a split's next ones
constexpr int PARTIAL = HEAD_DIM + 4;       // numbers of a warp's result: O, not divided by its sum; m and l

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// Of a text's memory for one thing after the other: the warps' results of attention, the MLP's hidden numbers,
// the logits and the weights of the choice.
constexpr int LOGITS = BLOCKS * HEAD_ROWS, WEIGHTS = (LOGITS + 1) / 2 * 2;
constexpr int VARIOUS = (most(most(HIDDEN, TEAM* PARTIAL), WEIGHTS + 2 * VOCAB) + 3) / 4 * 4;

struct Layer {
    Weight qkv[QKV_ROWS][WIDTH], proj[SHARE][WIDTH], fc[FC_ROWS][WIDTH], out[SHARE][HIDDEN];
};

struct __align__(16) Vectors {
    Norm ln_1, ln_2;
#if BIAS
    float qkv[QKV_ROWS], proj[SHARE], fc[FC_ROWS], out[SHARE];
#endif
};

// A block's weights, as generation/cuda.py lays them out for it.
struct __align__(16) Weights {
    Layer layers[LAYERS];
    Weight head[HEAD_ROWS][WIDTH];
    Vectors vectors[LAYERS];
    Norm ln_f;
};

constexpr int BARRIERS = 4;

struct __align__(16) Shared {
    Weights weights;
    float x[TEXTS][WIDTH], normed[TEXTS][WIDTH];
    float qkv[OWN_UNITS][TEXTS][3][HEAD_DIM];  // of the token that is read
    float various[TEXTS][VARIOUS];
    float outputs[TEXTS][UNITS][HEAD_DIM], states[TEXTS][UNITS][2];  // attention's results; m and l
    double settings[TEXTS][SETTINGS];
    int slot[TEXTS], length[TEXTS], token[TEXTS], next[TEXTS];
    Barrier barriers[BARRIERS];
#if CLOCKS
    long long cycles[PHASES], last;
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES && TEXTS <= BLOCKS, "generation/cuda.py counts the same");

__device__ inline Shared& own() { return *reinterpret_cast<Shared*>(shared_memory()); }

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
    template <int n>
    __device__ void store(const void* p, unsigned block, const float (&x)[n]) const {
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
};

// A lane's numbers of K of each text: four at 4 lane, then at 4 LANES + 4 lane ...
template <int K, int texts = TEXTS>
struct Inputs {
    static constexpr int PIECES = (K + 4 * LANES - 1) / (4 * LANES);
    float4 at[PIECES][texts];

    template <class Load>
    __device__ explicit Inputs(const Load& load) {
        UNROLLED(i, PIECES) {
            const int k = 4 * (i * LANES + threadIdx.x % LANES);
            UNROLLED(t, texts) at[i][t] = k < K ? load(t, k) : float4{};
        }
    }
};

// Sums each of `count` groups of numbers, a power of two, over the lanes. The group of a lane is
// lane / (LANES / count). The additions are those of a tree over the lanes, from the farthest on, whatever the
// count.
template <int count, int numbers, int far = LANES / 2>
__device__ inline void reduce(float (&x)[count][numbers], int lane, float (&result)[numbers]) {
    if constexpr (count > 1) {
        float half[count / 2][numbers];
        const bool upper = lane & far;
        UNROLLED(i, count / 2)
            UNROLLED(j, numbers) {
                const float low = x[i][j], high = x[i + count / 2][j];
                half[i][j] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, far);
            }
        reduce<count / 2, numbers, far / 2>(half, lane, result);
    } else if constexpr (far > 0) {
        UNROLLED(j, numbers) x[0][j] += __shfl_xor_sync(~0u, x[0][j], far);
        reduce<1, numbers, far / 2>(x, lane, result);
    } else {
        UNROLLED(j, numbers) result[j] = x[0][j];
    }
}

// The products of a block's `rows` rows of a matrix with K numbers of each text. A warp has rows that follow
// each other. finish(row, text, product) returns what becomes of each; store(row, text, numbers, lane, lanes)
// gets those of this and the following rows in `lanes` lanes, after all of these lanes are finished.
template <int rows, int K, class Finish, class Store>
__device__ inline void products(const Weight (&matrix)[rows][K], int texts, const Inputs<K>& in,
                                const Finish& finish, const Store& store) {
    constexpr int each = (rows + WARPS - 1) / WARPS, numbers = each % 4 == 0 && rows % each == 0 ? 4 : 1;
    constexpr int count = power_of_two(each / numbers * TEXTS), lanes = LANES / count;
    static_assert(count <= LANES, "a warp has as many products as lanes at most");
    const int first = threadIdx.x / LANES * each, lane = threadIdx.x % LANES;
    float sums[count][numbers] = {};
    UNROLLED(i, each) {
        const int row = first + i;
        if (rows % each == 0 && rows / each == WARPS || row < rows) {
            UNROLLED(piece, Inputs<K>::PIECES) {
                const int k = 4 * (piece * LANES + lane);
                const float4 w = K % (4 * LANES) == 0 || k < K ? load4(&matrix[row][k]) : float4{};
                UNROLLED(t, TEXTS) {
                    float& sum = sums[i / numbers * TEXTS + t][i % numbers];
                    sum = dot(sum, w, in.at[piece][t]);
                }
            }
        }
    }
    float found[numbers];
    reduce(sums, lane, found);
    const int index = lane / lanes, row = first + index / TEXTS * numbers, text = index % TEXTS;
    const bool wanted = index < each / numbers * TEXTS && row < rows && text < texts;
    UNROLLED(i, numbers)
        if (wanted) found[i] = finish(row + i, text, found[i]);
    __syncwarp();
    if (wanted) store(row, text, found, lane % lanes, lanes);
}

// A lane's numbers of LayerNorm of x[t], as PyTorch's; called by whole warps. EIGHTH lanes have the whole row,
// for shorter sums over lanes.
__device__ inline Inputs<WIDTH, 1> normalised(const Norm& norm, int t) {
    constexpr int EIGHTH = 8;
    const float* x = own().x[t];
    const int lane = threadIdx.x % LANES;
    float4 row[(WIDTH + 4 * EIGHTH - 1) / (4 * EIGHTH)];
    float total = 0, squares = 0;
    UNROLLED(i, int(sizeof(row) / sizeof(float4))) {
        const int k = 4 * (i * EIGHTH + lane % EIGHTH);
        row[i] = k < WIDTH ? load4(x + k) : float4{};
        total += (row[i].x + row[i].y) + (row[i].z + row[i].w);
    }
    const float mean = sum<1, EIGHTH>(total) * (1.0f / WIDTH);
    UNROLLED(i, int(sizeof(row) / sizeof(float4))) {
        const float4 apart = {row[i].x - mean, row[i].y - mean, row[i].z - mean, row[i].w - mean};
        if (4 * (i * EIGHTH + lane % EIGHTH) < WIDTH) squares = dot(squares, apart, apart);
    }
    const float scale = rsqrtf(sum<1, EIGHTH>(squares) * (1.0f / WIDTH) + 1e-5f);
    return Inputs<WIDTH, 1>([&](int, int k) {
        const float4 at = load4(x + k), gain = load4(&norm.gain[k]);
        float4 y = {(at.x - mean) * scale * gain.x, (at.y - mean) * scale * gain.y,
                    (at.z - mean) * scale * gain.z, (at.w - mean) * scale * gain.w};
#if BIAS
        const float4 bias = load4(&norm.bias[k]);
        y.x += bias.x, y.y += bias.y, y.z += bias.z, y.w += bias.w;
#endif
        return y;
    });
}

// Of all texts. Each is normalised by one warp, or by all if it is alone.
__device__ inline Inputs<WIDTH> normalised(const Norm& norm) {
#if TEXTS == 1
    return normalised(norm, 0);
#else
    Shared& s = own();
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    for (int t = warp; t < TEXTS; t += WARPS) {
        const Inputs<WIDTH, 1> row = normalised(norm, t);
        UNROLLED(i, int(sizeof(row) / sizeof(float4))) {
            const int k = 4 * (i * LANES + lane);
            if (k < WIDTH) *reinterpret_cast<float4*>(&s.normed[t][k]) = row.at[i][0];
        }
    }
    __syncthreads();
    return Inputs<WIDTH>([&](int t, int k) { return load4(&s.normed[t][k]); });
#endif
}

// A lane's keys and values of a strip.
struct Strip {
    float4 k[STRIP], v[STRIP];
};

// Loads the strip of text t from key j0 on, but for the key that this step adds.
__device__ inline Strip load_strip(const Work& work, int layer, int head, int t, int j0) {
    const Shared& s = own();
    const int lane = threadIdx.x % LANES;
    const int cached = s.length[t], j = j0 + lane / PARTS;
    const long long at = head_at(work, s.slot[t], layer, head) + j * HEAD_DIM + 4 * (lane % PARTS);
    const Element *K = work.keys + at, *V = work.values + at;
    Strip strip;
    UNROLLED(i, STRIP) {
        const bool held = j + i * ROUND < cached;
        strip.k[i] = held ? load4(K + i * ROUND * HEAD_DIM) : float4{};
        strip.v[i] = held ? load4(V + i * ROUND * HEAD_DIM) : float4{};
    }
    return strip;
}

__device__ inline int first_key(int unit) {
    return unit % SPLITS * SPLIT_KEYS + threadIdx.x / LANES % TEAM * WARP_KEYS;
}

// An element as the cache keeps it.
__device__ inline float4 rounded(float4 x) {
    return {to_float(to_element(x.x)), to_float(to_element(x.y)), to_float(to_element(x.z)),
            to_float(to_element(x.w))};
}

// Attention of this block's units: part 4's online softmax over their keys, a strip at a time. `strip` is the
// first one. Each result goes to all blocks.
__device__ inline void attend(const Work& work, int layer, int texts, Strip strip, const Exchange& exchange) {
    Shared& s = own();
    const int warp = threadIdx.x / LANES % TEAM, team = threadIdx.x / LANES / TEAM;
    const int lane = threadIdx.x % LANES, part = lane % PARTS;
#pragma unroll 1
    for (int unit = rank(), mine = 0; unit < UNITS; unit += BLOCKS, mine++) {
        const int head = unit / SPLITS, first = first_key(unit);
#pragma unroll 1
        for (int t = team; t < texts; t += TEAMS) {
            const int cached = s.length[t], keys = cached + (s.token[t] >= 0);
            const float4 q = load4(&s.qkv[mine][t][0][4 * part]);
            float m = -INF, l = 0;
            float4 o = {};
#pragma unroll 1
            for (int j0 = first; j0 < keys; j0 += STRIP * ROUND) {
                float score[STRIP], highest = m;
                UNROLLED(i, STRIP) {
                    const int j = j0 + i * ROUND + lane / PARTS;
                    if (j == cached && j < keys) {
                        strip.k[i] = rounded(load4(&s.qkv[mine][t][1][4 * part]));
                        strip.v[i] = rounded(load4(&s.qkv[mine][t][2][4 * part]));
                    }
                    score[i] = -INF;
                    if (j0 + i * ROUND < keys) {  // some lane has a key
                        const float product = sum<1, PARTS>(dot(0, q, strip.k[i]));
                        if (j < keys) score[i] = product;
                    }
                    highest = fmaxf(highest, score[i]);
                }
                const float correction = exp2_approx(m - subtrahend(highest));
                m = highest, l *= correction;
                o.x *= correction, o.y *= correction, o.z *= correction, o.w *= correction;
                UNROLLED(i, STRIP) {
                    if (j0 + i * ROUND >= keys) break;
                    const float p = exp2_approx(score[i] - subtrahend(m));
                    l += p;
                    o.x = fmaf(p, strip.v[i].x, o.x), o.y = fmaf(p, strip.v[i].y, o.y);
                    o.z = fmaf(p, strip.v[i].z, o.z), o.w = fmaf(p, strip.v[i].w, o.w);
                }
                if (j0 + STRIP * ROUND < keys) strip = load_strip(work, layer, head, t, j0 + STRIP * ROUND);
            }
            if (t + TEAMS < texts) strip = load_strip(work, layer, head, t + TEAMS, first);
            const float all = largest<PARTS, LANES>(m), factor = exp2_approx(m - subtrahend(all));
            float* warps = &s.various[t][warp * PARTIAL];
            const float4 sums = {sum<PARTS, LANES>(o.x * factor), sum<PARTS, LANES>(o.y * factor),
                                 sum<PARTS, LANES>(o.z * factor), sum<PARTS, LANES>(o.w * factor)};
            const float total = sum<PARTS, LANES>(l * factor);
            if (lane < PARTS) *reinterpret_cast<float4*>(warps + 4 * part) = sums;
            if (lane == 0) warps[HEAD_DIM] = all, warps[HEAD_DIM + 1] = total;
        }
        __syncthreads();
        // Merge the warps. PARTS lanes take a text and the blocks that its result goes to.
        constexpr int GROUPS = THREADS / PARTS;
#pragma unroll 1
        for (int pair = threadIdx.x / PARTS; pair < texts * BLOCKS; pair += GROUPS) {
            const int t = pair / BLOCKS;
            const float* of_warps = s.various[t];
            float m = -INF, l = 0, o[4] = {};
            UNROLLED(w, TEAM) m = fmaxf(m, of_warps[w * PARTIAL + HEAD_DIM]);
            UNROLLED(w, TEAM) {
                const float factor = exp2_approx(of_warps[w * PARTIAL + HEAD_DIM] - subtrahend(m));
                const float4 more = load4(&of_warps[w * PARTIAL + 4 * part]);
                l = fmaf(of_warps[w * PARTIAL + HEAD_DIM + 1], factor, l);
                o[0] = fmaf(more.x, factor, o[0]), o[1] = fmaf(more.y, factor, o[1]);
                o[2] = fmaf(more.z, factor, o[2]), o[3] = fmaf(more.w, factor, o[3]);
            }
            exchange.store(&s.outputs[t][unit][4 * part], pair % BLOCKS, o);
            const float state[2] = {m, l};
            if (part == 0) exchange.store(s.states[t][unit], pair % BLOCKS, state);
        }
        // The block that reads a key has also stored it, so the cache needs no fence.
#pragma unroll 1
        for (int i = threadIdx.x; i < texts * 2 * HEAD_DIM; i += THREADS) {
            const int t = i / (2 * HEAD_DIM), which = i / HEAD_DIM % 2, e = i % HEAD_DIM, j = s.length[t];
            if (s.token[t] < 0 || j / SPLIT_KEYS % SPLITS != unit % SPLITS) continue;
            Element* to = which == 0 ? work.keys : work.values;
            to[head_at(work, s.slot[t], layer, head) + (long long)j * HEAD_DIM + e] =
                to_element(s.qkv[mine][t][1 + which][e]);
        }
        if (OWN_UNITS > 1) {
            __syncthreads();
            if (unit + BLOCKS < UNITS && team < texts)
                strip = load_strip(work, layer, (unit + BLOCKS) / SPLITS, team, first_key(unit + BLOCKS));
        }
    }
}

// Four numbers of the attention's output, merged from the splits of their head.
__device__ inline float4 attended(int t, int k) {
    const int unit = k / HEAD_DIM * SPLITS;  // the first of its head
    const auto* outputs = own().outputs[t] + unit;
    const auto* states = own().states[t] + unit;
    float m = -INF, l = 0;
    float4 o = {};
    UNROLLED(i, SPLITS) m = fmaxf(m, states[i][0]);
    UNROLLED(i, SPLITS) {
        const float factor = exp2_approx(states[i][0] - subtrahend(m));
        const float4 more = load4(&outputs[i][k % HEAD_DIM]);
        l = fmaf(states[i][1], factor, l);
        o.x = fmaf(more.x, factor, o.x), o.y = fmaf(more.y, factor, o.y);
        o.z = fmaf(more.z, factor, o.z), o.w = fmaf(more.w, factor, o.w);
    }
    const float share = 1 / l;
    return {o.x * share, o.y * share, o.z * share, o.w * share};
}

// A token for each of `texts` texts through all layers. The logits go to various[t] of block t.
__device__ inline void step(const Work& work, int texts, Exchange& exchange) {
    Shared& s = own();
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned block = rank();
    for (int t = warp; t < texts; t += WARPS) {
        const int token = max(s.token[t], 0), position = min(s.length[t], work.capacity - 1);
        for (int k = 4 * lane; k < WIDTH; k += 4 * LANES) {
            const float4 a = load4(work.tokens + token * WIDTH + k),
                         b = load4(work.positions + position * WIDTH + k);
            *reinterpret_cast<float4*>(&s.x[t][k]) = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
        }
    }
    __syncthreads();
    count(s, EMBEDDING);
    int units = 0;  // of this block
    for (int unit = block; unit < UNITS; unit += BLOCKS) units++;
    const int row_bytes = texts * int(sizeof(float));
    // x + y, in all blocks
    const auto sum_with = [&](const float* bias) {
        return [&s, bias, block](int row, int t, float y) {
            return s.x[t][block * SHARE + row] + (BIAS ? y + bias[row] : y);
        };
    };
    const auto to_x = [&](int row, int t, const auto& y, int part, int parts) {
        exchange.store_to_all(&s.x[t][block * SHARE + row], y, part, parts);
    };
#pragma unroll 1  // the code of one layer stays in the instruction cache
    for (int l = 0; l < LAYERS; l++) {
        const Layer& layer = s.weights.layers[l];
        const Vectors& vectors = s.weights.vectors[l];
#if BIAS
        const float *qkv = vectors.qkv, *proj = vectors.proj, *fc = vectors.fc, *out = vectors.out;
#else
        const float *qkv = nullptr, *proj = nullptr, *fc = nullptr, *out = nullptr;
#endif
        exchange.expect(units * 3 * HEAD_DIM * row_bytes);
        Strip strip;
        if (const int t = warp / TEAM; block < UNITS && t < texts)
            strip = load_strip(work, l, block / SPLITS, t, first_key(block));
        products(
            layer.qkv, texts, normalised(vectors.ln_1),
            [&](int row, int, float y) { return (BIAS ? y + qkv[row] : y) * (row < SHARE ? work.scale : 1); },
            [&](int first, int t, const auto& y, int part, int parts) {
                for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++) {
                    const int row = first + n, column = block * SHARE + row % SHARE;
                    const int unit = column / HEAD_DIM * SPLITS;  // the first of its head
                    for (int i = unit + part; i < unit + SPLITS; i += parts)
                        exchange.store(&s.qkv[i / BLOCKS][t][row / SHARE][column % HEAD_DIM], i % BLOCKS, y[n]);
                }
            });
        exchange.wait(QKV);
        exchange.expect(UNITS * (HEAD_DIM + 2) * row_bytes);
        attend(work, l, texts, strip, exchange);
        exchange.wait(ATTENTION);
        exchange.expect(WIDTH * row_bytes);
        products(layer.proj, texts, Inputs<WIDTH>(attended), sum_with(proj), to_x);
        exchange.wait(PROJECTION);
        exchange.expect(HIDDEN * row_bytes);
        products(
            layer.fc, texts, normalised(vectors.ln_2),
            [&](int row, int, float y) { return gelu(BIAS ? y + fc[row] : y); },
            [&](int row, int t, const auto& y, int part, int parts) {
                exchange.store_to_all(&s.various[t][block * FC_ROWS + row], y, part, parts);
            });
        exchange.wait(MLP_UP);
        exchange.expect(WIDTH * row_bytes);
        products(layer.out, texts, Inputs<HIDDEN>([&](int t, int k) { return load4(&s.various[t][k]); }),
                 sum_with(out), to_x);
        exchange.wait(MLP_DOWN);
    }
    exchange.expect(block < texts ? LOGITS * int(sizeof(float)) : 0);
    products(
        s.weights.head, texts, normalised(s.weights.ln_f), [](int, int, float y) { return y; },
        [&](int row, int t, const auto& y, int part, int) {
            // Rows beyond the vocabulary, too: block t then knows that all others have come as far.
            for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
                if (part == 0) exchange.store(&s.various[t][block * HEAD_ROWS + row + n], t, y[n]);
        });
    exchange.wait(HEAD);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Work work) {
    Shared& s = own();
    const int block = rank(), clusters = gridDim.x / BLOCKS, cluster = blockIdx.x / BLOCKS;
    const int thread = threadIdx.x, lane = thread % LANES;
    {
        const auto* from = reinterpret_cast<const uint4*>(work.weights + block);
        auto* to = reinterpret_cast<uint4*>(&s.weights);
        for (int i = thread; i < int(sizeof(Weights) / sizeof(uint4)); i += THREADS)
            copy_async(to + i, from + i);
        wait_for_copies();
        if (thread < BARRIERS) initialise(s.barriers[thread]);
        start_counting(s);
        sync_cluster();
    }
    Exchange exchange;
    for (int start = cluster * TEXTS; start < work.count; start += clusters * TEXTS) {
        const int texts = min(TEXTS, work.count - start);
        __syncthreads();
        if (thread < texts) {
            const Text text = work.texts[start + thread];
            s.slot[thread] = text.slot, s.length[thread] = text.length, s.token[thread] = text.token;
            for (int i = 0; i < SETTINGS; i++) s.settings[thread][i] = work.sampling[text.slot * SETTINGS + i];
        }
        sync_cluster();  // the first row may only choose, and other blocks' choices must come after this
        for (int row = 0; row < work.rows; row++) {
            if (row > 0 && thread < texts) {
                s.length[thread] += s.token[thread] >= 0;
                s.token[thread] = s.next[thread];
            }
            __syncthreads();
            bool reads = false;
            for (int t = 0; t < texts; t++) reads = reads || s.token[t] >= 0;
            const int t = block,
                      place = row * work.count + start + t;  // the text whose token this block chooses
            const bool chooses = t < texts && thread < LANES;
            const double uniform = chooses ? work.uniforms[place] : 0;
            if (reads) step(work, texts, exchange);
            if (chooses) {
                const long long at = (long long)s.slot[t] * VOCAB;
                float *found = s.various[t], *kept = work.logits + at;
                const bool last = row + 1 == work.rows;
                for (int i = lane; i < VOCAB; i += LANES) {
                    if (s.token[t] < 0) found[i] = kept[i];
                    if (work.every) work.every[(long long)place * VOCAB + i] = found[i];
                    if (last) kept[i] = found[i];
                }
                __syncwarp();
                auto* memory = reinterpret_cast<double*>(found + WEIGHTS);
                const int token = choose(found, s.settings[t], work.bias + at, work.seen + at,
                                         work.written + at, uniform, memory);
                for (unsigned other = lane; other < BLOCKS; other += LANES)
                    exchange.store(&s.next[t], other, __int_as_float(max(token, 0)));
                if (lane == 0) {
                    work.chosen[place] = token;
                    if (token >= 0) work.seen[at + token]++, work.written[at + token]++;
                }
            }
            exchange.expect(texts * int(sizeof(int)));
            exchange.wait(SAMPLING);
        }
    }
    report(s, work);
    sync_cluster();  // no block ends while another may store into its shared memory
}
