// The GPT for few texts, in one launch that writes many tokens: layers, attention and the choice of a token.
//
// A cluster of BLOCKS blocks holds all matrices in its shared memory, each block the same share of the rows of
// every matrix. A pass of up to TEXTS texts goes through a layer in five phases: q, k and v; attention; its
// projection; the two halves of the MLP. In each, a block computes its share and stores it into the shared
// memory of the blocks that need it. A store counts its bytes at a barrier (mbarrier) of the block that gets
// it, so a block waits for its data alone and not for the cluster. Many numbers of a pass of several texts go
// as one copy, from where they are to the same place in the other blocks. Source: PTX ISA, 'st.async',
// 'cp.async.bulk' and 'mbarrier'.
//
// A number is summed in the same order whatever other texts a pass of this many holds. grid.cu reads the
// prompts.
//
// With DRAFTS the TEXTS of a pass are rows of one text: its pending token and the guesses of the next ones. All
// blocks guess the same. A wrong guess is forgotten, and the next row overwrites its key and value.
//
// Why no block overwrites what another still reads, or completes its barrier too soon: all phases but the first
// need data of all blocks, which come after these have read the data of the phase before. So a block is at most
// two phases ahead of another, or three at a choice, and four barriers in turn are enough. What it stores goes
// to another buffer than those that the blocks behind still read.
//
// Macros beside those of decoder.h: BLOCKS of a cluster; TEAM, the warps that attend to a text together; STRIP,
// a lane's keys at a time; DRAFTS.
#include "guess.h"
#include "ptx.h"

constexpr int TEAMS = WARPS / TEAM;           // teams of a block, which attend to a text each
constexpr int TOGETHER = DRAFTS ? TEXTS : 1;  // rows that see the same keys, which they load once
static_assert(TEAMS == 1 || !DRAFTS, "all warps attend to the rows of a text");

// A block collects its results for several texts before it sends them. Those of one text go as they are found.
constexpr bool COLLECTED = TEXTS > 1;
constexpr bool MERGED =
    TEAM > 1 || !COLLECTED;  // whether warps' results of attention are merged, and then sent

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

// A block's weights, as engines/cuda.py lays them out for it.
struct __align__(16) Weights {
    Layer layers[LAYERS];
    Weight head[HEAD_ROWS][WIDTH];
    Vectors vectors[LAYERS];
    Norm ln_f;
};

constexpr int BARRIERS = 4;

// Of a unit of attention: each text's output, not divided by its sum, and m and l.
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

// Sums each of `count` groups of numbers, a power of two, over the 2 far lanes whose numbers differ in the bits
// up to `far`. A lane gets the group that its highest of these bits tell. The additions are those of a tree
// over the lanes, from the farthest on, whatever the count. Sums `all`, too, for all lanes.
template <int far, int count, int numbers, class... All>
__device__ inline void reduce(float (&x)[count][numbers], float (&result)[numbers], All&... all) {
    if constexpr (far > 0) ((all += __shfl_xor_sync(~0u, all, far)), ...);
    if constexpr (count > 1) {
        float half[count / 2][numbers];
        const bool upper = threadIdx.x & far;
        UNROLLED(i, count / 2)
            UNROLLED(j, numbers) {
                const float low = x[i][j], high = x[i + count / 2][j];
                half[i][j] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, far);
            }
        reduce<far / 2>(half, result, all...);
    } else if constexpr (far > 0) {
        UNROLLED(j, numbers) x[0][j] += __shfl_xor_sync(~0u, x[0][j], far);
        reduce<far / 2>(x, result, all...);
    } else {
        UNROLLED(j, numbers) result[j] = x[0][j];
    }
}

// 1 / the standard deviation of a row, as PyTorch's LayerNorm has it.
__device__ inline float inverse_deviation(float squares) { return rsqrtf(squares * (1.0f / WIDTH) + 1e-5f); }

// How a warp multiplies: `each` rows of a matrix, which follow each other, by `lanes` lanes each. A lane has
// four inputs at 4 lane, then at 4 lanes + 4 lane ... Rows of 16 bits that are loaded together take these
// pieces in another order: the same piece of each would be in the same banks.
template <int rows, int K>
struct Split {
    static constexpr int each = (rows + WARPS - 1) / WARPS, lanes = LANES / power_of_two(each);
    static constexpr int pieces = (K + 4 * lanes - 1) / (4 * lanes);
    static constexpr int together = sizeof(Weight) == 2 && lanes < LANES / 2 ? LANES / 2 / lanes : 1;
    static constexpr int orders = pieces % together == 0 ? together : 1;
    static_assert(each <= LANES, "engines/cuda.py takes no more");
    __device__ static int input(int piece) {
        const int lane = threadIdx.x % LANES;
        return 4 * ((piece ^ lane / lanes % orders) * lanes + lane % lanes);
    }
};

// The products of a block's rows of a matrix with K numbers of each text, of which in(text, piece) returns a
// lane's. finish(row, text, product) returns what becomes of each; store(row, text, numbers, lane, lanes) gets
// those of this and the following rows in `lanes` lanes. squares: the lane's sum of them, if the inputs are not
// yet divided by their standard deviation.
template <int rows, int K, class In, class Finish, class Store, class... Squares>
__device__ inline void products(const Weight (&matrix)[rows][K], int texts, const In& in, const Finish& finish,
                                const Store& store, Squares... squares) {
    using Of = Split<rows, K>;
    constexpr int count = power_of_two(TEXTS) < Of::lanes ? power_of_two(TEXTS) : Of::lanes;
    constexpr int numbers = (TEXTS + count - 1) / count, same = Of::lanes / count;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * Of::each, own_row = lane / Of::lanes;
    const int row = first + own_row;
    const bool any = own_row < Of::each && row < rows;
    const Weight* weights = matrix[any ? row : 0];
    float sums[count][numbers] = {};
    UNROLLED(piece, Of::pieces) {
        const int k = Of::input(piece);
        if (K % (4 * Of::lanes) != 0 && k >= K) continue;  // the pieces of some lanes are in another order
        const float4 w = load4(weights + k);
        UNROLLED(t, TEXTS) {
            float& sum = sums[t / numbers][t % numbers];
            sum = dot(sum, w, in(t, piece));
        }
    }
    float found[numbers];
    reduce<Of::lanes / 2>(sums, found, squares...);
    float scale = 1;
    ((scale = inverse_deviation(squares)), ...);
    if constexpr (TEXTS == 1 && Of::each % 4 == 0 && rows % Of::each == 0) {
        const float y = finish(any ? row : 0, 0, found[0] * scale);
        UNROLLED(quad, Of::each / 4) {
            float four[4];
            UNROLLED(i, 4) four[i] = __shfl_sync(~0u, y, (4 * quad + i) * Of::lanes);
            if (first < rows) store(first + 4 * quad, 0, four, lane, LANES);
        }
    } else {
        UNROLLED(n, numbers) {
            const int text = lane % Of::lanes / same * numbers + n;
            if (!any || text >= texts) continue;
            const float y[1] = {finish(row, text, found[n] * scale)};
            store(row, text, y, lane % same, same);
        }
    }
}

// A lane's numbers of a row for a Split.
template <class Of>
struct Row {
    float4 at[Of::pieces];
};

// LayerNorm of x[t], as PyTorch's, but not divided by the standard deviation; squares: the lane's sum of those
// of its numbers less their mean. Called by whole warps.
template <class Of>
__device__ inline Row<Of> centred(const Norm& norm, int t, float& squares) {
    Row<Of> row;
    float total = 0;
    UNROLLED(i, Of::pieces) {
        const int k = Of::input(i);
        row.at[i] = k < WIDTH ? load4(&own().x[t][k]) : float4{};
        total += (row.at[i].x + row.at[i].y) + (row.at[i].z + row.at[i].w);
    }
    const float mean = sum<1, Of::lanes>(total) * (1.0f / WIDTH);
    squares = 0;
    UNROLLED(i, Of::pieces) {
        const int k = Of::input(i);
        if (k >= WIDTH) continue;
        float4& x = row.at[i];
        x = {x.x - mean, x.y - mean, x.z - mean, x.w - mean};
        squares += dot(0, x, x);
        const float4 gain = load4(&norm.gain[k]);
        x = {x.x * gain.x, x.y * gain.y, x.z * gain.z, x.w * gain.w};
    }
    return row;
}

// LayerNorm of each text to `normed`, by one warp each.
__device__ inline void normalise(const Norm& norm) {
    using Of = Split<WARPS, WIDTH>;  // all lanes
    const int warp = threadIdx.x / LANES;
    for (int t = warp; t < TEXTS; t += WARPS) {
        float squares;
        const Row<Of> row = centred<Of>(norm, t, squares);
        const float scale = inverse_deviation(sum<1, LANES>(squares));
        UNROLLED(i, Of::pieces) {
            const int k = Of::input(i);
            if (k >= WIDTH) continue;
            const float4 x = row.at[i];
            float4 y = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
#if BIAS
            const float4 bias = load4(&norm.bias[k]);
            y.x += bias.x, y.y += bias.y, y.z += bias.z, y.w += bias.w;
#endif
            *reinterpret_cast<float4*>(&own().normed[t][k]) = y;
        }
    }
    __syncthreads();
}

// products() with LayerNorm of the texts. Each warp normalises one text without bias for itself, and its sum of
// squares is added up beside the products.
template <int rows, class Finish, class Store>
__device__ inline void products_of_normalised(const Weight (&matrix)[rows][WIDTH], const Norm& norm, int texts,
                                              const Finish& finish, const Store& store) {
    using Of = Split<rows, WIDTH>;
#if TEXTS == 1 && !BIAS
    float squares;
    const Row<Of> row = centred<Of>(norm, 0, squares);
    products(matrix, texts, [&](int, int piece) { return row.at[piece]; }, finish, store, squares);
#else
    normalise(norm);
    const auto in = [](int t, int piece) { return load4(&own().normed[t][Of::input(piece)]); };
    products(matrix, texts, in, finish, store);
#endif
}

// A lane's keys and values of a strip.
struct Strip {
    float4 k[STRIP], v[STRIP];
};

// Loads a strip: keys from the element `at` on, of which the cache holds the first ones up to key `left`.
__device__ inline Strip load_strip(const Work& work, long long at, int left) {
    const Element *K = work.keys + at, *V = work.values + at;
    Strip strip;
    UNROLLED(i, STRIP) {
        const bool held = i * ROUND < left;
        strip.k[i] = held ? load4(K + i * ROUND * HEAD_DIM) : float4{};
        strip.v[i] = held ? load4(V + i * ROUND * HEAD_DIM) : float4{};
    }
    return strip;
}
// Of text t, from key j0 on, without the key that this step adds.
__device__ inline Strip load_strip(const Work& work, int layer, int head, int t, int j0) {
    const Shared& s = own();
    const int lane = threadIdx.x % LANES, j = j0 + lane / PARTS;
    const long long at = head_at(work, s.slot[t], layer, head) + j * HEAD_DIM + 4 * (lane % PARTS);
    return load_strip(work, at, s.length[t] - j);
}

__device__ inline int first_key(unsigned unit) {
    return unit % SPLITS * SPLIT_KEYS + threadIdx.x / LANES % TEAM * WARP_KEYS;
}

// An element as the cache keeps it.
__device__ inline float4 rounded(float4 x) {
    return {to_float(to_element(x.x)), to_float(to_element(x.y)), to_float(to_element(x.z)),
            to_float(to_element(x.w))};
}

// Attention of this block's units: part 4's online softmax over their keys, a strip at a time. `strip` is the
// first one. Each result goes to all blocks.
__device__ inline void attend(const Work& work, int layer, int texts, unsigned block, Strip strip,
                              const Exchange& exchange) {
    Shared& s = own();
    const int warp = threadIdx.x / LANES % TEAM, team = threadIdx.x / LANES / TEAM;
    const int lane = threadIdx.x % LANES, part = lane % PARTS;
#pragma unroll 1
    for (int mine = 0; mine < OWN_UNITS; mine++) {
        const unsigned unit = block + mine * BLOCKS;
        if (UNITS % BLOCKS != 0 && unit >= UNITS) break;
        const int head = unit / SPLITS, first = first_key(unit);
#pragma unroll 1
        for (int t0 = team * TOGETHER; t0 < texts; t0 += TEAMS * TOGETHER) {
            // The first key that this step adds, and the end of those that a row sees.
            const int added = s.length[t0], ends = added + (s.token[t0] >= 0);
            const int end = DRAFTS ? added + texts : ends;
            const float4 k_new = rounded(load4(&s.qkv[mine][t0][1][4 * part]));
            const float4 v_new = rounded(load4(&s.qkv[mine][t0][2][4 * part]));
            float4 q[TOGETHER], o[TOGETHER];
            float m[TOGETHER], l[TOGETHER];
            UNROLLED(r, TOGETHER) {
                q[r] = load4(&s.qkv[mine][t0 + r][0][4 * part]);
                m[r] = -INF, l[r] = 0, o[r] = {};
            }
#pragma unroll 1
            for (int j0 = first; j0 < end; j0 += STRIP * ROUND) {
                float score[TOGETHER][STRIP], highest[TOGETHER];
                UNROLLED(r, TOGETHER) highest[r] = m[r];
                UNROLLED(i, STRIP) {
                    const int j = j0 + i * ROUND + lane / PARTS;
                    if (j == added) strip.k[i] = k_new, strip.v[i] = v_new;
                    if (DRAFTS && j > added && j < end) {
                        strip.k[i] = rounded(load4(&s.qkv[mine][j - added][1][4 * part]));
                        strip.v[i] = rounded(load4(&s.qkv[mine][j - added][2][4 * part]));
                    }
                    UNROLLED(r, TOGETHER) {
                        const float product = sum<1, PARTS>(dot(0, q[r], strip.k[i]));
                        score[r][i] = j < ends + r ? product : -INF;
                        highest[r] = fmaxf(highest[r], score[r][i]);
                    }
                }
                UNROLLED(r, TOGETHER) {
                    const float correction = exp2_approx(m[r] - subtrahend(highest[r]));
                    m[r] = highest[r], l[r] *= correction;
                    o[r].x *= correction, o[r].y *= correction, o[r].z *= correction, o[r].w *= correction;
                    UNROLLED(i, STRIP) {
                        const float p = exp2_approx(score[r][i] - subtrahend(m[r]));
                        const float4 v = strip.v[i];
                        l[r] += p;
                        o[r].x = fmaf(p, v.x, o[r].x), o[r].y = fmaf(p, v.y, o[r].y);
                        o[r].z = fmaf(p, v.z, o[r].z), o[r].w = fmaf(p, v.w, o[r].w);
                    }
                }
                if (j0 + STRIP * ROUND < end) strip = load_strip(work, layer, head, t0, j0 + STRIP * ROUND);
            }
            if (t0 + TEAMS * TOGETHER < texts)
                strip = load_strip(work, layer, head, t0 + TEAMS * TOGETHER, first);
            UNROLLED(r, TOGETHER) {
                const float all = largest<PARTS, LANES>(m[r]), factor = exp2_approx(m[r] - subtrahend(all));
                float* output = MERGED ? &s.various[t0 + r][warp * PARTIAL] : s.results[unit].output[t0 + r];
                float* state = MERGED ? output + HEAD_DIM : s.results[unit].state[t0 + r];
                const float4 sums = {sum<PARTS, LANES>(o[r].x * factor), sum<PARTS, LANES>(o[r].y * factor),
                                     sum<PARTS, LANES>(o[r].z * factor), sum<PARTS, LANES>(o[r].w * factor)};
                const float total = sum<PARTS, LANES>(l[r] * factor);
                if (lane < PARTS) *reinterpret_cast<float4*>(output + 4 * part) = sums;
                if (lane == 0) state[0] = all, state[1] = total;
            }
        }
        if (MERGED) {
            __syncthreads();
            // Merge the warps. PARTS lanes take a text and, of one text, a block that its result goes to.
            constexpr int GROUPS = THREADS / PARTS, COPIES = COLLECTED ? 1 : BLOCKS;
#pragma unroll 1
            for (int pair = threadIdx.x / PARTS; pair < texts * COPIES; pair += GROUPS) {
                const int t = pair / COPIES;
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
                Result& result = s.results[unit];
                const float state[2] = {m, l};
                if (COLLECTED) {
                    *reinterpret_cast<float4*>(&result.output[t][4 * part]) = {o[0], o[1], o[2], o[3]};
                    if (part == 0) result.state[t][0] = m, result.state[t][1] = l;
                } else {
                    exchange.store(&result.output[t][4 * part], pair % BLOCKS, o);
                    if (part == 0) exchange.store(result.state[t], pair % BLOCKS, state);
                }
            }
        }
        if (COLLECTED) exchange.copy_to_others(&s.results[unit], sizeof(Result));
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
    const auto* results = own().results + unit;
    float m = -INF, l = 0;
    float4 o = {};
    UNROLLED(i, SPLITS) m = fmaxf(m, results[i].state[t][0]);
    UNROLLED(i, SPLITS) {
        const float factor = exp2_approx(results[i].state[t][0] - subtrahend(m));
        const float4 more = load4(&results[i].output[t][k % HEAD_DIM]);
        l = fmaf(results[i].state[t][1], factor, l);
        o.x = fmaf(more.x, factor, o.x), o.y = fmaf(more.y, factor, o.y);
        o.z = fmaf(more.z, factor, o.z), o.w = fmaf(more.w, factor, o.w);
    }
    const float share = reciprocal_approx(l);
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
    const int units =
        UNITS % BLOCKS == 0 ? OWN_UNITS : (UNITS - int(block) + BLOCKS - 1) / BLOCKS;  // of this block
    const int row_bytes = texts * int(sizeof(float));
    // x + y, in all blocks
    const auto sum_with = [&](const float* bias) {
        return [&s, bias, block](int row, int t, float y) {
            return s.x[t][block * SHARE + row] + (BIAS ? y + bias[row] : y);
        };
    };
    // Results are collected in memory that no thread reads in that phase.
    float *of_x = s.normed[0], *of_qkv = s.various[0];
    const auto collect = [](float* to, const auto& y, int part) {
        for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
            if (part == 0) to[n] = y[n];
    };
    const auto to_x = [&](int row, int t, const auto& y, int part, int parts) {
        if (COLLECTED) {
            collect(of_x + t * SHARE + row, y, part);
        } else {
            exchange.store_to_all(&s.x[t][block * SHARE + row], y, part, parts);
        }
    };
    const auto send_x = [&] {
        if (COLLECTED)
            exchange.store_collected<SHARE, SHARE>(
                of_x, texts, BLOCKS,
                [&](int t, int row, int to, const auto& store) { store(&s.x[t][block * SHARE + row], to); });
    };
    const auto send_qkv = [&](int t, int row, int split, const auto& store) {
        const int column = block * SHARE + row % SHARE, i = column / HEAD_DIM * SPLITS + split;
        store(&s.qkv[i / BLOCKS][t][row / SHARE][column % HEAD_DIM], i % BLOCKS);
    };
    // The first strip of a warp's first text.
    const bool attends = block < UNITS && warp / TEAM < texts;
    const int j0 = first_key(block) + lane / PARTS, left = attends ? s.length[warp / TEAM] - j0 : 0;
    const long long layer_keys = (long long)HEADS * work.capacity * HEAD_DIM;
    const long long own_keys =
        head_at(work, attends ? s.slot[warp / TEAM] : 0, 0, attends ? block / SPLITS : 0) + j0 * HEAD_DIM +
        4 * (lane % PARTS);
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
        const Strip strip = load_strip(work, own_keys + l * layer_keys, left);
        products_of_normalised(
            layer.qkv, vectors.ln_1, texts,
            [&](int row, int, float y) { return (BIAS ? y + qkv[row] : y) * (row < SHARE ? work.scale : 1); },
            [&](int first, int t, const auto& y, int part, int parts) {
                if (COLLECTED) return collect(of_qkv + t * QKV_ROWS + first, y, part);
                for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
                    for (int split = part; split < SPLITS; split += parts)
                        send_qkv(t, first + n, split,
                                 [&](const float* p, unsigned to) { exchange.store(p, to, y[n]); });
            });
        if (COLLECTED) exchange.store_collected<QKV_ROWS, SHARE>(of_qkv, texts, SPLITS, send_qkv);
        exchange.wait(QKV);
        if (COLLECTED && MERGED) __syncthreads();  // all warps have sent what attend() overwrites
        exchange.expect(COLLECTED ? (UNITS - units) * int(sizeof(Result)) : UNITS * (HEAD_DIM + 2) * row_bytes);
        attend(work, l, texts, block, strip, exchange);
        exchange.wait(ATTENTION);
        exchange.expect(WIDTH * row_bytes);
        const auto at = [](int piece) { return Split<SHARE, WIDTH>::input(piece); };
        if constexpr (COLLECTED) {  // each warp merges the splits of one text, for all warps
            for (int t = warp; t < texts; t += WARPS)
                for (int k = 4 * lane; k < WIDTH; k += 4 * LANES)
                    *reinterpret_cast<float4*>(&s.various[t][k]) = attended(t, k);
            __syncthreads();
            const auto in = [&](int t, int piece) { return load4(&s.various[t][at(piece)]); };
            products(layer.proj, texts, in, sum_with(proj), to_x);
        } else {
            const auto in = [&](int t, int piece) { return attended(t, at(piece)); };
            products(layer.proj, texts, in, sum_with(proj), to_x);
        }
        send_x();
        exchange.wait(PROJECTION);
        exchange.expect((COLLECTED ? HIDDEN - FC_ROWS : HIDDEN) * row_bytes);
        products_of_normalised(
            layer.fc, vectors.ln_2, texts, [&](int row, int, float y) { return gelu(BIAS ? y + fc[row] : y); },
            [&](int row, int t, const auto& y, int part, int parts) {
                float* to = &hidden(t, block * FC_ROWS + row);
                if (COLLECTED) return collect(to, y, part);
                exchange.store_to_all(to, y, part, parts);
            });
        if (COLLECTED) exchange.copy_to_others(&hidden(0, block * FC_ROWS), FC_ROWS * row_bytes);
        exchange.wait(MLP_UP);
        exchange.expect(WIDTH * row_bytes);
        products(
            layer.out, texts,
            [](int t, int piece) { return load4(&hidden(t, Split<SHARE, HIDDEN>::input(piece))); },
            sum_with(out), to_x);
        send_x();
        exchange.wait(MLP_DOWN);
    }
    exchange.expect(block < texts ? LOGITS * int(sizeof(float)) : 0);
    products_of_normalised(
        s.weights.head, s.weights.ln_f, texts, [](int, int, float y) { return y; },
        [&](int row, int t, const auto& y, int part, int) {
            // Rows beyond the vocabulary, too: block t then knows that all others have come as far.
            for (int n = 0; n < int(sizeof(y) / sizeof(float)); n++)
                if (part == 0) exchange.store(&s.various[t][block * HEAD_ROWS + row + n], t, y[n]);
        });
    exchange.wait(HEAD);
}

#if DRAFTS
// Writes the tokens of a text. Block t chooses the token after row t, as if all guesses up to it were right.
__device__ inline void write_with_drafts(const Work& work, int number, Exchange& exchange) {
    Shared& s = own();
    const int block = rank(), thread = threadIdx.x, lane = thread % LANES;
    const Text text = work.texts[number];
    const long long at = (long long)text.slot * VOCAB;
    float* found = s.various[block % TEXTS];
    auto* memory = reinterpret_cast<double*>(found + WEIGHTS);
    int held = text.length, pending = text.token, passes = 0, drafted = 0, guesses = 0;
    int known = min(held, CONTEXT - 1);
    unsigned long long recent = unsigned(text.flags);
    const auto add = [&](int token) { recent = recent << 8 | unsigned(token), known++; };
    if (pending >= 0) add(pending);
    __syncthreads();
    if (thread < SETTINGS) s.settings[thread] = work.sampling[text.slot * SETTINGS + thread];
    sync_cluster();  // the first row may only choose, and other blocks' choices must come after this
    const Taste taste = taste_of(s.settings);
    double uniforms = 0;  // a lane's, of the tokens from `loaded` on
    int loaded = -LANES;
    for (int done = 0; done < work.rows;) {
        const bool reads = pending >= 0;
        const int rows = reads ? min(min(TEXTS, work.rows - done), work.capacity - held) : 1;
        if (done + rows > loaded + LANES) {
            loaded = done;
            const int row = min(loaded + lane, work.rows - 1);
            if (thread < LANES) uniforms = work.uniforms[row * work.count + number];
        }
        if (thread < LANES) {
            unsigned long long tokens = recent;
            for (int row = 1; row < rows; row++) {
                const float drawn = __shfl_sync(~0u, float(uniforms), done - loaded + row - 1);
                const int token = guess(work, tokens, known + row - 1, drawn, taste, s.settings, memory);
                tokens = tokens << 8 | unsigned(token);
                if (lane == 0) s.token[row] = token;
            }
        }
        if (thread == 0) s.token[0] = pending;
        if (thread < TEXTS) s.slot[thread] = text.slot, s.length[thread] = held + thread;
        __syncthreads();
        if (reads) step(work, rows, exchange);
        int token = 0;
        const bool chooses = block < rows && thread < LANES;
        if (chooses) {
            for (int i = lane; i < VOCAB && !reads; i += LANES) found[i] = work.logits[at + i];
            __syncwarp();
            token = choose(found, s.settings, work.bias + at, work.seen + at, work.written + at,
                           from_lane(uniforms, done - loaded + block), memory);
            if (lane < BLOCKS) exchange.store(&s.next[block], lane, __int_as_float(max(token, 0)));
        }
        exchange.expect(rows * int(sizeof(int)));
        exchange.wait(SAMPLING);
        int right = 0;  // guesses
        while (right + 1 < rows && s.next[right] == s.token[right + 1]) right++;
        if (chooses && block <= right) {
            const int row = done + block, place = row * work.count + number;
            for (int i = lane; i < VOCAB; i += LANES) {
                if (work.every) work.every[(long long)place * VOCAB + i] = found[i];
                if (row + 1 == work.rows) work.logits[at + i] = found[i];
            }
            if (lane == 0) {
                work.chosen[place] = token;
                if (token >= 0) count_token(work, at + token);
            }
        }
        for (int i = 0; i <= right; i++) add(s.next[i]);
        pending = s.next[right];
        held += reads ? right + 1 : 0, done += right + 1;
        passes++, drafted += rows - 1, guesses += min(right + 1, rows - 1);
        __syncthreads();  // the guesses are compared before the next ones are made
    }
    if (block == 0 && thread == 0) {
        int* drafts = work.drafts + 3 * number;
        drafts[0] = passes, drafts[1] = drafted, drafts[2] = guesses;
    }
}
#endif

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
#if DRAFTS
    for (int text = cluster; text < work.count; text += clusters) write_with_drafts(work, text, exchange);
#else
    for (int start = cluster * TEXTS; start < work.count; start += clusters * TEXTS) {
        const int texts = TEXTS == 1 ? 1 : min(TEXTS, work.count - start);
        __syncthreads();
        if (thread < texts) {
            const Text text = work.texts[start + thread];
            s.slot[thread] = text.slot, s.length[thread] = text.length, s.token[thread] = text.token;
            for (int i = 0; i < SETTINGS && thread == block; i++)
                s.settings[i] = work.sampling[text.slot * SETTINGS + i];
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
                const bool last = row + 1 == work.rows, known = s.token[t] < 0;
                for (int i = lane; i < VOCAB && (known || last || work.every); i += LANES) {
                    if (known) found[i] = kept[i];
                    if (work.every) work.every[(long long)place * VOCAB + i] = found[i];
                    if (last) kept[i] = found[i];
                }
                __syncwarp();
                auto* memory = reinterpret_cast<double*>(found + WEIGHTS);
                const int token = choose(found, s.settings, work.bias + at, work.seen + at, work.written + at,
                                         uniform, memory);
                if (lane < BLOCKS) exchange.store(&s.next[t], lane, __int_as_float(max(token, 0)));
                if (lane == 0) {
                    work.chosen[place] = token;
                    if (token >= 0) count_token(work, at + token);
                }
            }
            exchange.expect(texts * int(sizeof(int)));
            exchange.wait(SAMPLING);
        }
    }
#endif
    report(s, work);
    sync_cluster();  // no block ends while another may store into its shared memory
}
