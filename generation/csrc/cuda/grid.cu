// The GPT for many texts, in one launch that writes many tokens, or for a prompt (PROMPT).
//
// A block takes TEXTS texts, or tokens of one prompt, through all layers, with weights in the L2 cache.
// Tensor cores multiply 16-bit weights. With 32 bits, blocks take turns in pairs: one reads its keys while
// the other multiplies. Blocks of prompts wait for all keys of a layer.
//
// A number is summed in the same order whatever else is written, but not in the order of cluster.cu.
//
// Macros beside those of decoder.h: PROMPT; STRIP, a lane's keys at a time; RESIDENT blocks a multiprocessor.
#include "choose.h"
#include "mma.h"
#include "ptx.h"

constexpr int LOGITS = (VOCAB + 3) / 4 * 4;
constexpr int tiles(int n) { return (n + 15) / 16; }

// A matrix of K inputs and N outputs.
#if WEIGHT_BITS == 16
template <int K, int N>
struct Matrix {  // tiles of 16 outputs and 16 inputs, of which each lane has its part of a product's A
    uint4 tile[tiles(N)][tiles(K)][LANES];
};
#else
template <int K, int N> using Matrix = Weight[K][N];  // so that the lanes of a warp read neighbours
#endif

struct Layer {
    Matrix<WIDTH, 3 * WIDTH> qkv;
    Matrix<WIDTH, WIDTH> proj;
    Matrix<WIDTH, HIDDEN> fc;
    Matrix<HIDDEN, WIDTH> out;
};

struct Weights : Model<Layer, Matrix<WIDTH, LOGITS>, WIDTH> {};

// Attention: QUERIES rows read the same keys together. VECTOR elements are a lane's part of a key.
constexpr int QUERIES = PROMPT ? TEXTS : 1, SETS = TEXTS / QUERIES;
constexpr int VECTOR = PROMPT || HEAD_DIM == 4 ? 4 : 16 / int(sizeof(Element));
constexpr int SPLITS = most(1, WARPS / (SETS * HEADS)), UNITS = SETS * HEADS * SPLITS;  // a unit has a warp
constexpr int KEY_LANES = HEAD_DIM / VECTOR, WARP_KEYS = LANES / KEY_LANES;  // lanes of a key; keys at a time

// Floats of a row. The tensor cores' rows are 16 floats modulo 32 apart: two of them are in different banks.
constexpr int pitch(int floats) { return WEIGHT_BITS == 16 ? (floats + 15) / 32 * 32 + 16 : floats; }

// A row's memory in turn for the queries, the MLP's hidden numbers, the logits and the choice's weights.
constexpr int PITCH = pitch(WIDTH), VARIOUS = pitch(most(HIDDEN, (LOGITS + 2 * VOCAB + 2) / 4 * 4));

struct __align__(16) Shared {
    float x[TEXTS][WIDTH], in[TEXTS][PITCH];  // in: what the next matrix is multiplied with
    float various[TEXTS][VARIOUS];
    float partial[most(WEIGHT_BITS == 16 ? 0 : 4 * THREADS * TEXTS, UNITS * QUERIES * PARTIAL)];
    int slot[TEXTS], length[TEXTS], token[TEXTS], next[TEXTS], flags[TEXTS];
#if CLOCKS
    long long cycles[PHASES], last;
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "engines/cuda.py counts the same");

__device__ inline Shared& own() { return *reinterpret_cast<Shared*>(shared_memory()); }

// The products of each row of `in` with a matrix, to finish(row, column, product). Called by all threads.
#if WEIGHT_BITS == 16
// Two numbers as the sums of three with 8 significant bits each, in pairs of bfloat16. The sums are exact.
__device__ inline void in_terms(float a, float b, unsigned (&terms)[3]) {
    UNROLLED(i, 3) {
        const unsigned bits_a = __float_as_uint(a), bits_b = __float_as_uint(b);
        terms[i] = __byte_perm(bits_a, bits_b, 0x7632);  // the upper halves
        a -= __uint_as_float(bits_a & 0xffff0000u);
        b -= __uint_as_float(bits_b & 0xffff0000u);
    }
}

__device__ inline void load(unsigned (&to)[4], const uint4& from) {
    const uint4 x = from;
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
}

// The tensor cores multiply (mma.h: which lanes hold what). A warp has up to TOGETHER tiles of 16 outputs at a
// time, which share the rows' terms. Lane 4 g + t has of a tile the inputs 4 t to 4 t + 3: those of row g, one
// float4, are in the order of a product's B, and of the weights' A. Lanes without a row repeat the last.
template <int K, int N, class Finish>
__device__ inline void multiply(const Matrix<K, N>& matrix, const float* in, int stride, const Finish& finish) {
    constexpr int OUTPUTS = tiles(N), DEPTH = tiles(K), OF_WARP = (OUTPUTS + WARPS - 1) / WARPS;
    constexpr int PASSES = (OF_WARP + 3) / 4, TOGETHER = (OF_WARP + PASSES - 1) / PASSES;
    constexpr int AHEAD = 8 / TOGETHER;  // inputs whose weights are loaded while others are used
    const int lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
    const float* x = in + min(g, TEXTS - 1) * stride + 4 * t;
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < OUTPUTS; first += TOGETHER * WARPS) {
        const uint4* a[TOGETHER];
        unsigned w[AHEAD][TOGETHER][4];
        float sums[3][TOGETHER][4] = {};
        UNROLLED(n, TOGETHER) {
            constexpr bool all = OUTPUTS % (TOGETHER * WARPS) == 0;
            a[n] = &matrix.tile[all ? first + n * WARPS : min(first + n * WARPS, OUTPUTS - 1)][0][lane];
        }
        UNROLLED(i, AHEAD) {
            UNROLLED(n, TOGETHER)
                if (i < DEPTH) load(w[i][n], a[n][i * LANES]);
        }
#pragma unroll 1
        for (int from = 0; from < DEPTH; from += AHEAD) {
            UNROLLED(i, AHEAD) {
                const int k = from + i;
                if (DEPTH % AHEAD && k >= DEPTH) continue;
                const float4 quad = load4(x + 16 * k);
                unsigned b0[3], b1[3];
                in_terms(quad.x, quad.y, b0);
                in_terms(quad.z, quad.w, b1);
                UNROLLED(term, 3) {
                    UNROLLED(n, TOGETHER) multiply_16bit(sums[term][n], w[i][n], b0[term], b1[term]);
                }
                if (k + AHEAD >= DEPTH) continue;
                UNROLLED(n, TOGETHER) load(w[i][n], a[n][(k + AHEAD) * LANES]);
            }
        }
        UNROLLED(n, TOGETHER) {
            UNROLLED(i, 4) {
                const int row = 2 * t + i % 2, column = 16 * (first + n * WARPS) + g + 8 * (i / 2);
                const float y = sums[2][n][i] + sums[1][n][i] + sums[0][n][i];  // the smallest first
                if (row < TEXTS && column < N) finish(row, column, y);
            }
        }
    }
    __syncthreads();
}
#else
constexpr int slices(int groups, int most) {  // the most slices, a power of two, of so many groups
    int n = 1;
    while (2 * n <= most && groups % (2 * n) == 0) n *= 2;
    return n;
}

// A thread has four columns and a slice of the inputs.
template <int K, int N, class Finish>
__device__ inline void multiply(const Matrix<K, N>& matrix, const float* in, int stride, const Finish& finish) {
    constexpr int QUADS = N / 4, LINE = QUADS < THREADS ? (QUADS + LANES - 1) / LANES * LANES : THREADS;
    constexpr int GROUP = TEXTS <= 2 ? 8 : 4;  // inputs whose weights are loaded while others are used
    constexpr int SLICES = slices(K / GROUP, THREADS / LINE), DEPTH = K / SLICES;
    static_assert(N % 4 == 0 && K % GROUP == 0, "engines/cuda.py asks for multiples of 8");
    float* partial = own().partial;
    const int slice = threadIdx.x / LINE;
#pragma unroll 1
    for (int first = 0; first < QUADS; first += LINE) {
        const int quad = first + threadIdx.x % LINE;
        if (slice < SLICES) {
            float4 sums[TEXTS] = {};
            if (quad < QUADS) {
                const Weight* at = &matrix[slice * DEPTH][4 * quad];
                const float* x = in + slice * DEPTH;
                float4 w[GROUP];
                UNROLLED(i, GROUP) w[i] = load4(at + i * N);
#pragma unroll 2
                for (int k = 0; k < DEPTH; k += GROUP) {
                    float4 next[GROUP];
                    const bool more = k + GROUP < DEPTH;
                    UNROLLED(i, GROUP) next[i] = more ? load4(at + (k + GROUP + i) * N) : float4{};
                    UNROLLED(r, TEXTS) {
                        UNROLLED(i, GROUP / 4) {
                            const float4 quad = load4(x + r * stride + k + 4 * i);
                            add_multiple(sums[r], quad.x, w[4 * i]);
                            add_multiple(sums[r], quad.y, w[4 * i + 1]);
                            add_multiple(sums[r], quad.z, w[4 * i + 2]);
                            add_multiple(sums[r], quad.w, w[4 * i + 3]);
                        }
                    }
                    UNROLLED(i, GROUP) w[i] = next[i];
                }
            }
            UNROLLED(r, TEXTS)
                reinterpret_cast<float4*>(partial)[(slice * TEXTS + r) * LINE + threadIdx.x % LINE] = sums[r];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TEXTS * 4 * LINE; i += THREADS) {
            const int column = 4 * first + i % (4 * LINE);
            float y = 0;
            UNROLLED(n, SLICES) y += partial[n * TEXTS * 4 * LINE + i];
            if (column < N) finish(i / (4 * LINE), column, y);
        }
        __syncthreads();
    }
}
#endif

// LayerNorm of each row of x to `in`, as PyTorch's. Called by all threads, which may read it after this.
__device__ inline void normalise(const Norm& norm) {
    for (int r = threadIdx.x / LANES; r < TEXTS; r += WARPS) {
        const Deviations<WholeWarp> row(own().x[r]);
        float squares = 0;
        UNROLLED(i, WholeWarp::pieces)
            if (WholeWarp::input(i) < WIDTH) squares = dot(squares, row.at[i], row.at[i]);
        const float scale = inverse_deviation(sum<1, LANES>(squares));
        UNROLLED(i, WholeWarp::pieces) {
            const int k = WholeWarp::input(i);
            if (k < WIDTH) store4(&own().in[r][k], norm.plus_bias(k, row.at[i] * scale * load4(&norm.gain[k])));
        }
    }
    __syncthreads();
}

// A lane's part of a key or value, and of a strip of both.
struct __align__(VECTOR * sizeof(Element)) Piece {
    Element at[VECTOR];
    __device__ float4 quad(int c) const { return load4(at + 4 * c); }
};
struct Strip {
    Piece k[STRIP], v[STRIP];
};

// What a warp attends to: QUERIES rows from `row` on, a head, and of its keys those of every SPLITS-th strip.
struct Unit {
    int row, head, split, keys;  // keys: in the cache, of the last row; 0 if there is nothing to do
    const Element *k, *v;        // the lane's part of the first

    __device__ Unit(const Work& work, int layer, int texts, int unit) {
        const Shared& s = own();
        split = unit % SPLITS;
        head = unit / SPLITS % HEADS;
        row = unit / (SPLITS * HEADS) * QUERIES;
        keys = unit < UNITS && row < texts && s.token[row] >= 0 ? s.length[PROMPT ? texts - 1 : row] + 1 : 0;
        const int slot = keys > 0 ? s.slot[row] : 0;
        const long long at = head_at(work, slot, layer, head) + VECTOR * (threadIdx.x % LANES % KEY_LANES);
        k = work.keys + at;
        v = work.values + at;
    }
    __device__ int begin() const { return split * STRIP * WARP_KEYS; }
    __device__ Strip load(int first) const {
        Strip strip;
        UNROLLED(i, STRIP) {
            const int j = first + i * WARP_KEYS + threadIdx.x % LANES / KEY_LANES;
            strip.k[i] = strip.v[i] = Piece{};
            if (j >= keys) continue;
            strip.k[i] = *reinterpret_cast<const Piece*>(k + j * HEAD_DIM);
            strip.v[i] = *reinterpret_cast<const Piece*>(v + j * HEAD_DIM);
        }
        return strip;
    }
};

// Attention of each row to `in`, by all threads, which may read it after this. For a prompt, the next strip is
// loaded while one is used; for texts, the registers do not suffice.
__device__ inline void attend(const Work& work, int layer, int texts) {
    Shared& s = own();
    const int lane = threadIdx.x % LANES, column = VECTOR * (lane % KEY_LANES);
    constexpr int STEP = SPLITS * STRIP * WARP_KEYS, QUADS = VECTOR / 4;
#pragma unroll 1
    for (int number = threadIdx.x / LANES; number < UNITS; number += WARPS) {
        const Unit unit(work, layer, texts, number);
        if (unit.keys == 0) continue;
        Strip strip = unit.load(unit.begin());
        State<QUADS> rows[QUERIES];
        float4 q[QUERIES][QUADS];
        UNROLLED(t, QUERIES)
            UNROLLED(c, QUADS) q[t][c] = load4(&s.various[unit.row + t][unit.head * HEAD_DIM + column + 4 * c]);
#pragma unroll 1
        for (int first = unit.begin(); first < unit.keys; first += STEP) {
            Strip following;
            if (PROMPT) following = unit.load(first + STEP);
            UNROLLED(t, QUERIES) {
                float score[STRIP], top = rows[t].m;
                UNROLLED(i, STRIP) {
                    score[i] = 0;
                    UNROLLED(c, QUADS) score[i] = dot(score[i], q[t][c], strip.k[i].quad(c));
                    score[i] = sum<1, KEY_LANES>(score[i]);
                    if (first + i * WARP_KEYS + lane / KEY_LANES > s.length[unit.row + t]) score[i] = -INF;
                    top = fmaxf(top, score[i]);
                }
                rows[t].add(score, top, [&](int j, int c) { return strip.v[j].quad(c); });
            }
            strip = PROMPT ? following : unit.load(first + STEP);
        }
        UNROLLED(t, QUERIES) {
            float* result = s.partial + (((unit.row + t) * HEADS + unit.head) * SPLITS + unit.split) * PARTIAL;
            rows[t].template store<KEY_LANES>(result, result + HEAD_DIM);
        }
    }
    __syncthreads();
    for (int i = 4 * threadIdx.x; i < texts * WIDTH; i += 4 * THREADS) {
        const int t = i / WIDTH, column = i % WIDTH;
        const float* results = s.partial + (t * HEADS + column / HEAD_DIM) * SPLITS * PARTIAL;
        const auto row = merged<SPLITS>(results + column % HEAD_DIM, results + HEAD_DIM, PARTIAL);
        const float4 o = row.o[0];
        store4(&s.in[t][column], {o.x / row.l, o.y / row.l, o.z / row.l, o.w / row.l});
    }
    __syncthreads();
}

// Lets a block read keys in turn with another. Half of the blocks go first.
struct Turns {
    static constexpr unsigned ALL = 1u << 31;  // more than any block has
    const Work& work;
    int other;  // this block's partner; -1 if it has none
    unsigned taken = 0;

    __device__ explicit Turns(const Work& work) : work(work), other(blockIdx.x + work.leading) {
        if (blockIdx.x >= work.leading) other = blockIdx.x - work.leading;
        if (other >= gridDim.x) other = -1;
    }
    __device__ void begin() {
        if (other >= 0) await(work.arrived + other, taken + (blockIdx.x >= work.leading));
    }
    __device__ void end(unsigned count = 1) {
        if (other >= 0) announce(work.arrived + blockIdx.x, count);
        taken += count;
    }
    __device__ void end_all() { end(ALL); }
};

// A token for each row through all layers. The logits, if they are wanted, go to `various`.
__device__ inline void step(const Work& work, int texts, bool logits, Turns& turns) {
    Shared& s = own();
    for (int i = threadIdx.x; i < TEXTS * WIDTH; i += THREADS) {
        const int r = i / WIDTH, k = i % WIDTH, token = max(s.token[r], 0);
        const int position = max(0, min(s.length[r], work.capacity - 1));
        s.x[r][k] = work.tokens[token * WIDTH + k] + work.positions[position * WIDTH + k];
    }
    __syncthreads();
    count(s, EMBEDDING);
    const auto add_to_x = [&s](const float* bias) {
        return [&s, bias](int r, int column, float y) { s.x[r][column] += biased(y, bias, column); };
    };
#pragma unroll 1
    for (int l = 0; l < LAYERS; l++) {
        const Layer& layer = work.weights->layers[l];
        const auto& vectors = work.weights->vectors[l];
        const Biases biases = vectors.biases();
        normalise(vectors.ln_1);
        multiply(layer.qkv, s.in[0], PITCH, [&](int r, int column, float y) {
            const int which = column / WIDTH, k = column % WIDTH;  // which: q, k or v
            y = biased(y, biases.qkv, column);
            if (which == 0) {
                s.various[r][k] = y * work.scale;
            } else if (r < texts && s.token[r] >= 0) {
                Element* to = which == 1 ? work.keys : work.values;
                to[head_at(work, s.slot[r], l, k / HEAD_DIM) + (long long)s.length[r] * HEAD_DIM +
                   k % HEAD_DIM] = to_element(y);
            }
        });
        count(s, QKV);
        if (PROMPT) {
            announce(work.arrived);
            await(work.arrived, (l + 1) * gridDim.x);
        } else {
            turns.begin();
        }
        count(s, WAITING);
        attend(work, l, texts);
        if (!PROMPT) turns.end();
        count(s, ATTENTION);
        multiply(layer.proj, s.in[0], PITCH, add_to_x(biases.proj));
        count(s, PROJECTION);
        normalise(vectors.ln_2);
        multiply(layer.fc, s.in[0], PITCH, [&](int r, int column, float y) {
            s.various[r][column] = gelu(biased(y, biases.fc, column));
        });
        count(s, MLP_UP);
        multiply(layer.out, s.various[0], VARIOUS, add_to_x(biases.out));
        count(s, MLP_DOWN);
    }
    if (!logits) return;
    normalise(work.weights->ln_f);
    multiply(work.weights->head, s.in[0], PITCH, [&](int r, int column, float y) { s.various[r][column] = y; });
    count(s, HEAD);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode(const __grid_constant__ Work work) {
    Shared& s = own();
    const int thread = threadIdx.x, lane = thread % LANES;
    Turns turns(work);
    start_counting(s);
    for (int i = thread; i < TEXTS * PITCH; i += THREADS) s.in[0][i] = 0;  // what follows a row must be no NaN
    for (int start = blockIdx.x * TEXTS; start < work.count; start += gridDim.x * TEXTS) {
        __syncthreads();
        if (thread < TEXTS) {
            const Text text = start + thread < work.count ? work.texts[start + thread] : Text{-1, -1, -1, 0};
            s.slot[thread] = text.slot;
            s.length[thread] = text.length;
            s.token[thread] = text.token;
            s.flags[thread] = text.flags;
        }
        __syncthreads();
        int texts = 0;
        while (texts < TEXTS && s.slot[texts] >= 0) texts++;
#if PROMPT
        if (s.flags[0] & FIRST) {
            for (int i = thread; i < VOCAB; i += THREADS)
                work.seen[s.slot[0] * VOCAB + i] = work.written[s.slot[0] * VOCAB + i] = 0;
        }
        bool logits = work.every;
        for (int t = 0; t < texts; t++) logits = logits || s.flags[t] & LAST;
        step(work, texts, logits, turns);
        for (int t = thread / LANES; t < texts; t += WARPS) {
            if (logits) logits_of(work, s, t, start + t, s.flags[t] & LAST);
            if (lane == 0) atomicAdd(&work.seen[s.slot[t] * VOCAB + s.token[t]], 1);
        }
#else
        for (int row = 0; row < work.rows; row++) {
            if (begin_row(s, row, texts)) step(work, texts, true, turns);
            for (int t = thread / LANES; t < texts; t += WARPS) {
                const int place = row * work.count + start + t;
                const long long at = (long long)s.slot[t] * VOCAB;
                float* logits = logits_of(work, s, t, place, row + 1 == work.rows);
                const double* settings = work.sampling + s.slot[t] * SETTINGS;
                auto* memory = reinterpret_cast<double*>(logits + LOGITS);
                const int token = choose(work, at, logits, settings, work.uniforms[place], memory);
                if (lane != 0) continue;
                s.next[t] = max(token, 0);
                write_token(work, at, place, token);
            }
            __syncthreads();
            count(s, SAMPLING);
        }
#endif
    }
    if (!PROMPT) turns.end_all();
    report(s, work);
}
