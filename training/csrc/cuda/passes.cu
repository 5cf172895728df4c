// Forward and backward pass of the GPT but for its attention, in 2 L + 1 launches; training/cuda/step.py puts
// the attention's kernels between them.
//
//   take_batch   the next tokens of the text, a block for each window
//   begin        x <- wte[id] + wpe[t];  qkv <- LN(x) W of the first layer
//   forward(l)   x <- x + out W;  x <- x + GELU(LN(x) W) W;  qkv <- LN(x) W of the next layer, or the last one:
//                logits <- LN(x) wte^T, loss, and back to the gradient of the last attention's output
//   backward(l)  from dq, dk, dv to dx;  then back through the MLP of the layer before, to its attention's
//   output
//
// A block takes ROWS rows through all of a launch: its left operands stay in shared memory, and only weights
// are read, packed as a lane of mma.sync takes them. The gradients of weights are sums over rows, which
// update.cu adds up from the operands that are kept here. Least architecture: sm_80.
//
// Macros, by training/cuda/step.py: FORMAT of the operands, sums are float32; EMBD (C), VOCAB (V), HEAD_SIZE
// (d), THREADS, DROPOUT 1 where numbers are dropped, ID the type of a text's tokens.
#include "step.h"

constexpr int C = EMBD, D = HEAD_SIZE, ROWS = 16, WARPS = THREADS / 32, PIECE = 16 / sizeof(Element);
constexpr int VP = (VOCAB + 31) / 32 * 32, WIDE = C > VP ? C : VP;
constexpr int PITCH = C + PIECE, LONG = (4 * C > VP ? 4 * C : VP) + PIECE;  // of left operands' rows
constexpr int UNDER_WAY = FORMAT == FP32 ? 4 : 8;  // 16-byte loads of weights: two such sets are in registers
constexpr float EPSILON = 1e-5f;
static_assert(C % 32 == 0 && D % PIECE == 0 && C % D == 0, "width");

// Rows are those of all sequences, padded to a multiple of ROWS; the gradients of padding are 0. What is kept
// of each layer or norm lies one after another. Shapes are (rows, width).
struct Step {
    const long long* tokens;            // (B, T + 1)
    const float *wte, *wpe, *updates;   // updates: how many there were
    const Element* packed;              // the weights, as step.h says
    const Element *out, *dq, *dk, *dv;  // of a layer's attention, (B, H, T, d)
    float *x, *dx, *losses;
    float* factors;                           // of the norms: 1 / standard deviation
    Element *normals, *qkv, *joined, *h, *g;  // a norm's result; out's heads in a row; GELU's input and result
    Element *dqkv, *dh, *down, *projected, *dout;  // down, projected: gradients of what the products give
    Element *dlogits, *onehot, *dx0;
    float* dx0_float;
    int rows, padded, T, layers;
    unsigned seed;
    float dropout;
};

struct Shared {
    float x[ROWS][C], y[ROWS][WIDE];
    Element narrow[ROWS][PITCH], wide[ROWS][LONG];  // left operands
};

__device__ inline Shared& memory() {
    extern __shared__ __align__(128) unsigned char shared[];
    return *(Shared*)shared;
}

// f(row, column) for all elements of rows of `width` columns, `step` columns at a time.
template <int width, int step, class F> __device__ inline void each(const F& f) {
    for (int i = threadIdx.x; i < ROWS * (width / step); i += THREADS)
        f(i / (width / step), i % (width / step) * step);
}

// sums <- sums + x W^T of 16 rows, BLOCK_K columns of x and J tiles of W.
template <int J>
__device__ inline void add_block(float (&sums)[J][4], const Element* x, int pitch, const uint4 (&w)[J]) {
    const int lane = threadIdx.x % 32;
#if FORMAT == FP32
    float exact[J][4] = {};  // the tensor cores round long sums towards zero
    UNROLLED(half, 2) {
        const float* const at = x + lane / 4 * pitch + 8 * half + lane % 4;
        const unsigned rows[4] = {__float_as_uint(at[0]), __float_as_uint(at[8 * pitch]),
                                  __float_as_uint(at[4]), __float_as_uint(at[8 * pitch + 4])};
        unsigned high[4], low[4], b[2], rest[2];
        split(rows, high, low);
        UNROLLED(j, J) {
            split(__uint_as_float(half ? w[j].z : w[j].x), b[0], rest[0]);
            split(__uint_as_float(half ? w[j].w : w[j].y), b[1], rest[1]);
            multiply_tf32(exact[j], low, b[0], b[1]);
            multiply_tf32(exact[j], high, rest[0], rest[1]);
            multiply_tf32(exact[j], high, b[0], b[1]);
        }
    }
    UNROLLED(j, J)
        UNROLLED(e, 4) sums[j][e] += exact[j][e];
#else
    UNROLLED(half, 2) {
        unsigned rows[4];
        load_matrices(rows, shared_address(x + lane % 16 * pitch + 16 * half + lane / 16 * 8));
        UNROLLED(j, J) multiply_16bit(sums[j], rows, half ? w[j].z : w[j].x, half ? w[j].w : w[j].y);
    }
#endif
}

// The largest of some numbers that divides n.
constexpr int divisor(int n, int most) {
    while (n % most != 0) --most;
    return most;
}

// y <- x W^T of the block's rows: x has K columns in shared memory, W is packed. f(row, column, two of y).
template <int K, int N, class F>
__device__ inline void product(const Element* x, int pitch, const Element* packed, const F& f) {
    constexpr int COLUMNS = N / 8, BLOCKS = K / BLOCK_K;
    constexpr int J = COLUMNS % WARPS == 0 ? divisor(COLUMNS / WARPS, 4) : 1;  // tiles of 8 columns of a warp
    constexpr int AHEAD = divisor(BLOCKS, UNDER_WAY / J);  // blocks that are loaded together
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4* const from = (const uint4*)packed + lane;
    for (int n = threadIdx.x / 32 * J; n < COLUMNS; n += WARPS * J) {
        float sums[J][4] = {};
        uint4 w[AHEAD][J], next[AHEAD][J];
        const auto load = [&](int first) {
            UNROLLED(a, AHEAD)
                UNROLLED(j, J) next[a][j] = from[((n + j) * BLOCKS + first + a) * 32];
        };
        load(0);
#pragma unroll 1
        for (int first = 0; first < BLOCKS; first += AHEAD) {
            UNROLLED(a, AHEAD)
                UNROLLED(j, J) w[a][j] = next[a][j];
            if (first + AHEAD < BLOCKS) load(first + AHEAD);
            UNROLLED(a, AHEAD) add_block<J>(sums, x + (first + a) * BLOCK_K, pitch, w[a]);
        }
        UNROLLED(j, J)
            UNROLLED(h, 2) f(8 * h + g, (n + j) * 8 + 2 * t, sums[j][2 * h], sums[j][2 * h + 1]);
    }
}

// The packed weights of a layer, forward and backward, in update.cu's order.
enum Weight { QKV = 0, PROJECTION = 6, UP = 8, DOWN = 16 };
__device__ inline const Element* weight(const Step& s, int layer, int which) {
    return s.packed + 2LL * VP * C + (layer * 24LL + which) * C * C;
}

// What is kept of a layer, from the block's first row on.
template <class T> __device__ inline T* kept(const Step& s, T* all, int layer, int width) {
    return all + ((long long)layer * s.padded + (long long)blockIdx.x * ROWS) * width;
}

// Whether numbers of one place in the model are kept, and by what factor: the same in both passes of a step.
struct Dropout {
    unsigned key, least;
    float factor;

    __device__ inline Dropout(const Step& s, int place) {
#if DROPOUT
        key = mixed(mixed(s.seed + (unsigned)*s.updates * 0x9e3779b9u) + place);
        least = (unsigned)(s.dropout * 4294967296.0f);
        factor = 1 / (1 - s.dropout);
#endif
    }
    // The finalizer of MurmurHash3: each bit of x changes half of the others'.
    __device__ inline static unsigned mixed(unsigned x) {
        x = (x ^ x >> 16) * 0x85ebca6bu;
        x = (x ^ x >> 13) * 0xc2b2ae35u;
        return x ^ x >> 16;
    }
    __device__ inline float operator()(float x, int row, int column) const {
#if DROPOUT
        return mixed(key + (blockIdx.x * ROWS + row) * C + column) >= least ? x * factor : 0.0f;
#else
        return x;
#endif
    }
};

// y <- x W^T
template <int K, int N>
__device__ inline void product_in_y(const Element* x, int pitch, const Element* packed) {
    product<K, N>(x, pitch, packed,
                  [](int r, int c, float a, float b) { memory().y[r][c] = a, memory().y[r][c + 1] = b; });
    __syncthreads();
}

// narrow <- LN(x) without its weight, which the next packed matrix has. which: of the 2 L + 1 norms.
__device__ inline void normalize(const Step& s, int which) {
    Shared& m = memory();
    const int lane = threadIdx.x % 32;
    Element* const to = kept(s, s.normals, which, C);
    for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
        float x[C / 32], mean = 0, variance = 0;
        UNROLLED(i, C / 32) mean += x[i] = m.x[r][lane + 32 * i];
        mean = sum<1, 32>(mean) / C;
        UNROLLED(i, C / 32) variance += (x[i] - mean) * (x[i] - mean);
        const float factor = 1 / sqrtf(sum<1, 32>(variance) / C + EPSILON);
        UNROLLED(i, C / 32)
            to[r * C + lane + 32 * i] = m.narrow[r][lane + 32 * i] = to_element((x[i] - mean) * factor);
        if (lane == 0) kept(s, s.factors, which, 1)[r] = factor;
    }
    __syncthreads();
}

// x <- x, or 0 without `add`, + the gradient of the norm's input, from that of its result in y.
__device__ inline void normalize_backward(const Step& s, int which, bool add) {
    Shared& m = memory();
    const int lane = threadIdx.x % 32;
    const Element* const normal = kept(s, s.normals, which, C);
    for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
        float y[C / 32], dy[C / 32], mean = 0, along = 0;
        UNROLLED(i, C / 32) {
            y[i] = to_float(normal[r * C + lane + 32 * i]);
            dy[i] = m.y[r][lane + 32 * i];
            mean += dy[i];
            along += dy[i] * y[i];
        }
        mean = sum<1, 32>(mean) / C, along = sum<1, 32>(along) / C;
        const float factor = kept(s, s.factors, which, 1)[r];
        UNROLLED(i, C / 32) {
            float& x = m.x[r][lane + 32 * i];
            x = (add ? x : 0.0f) + factor * (dy[i] - mean - y[i] * along);
        }
    }
    __syncthreads();
}

__device__ inline void copy_x(float* to) {
    each<C, 4>([&](int r, int c) { *(float4*)(to + r * C + c) = *(float4*)&memory().x[r][c]; });
}
__device__ inline void load_x(const float* from) {
    each<C, 4>([&](int r, int c) { *(float4*)&memory().x[r][c] = *(const float4*)(from + r * C + c); });
}

// qkv <- LN(x) W
__device__ inline void enter(const Step& s, int layer) {
    normalize(s, 2 * layer);
    Element* const to = kept(s, s.qkv, layer, 3 * C);
    product<C, 3 * C>(memory().narrow[0], PITCH, weight(s, layer, QKV),
                      [&](int r, int c, float a, float b) { put(to + r * 3 * C + c, a, b); });
}

// `to` and its copy <- a head's numbers of (B, H, T, d), from column `first` on.
__device__ inline void join(const Step& s, const Element* heads, Element* to, int pitch, Element* copy,
                            int copy_pitch) {
    each<C, PIECE>([&](int r, int c) {
        const int row = blockIdx.x * ROWS + r, b = row / s.T, t = row % s.T;
        uint4 piece{};
        if (row < s.rows)
            piece = *(const uint4*)(heads + (((long long)b * (C / D) + c / D) * s.T + t) * D + c % D);
        *(uint4*)(to + r * pitch + c) = *(uint4*)(copy + (long long)r * copy_pitch + c) = piece;
    });
}

// narrow, and what is kept, <- x without what was dropped
__device__ inline void keep_x(const Dropout& dropped, Element* to) {
    Shared& m = memory();
    each<C, 2>([&](int r, int c) {
        const float a = dropped(m.x[r][c], r, c), b = dropped(m.x[r][c + 1], r, c + 1);
        put(&m.narrow[r][c], a, b), put(to + r * C + c, a, b);
    });
    __syncthreads();
}

// From dx after a layer to that of its attention's output.
__device__ inline void mlp_backward(const Step& s, int layer) {
    Shared& m = memory();
    keep_x(Dropout(s, 2 * layer + 2), kept(s, s.down, layer, C));
    const Element* const h = kept(s, s.h, layer, 4 * C);
    Element* const dh = kept(s, s.dh, layer, 4 * C);
    product<C, 4 * C>(
        m.narrow[0], PITCH, weight(s, layer, DOWN) + 4 * C * C, [&](int r, int c, float a, float b) {
            float d[2] = {a, b};
            UNROLLED(e, 2) {
                const float x = to_float(h[r * 4 * C + c + e]);
                d[e] *=
                    0.5f * (1 + erff(x * 0.70710678f)) + x * 0.39894228f * exp2_approx(x * x * -0.72134752f);
            }
            put(&m.wide[r][c], d[0], d[1]), put(dh + r * 4 * C + c, d[0], d[1]);
        });
    __syncthreads();
    product_in_y<4 * C, C>(m.wide[0], LONG, weight(s, layer, UP) + 4 * C * C);
    normalize_backward(s, 2 * layer + 1, true);
    copy_x(kept(s, s.dx, 0, C));
    keep_x(Dropout(s, 2 * layer + 1), kept(s, s.projected, layer, C));
    Element* const dout = kept(s, s.dout, 0, C);
    product<C, C>(m.narrow[0], PITCH, weight(s, layer, PROJECTION) + C * C,
                  [&](int r, int c, float a, float b) { put(dout + r * C + c, a, b); });
}

// The head, the loss, its gradient, and back through the last norm.
__device__ inline void predict(const Step& s) {
    Shared& m = memory();
    normalize(s, 2 * s.layers);
    product_in_y<C, VP>(m.narrow[0], PITCH, s.packed);
    Element* const to = kept(s, s.dlogits, 0, VP);
    for (int r = threadIdx.x / 32; r < ROWS; r += WARPS) {
        const int row = blockIdx.x * ROWS + r, lane = threadIdx.x % 32;
        const bool real = row < s.rows;
        const int target = real ? (int)s.tokens[row + row / s.T + 1] : 0;
        float most = -INF, all = 0;
        for (int c = lane; c < VOCAB; c += 32) most = fmaxf(most, m.y[r][c]);
        most = largest<1, 32>(most);
        for (int c = lane; c < VOCAB; c += 32) all += expf(m.y[r][c] - most);
        all = sum<1, 32>(all);
        if (lane == 0 && real) s.losses[row] = logf(all) + (most - m.y[r][target]);
        for (int c = lane; c < VP; c += 32) {
            const float p = c < VOCAB ? expf(m.y[r][c] - most) / all - (c == target) : 0.0f;
            to[r * VP + c] = m.wide[r][c] = to_element(real ? p / s.rows : 0.0f);
        }
    }
    __syncthreads();
    product_in_y<VP, C>(m.wide[0], LONG, s.packed + VP * C);
    normalize_backward(s, 2 * s.layers, false);
}

// Multiples of the golden ratio, modulo 1, cover the text evenly, however many there are. last: where the last
// window ends before.
extern "C" __global__ void take_batch(const Step s, const ID* ids, long long last, double place,
                                      double golden) {
    wait_for_launches();
    const double at = place + ((double)*s.updates * gridDim.x + blockIdx.x) * golden;
    const long long start = (long long)((at - floor(at)) * (double)last);
    long long* const tokens = (long long*)s.tokens + blockIdx.x * (s.T + 1LL);
    for (int t = threadIdx.x; t <= s.T; t += blockDim.x) tokens[t] = ids[start + t];
}

extern "C" __global__ void __launch_bounds__(THREADS) begin(const Step s) {
    wait_for_launches();
    const Dropout dropped(s, 0);
    Element* const onehot = kept(s, s.onehot, 0, VP);
    const auto token = [&](int r) {
        const int row = blockIdx.x * ROWS + r;
        return row < s.rows ? (int)s.tokens[row + row / s.T] : -1;
    };
    each<C, 1>([&](int r, int c) {
        const int id = token(r), t = (blockIdx.x * ROWS + r) % s.T;
        const float x = id < 0 ? 0.0f : s.wte[id * C + c] + (s.wpe ? s.wpe[t * C + c] : 0.0f);
        memory().x[r][c] = dropped(x, r, c);
    });
    each<VP, 1>([&](int r, int c) { onehot[r * VP + c] = to_element(c == token(r)); });
    __syncthreads();
    copy_x(kept(s, s.x, 0, C));
    enter(s, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Step s, int layer) {
    wait_for_launches();
    Shared& m = memory();
    load_x(kept(s, s.x, 0, C));
    join(s, s.out, m.narrow[0], PITCH, kept(s, s.joined, layer, C), C);
    __syncthreads();
    const Dropout of_projection(s, 2 * layer + 1), of_mlp(s, 2 * layer + 2);
    product<C, C>(m.narrow[0], PITCH, weight(s, layer, PROJECTION), [&](int r, int c, float a, float b) {
        m.x[r][c] += of_projection(a, r, c);
        m.x[r][c + 1] += of_projection(b, r, c + 1);
    });
    __syncthreads();
    normalize(s, 2 * layer + 1);
    Element *const h = kept(s, s.h, layer, 4 * C), *const g = kept(s, s.g, layer, 4 * C);
    product<C, 4 * C>(m.narrow[0], PITCH, weight(s, layer, UP), [&](int r, int c, float a, float b) {
        put(h + r * 4 * C + c, a, b);
        a *= 0.5f * (1 + erff(a * 0.70710678f));
        b *= 0.5f * (1 + erff(b * 0.70710678f));
        put(&m.wide[r][c], a, b), put(g + r * 4 * C + c, a, b);
    });
    __syncthreads();
    product<4 * C, C>(m.wide[0], LONG, weight(s, layer, DOWN), [&](int r, int c, float a, float b) {
        m.x[r][c] += of_mlp(a, r, c);
        m.x[r][c + 1] += of_mlp(b, r, c + 1);
    });
    __syncthreads();
    if (layer + 1 < s.layers) {
        copy_x(kept(s, s.x, 0, C));
        enter(s, layer + 1);
    } else {
        predict(s);
        mlp_backward(s, layer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward(const Step s, int layer) {
    wait_for_launches();
    Shared& m = memory();
    load_x(kept(s, s.dx, 0, C));
    Element* const dqkv = kept(s, s.dqkv, layer, 3 * C);
    UNROLLED(i, 3) join(s, i == 0 ? s.dq : i == 1 ? s.dk : s.dv, m.wide[0] + i * C, LONG, dqkv + i * C, 3 * C);
    __syncthreads();
    product_in_y<3 * C, C>(m.wide[0], LONG, weight(s, layer, QKV) + 3 * C * C);
    normalize_backward(s, 2 * layer, true);
    if (layer > 0) return mlp_backward(s, layer - 1);
    const Dropout dropped(s, 0);
    Element* const to = kept(s, s.dx0, 0, C);
    float* const exact = kept(s, s.dx0_float, 0, C);
    each<C, 1>([&](int r, int c) {
        const float x = dropped(m.x[r][c], r, c);
        to[r * C + c] = to_element(x);
        exact[r * C + c] = x;
    });
}
