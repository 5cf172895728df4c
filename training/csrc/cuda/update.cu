// The training step on CUDA after the backward pass: gradients of the weights, Muon, AdamW, the packed weights.
//
// Shapes: FORMAT of the operands is FP32 or BF16, widths are multiples of 32, rows of 16. Least architecture:
//     sm_80. Sums and the optimizers' numbers are float32. No atomics: two runs give equal bits.
// Launch: each kernel has a table of jobs, made by training/cuda/update.py, one for each block:
//         weight_gradients   partial sums of dW = dY^T X over slices of the rows        tensor cores
//         reduce_gradients   gradients, with those of the norms' weights; their squares; the mean loss
//         momentum           Muon's X, the momentum or its transpose, no higher than wide; its squares
//     5x  gram               S <- X X^T, in the first iteration divided by X's norm     tensor cores
//         polynomial         P <- a I + b S + c S S                                     tensor cores
//         apply              X <- P X, in the first iteration divided by X's norm       tensor cores
//         update             Muon's and AdamW's step, and the average
//         pack_weights       the weights as passes.cu reads them
// Shared memory: STAGES stages of DEPTH terms of a product's operands.
//
// Macros by training/cuda/update.py: FORMAT, THREADS; A1, A3 and A5, the coefficients a, b and c; MOMENTUM,
// LEAST_NORM; CLIP; BLEND_1 and BLEND_2, 1 - beta of AdamW, LOG_BETA_1 and LOG_BETA_2; EPSILON.
#include "step.h"

constexpr int WARPS = THREADS / 32, WARP_COLUMNS = 2, WARP_ROWS = WARPS / WARP_COLUMNS;  // of a product's tile
constexpr float CLIP_LEAST = 1e-6f;

// The sum of x over the block's threads.
__device__ inline float block_sum(float x) {
    __shared__ float sums[WARPS];
    x = sum<1, 32>(x);
    __syncthreads();  // all have read the sums of the call before
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    UNROLLED(w, WARPS) x += sums[w];
    return x;
}
__device__ inline float total(const float* x, int count) {
    float mine = 0.0f;
    for (int i = threadIdx.x; i < count; i += 4 * THREADS)
        UNROLLED(n, 4) mine += i + n * THREADS < count ? x[i + n * THREADS] : 0.0f;
    return block_sum(mine);
}
__device__ inline float clip_factor(const float* squares, int count) {
    return fminf(1.0f, CLIP / (sqrtf(total(squares, count)) + CLIP_LEAST));
}

// ---- products ----

// A tile of a product A B of row-major matrices: `rows` and `columns` from `row` and `column` on.
struct Tile {
    const Element *a, *b;  // the first terms of the tile's first row and column
    void* out;             // the tile's first number
    const float* squares;  // whose sum is that of X's squares, `count` of them
    int count, a_stride, b_stride, out_stride, row, column, rows, columns, depth;
};

// SIZE rows of A or columns of B in shared memory. ACROSS: terms of a sum are in different rows.
template <int SIZE, int DEPTH, bool ACROSS> struct Operand {
    static constexpr int ROWS = ACROSS ? DEPTH : SIZE, COLUMNS = ACROSS ? SIZE : DEPTH;
    // a padding with which lanes read from different banks
    static constexpr int STRIDE = COLUMNS * sizeof(Element) + (FORMAT == FP32 && ACROSS ? 32 : 16);

    // The copies of terms from `from` on begin; what is beyond size and depth becomes 0.
    __device__ inline static void copy(unsigned to, const Element* from, int stride, int size, int depth) {
        const int rows = ACROSS ? depth : size, columns = ACROSS ? size : depth;
        each_piece<ROWS, COLUMNS / OF_LANE>([&](int, int row, int piece) {
            const bool inside = row < rows && piece * OF_LANE < columns;
            copy_async(to + row * STRIDE + piece * 16,
                       from + (inside ? (long long)row * stride + piece * OF_LANE : 0), inside ? 16 : 0);
        });
    }

    // A's registers for 16 rows from i on and the terms from k on; B's of two tiles: x[0] and x[2], x[1] and
    // x[3].
    __device__ inline static void get(unsigned (&x)[4], const unsigned char* from, int i, int k) {
        const int lane = threadIdx.x % 32;
#if FORMAT == FP32
        UNROLLED(e, 4) {
            const int at = i + lane / 4 + e % 2 * 8, term = k + lane % 4 + e / 2 * 4;
            x[e] = *(const unsigned*)(from + (ACROSS ? term * STRIDE + at * 4 : at * STRIDE + term * 4));
        }
#else
        const unsigned z = shared_address(from);
        if (ACROSS)
            load_transposed(x, z + (k + lane % 8 + lane / 16 * 8) * STRIDE + (i + lane / 8 % 2 * 8) * 2);
        else
            load_matrices(x, z + (i + lane % 16) * STRIDE + (k + lane / 16 * 8) * 2);
#endif
    }
};

// A warp has M x N tiles of mma.sync.
template <int M, int N, int DEPTH, int STAGES, bool A_ACROSS, bool B_ACROSS> struct Product {
    static constexpr int ROWS = WARP_ROWS * M * 16, COLUMNS = WARP_COLUMNS * N * 8;
    using A = Operand<ROWS, DEPTH, A_ACROSS>;
    using B = Operand<COLUMNS, DEPTH, B_ACROSS>;
    static constexpr int A_BYTES = A::ROWS * A::STRIDE, STAGE = A_BYTES + B::ROWS * B::STRIDE,
                         SHARED = STAGES * STAGE;
    float sums[M][N][4] = {};

    // f(row, column, x, y) for the lane's pairs of sums
    template <class F> __device__ inline void each_pair(const Tile& tile, const F& f) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        UNROLLED(i, M)
            UNROLLED(h, 2) {
                const int row = (warp / WARP_COLUMNS * M + i) * 16 + h * 8 + lane / 4;
                if (row >= tile.rows) continue;
                UNROLLED(n, N) {
                    const int column = (warp % WARP_COLUMNS * N + n) * 8 + lane % 4 * 2;
                    if (column < tile.columns) f(row, column, sums[i][n][2 * h], sums[i][n][2 * h + 1]);
                }
            }
    }

    // sums <- sums + A B
    __device__ inline void add(const Tile& global) {
        extern __shared__ __align__(128) unsigned char shared[];
        const Tile tile = global;
        const auto load = [&](int n) {
            const int term = n * DEPTH, left = tile.depth - term;
            const unsigned to = shared_address(shared) + n % STAGES * STAGE;
            if (left > 0) {
                A::copy(to, tile.a + (A_ACROSS ? (long long)term * tile.a_stride : term), tile.a_stride,
                        tile.rows, left);
                B::copy(to + A_BYTES, tile.b + (B_ACROSS ? (long long)term * tile.b_stride : term),
                        tile.b_stride, tile.columns, left);
            }
            close_group();
        };
        UNROLLED(n, STAGES - 1) load(n);
#pragma unroll 1
        for (int n = 0; n * DEPTH < tile.depth; ++n) {
            wait_groups<STAGES - 2>();
            __syncthreads();  // the stage is here, and no warp reads the one before
            load(n + STAGES - 1);
            add_stage(shared + n % STAGES * STAGE);
        }
    }

    __device__ inline void add_stage(const unsigned char* from) {
        constexpr int SLICE = FORMAT == FP32 ? 8 : 16;
        const int warp = threadIdx.x / 32;
        float T[M][N][4] = {};                      // in FP32: the tensor cores round long sums towards zero
#pragma unroll(FORMAT == FP32 ? 2 : DEPTH / SLICE)  // registers suffice
        for (int slice = 0; slice < DEPTH / SLICE; ++slice) {
            unsigned a[M][4], a_low[M][4];
            UNROLLED(i, M) A::get(a[i], from, (warp / WARP_COLUMNS * M + i) * 16, slice * SLICE);
            if (FORMAT == FP32)
                UNROLLED(i, M) split(a[i], a[i], a_low[i]);
            UNROLLED(pair, N / 2) {
                unsigned b[4];
                B::get(b, from + A_BYTES, (warp % WARP_COLUMNS * N + 2 * pair) * 8, slice * SLICE);
#if FORMAT == FP32
                unsigned low[4];
                split(b, b, low);
                UNROLLED(part, 3)
                    UNROLLED(n, 2)
                        UNROLLED(i, M) {
                            const auto& right = part == 1 ? low : b;
                            multiply_tf32(T[i][2 * pair + n], part ? a[i] : a_low[i], right[n], right[n + 2]);
                        }
#else
                UNROLLED(n, 2)
                    UNROLLED(i, M) multiply_16bit(sums[i][2 * pair + n], a[i], b[n], b[n + 2]);
#endif
            }
        }
        if (FORMAT == FP32)
            UNROLLED(i, M)
                UNROLLED(n, N)
                    UNROLLED(e, 4) sums[i][n][e] += T[i][n][e];
    }

    __device__ inline void store(const Tile& tile, float factor) {
        each_pair(tile, [&](int row, int column, float x, float y) {
            put((Element*)tile.out + row * tile.out_stride + column, x * factor, y * factor);
        });
    }
};

constexpr int LINE = 128 / sizeof(Element);  // numbers of a cache line
using OfWeights = Product<2, FORMAT == FP32 ? 4 : 8, 32, FORMAT == FP32 ? 3 : 5, true, true>;  // A^T B
using OfRows = Product<1, 2, LINE, 5, false, false>;                                           // A B^T
using OfX = Product<1, 4, LINE, 4, false, true>;                                               // A B

// products: the rows and columns of each product's tile, and its bytes of shared memory.
extern "C" __device__ int products[9] = {OfWeights::ROWS, OfWeights::COLUMNS, OfWeights::SHARED,
                                         OfRows::ROWS,    OfRows::COLUMNS,    OfRows::SHARED,
                                         OfX::ROWS,       OfX::COLUMNS,       OfX::SHARED};

extern "C" __global__ void __launch_bounds__(THREADS, 2) weight_gradients(const Tile* tiles) {
    wait_for_launches();
    OfWeights product;
    product.add(tiles[blockIdx.x]);
    const Tile tile = tiles[blockIdx.x];  // again, for want of registers
    product.each_pair(tile, [&](int row, int column, float x, float y) {
        *(float2*)((float*)tile.out + row * tile.out_stride + column) = float2{x, y};
    });
}

// The product over the power 0, 1 or 2 of X's norm.
template <class Of> __device__ inline void multiply(const Tile tile, int power) {
    const float norm = power ? sqrtf(total(tile.squares, tile.count)) + LEAST_NORM : 1.0f;
    Of product;
    product.add(tile);
    product.store(tile, 1.0f / (power == 2 ? norm * norm : norm));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gram(const Tile* tiles, int power) {
    wait_for_launches();
    multiply<OfRows>(tiles[blockIdx.x], power);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) apply(const Tile* tiles, int power) {
    wait_for_launches();
    multiply<OfX>(tiles[blockIdx.x], power);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) polynomial(const Tile* tiles) {
    const Tile tile = tiles[blockIdx.x];
    wait_for_launches();
    OfRows product;
    product.each_pair(tile, [&](int row, int column, float& x, float& y) {
        const Element* const S = tile.a + row * tile.a_stride + tile.column + column;
        const int right = tile.column + column - tile.row - row;  // of the diagonal
        x = A3 / A5 * to_float(S[0]) + (right == 0 ? A1 / A5 : 0.0f);
        y = A3 / A5 * to_float(S[1]) + (right == -1 ? A1 / A5 : 0.0f);
    });
    product.add(tile);
    product.store(tile, A5);
}

// ---- gradients ----

// 8 columns of a gradient: the sum of `slices` matrices of this width, times gamma if that is not -1, and of
// those in `added`, the embedding's part of the head, if it is not null.
struct Strip {
    const float *sums, *added;
    long long slice, at, gamma;  // from slice to slice; of the weight and of gamma in the flat tensors
    int slices, rows, width;
};

__device__ inline void add_slices(float4& x, const float* from, const Strip& strip) {
    constexpr int AT_A_TIME = 8;  // loads under way
#pragma unroll 1
    for (int first = 0; first < strip.slices; first += AT_A_TIME) {
        float4 y[AT_A_TIME];
        UNROLLED(n, AT_A_TIME)
            y[n] = first + n < strip.slices ? *(const float4*)(from + (first + n) * strip.slice) : float4{};
        UNROLLED(n, AT_A_TIME) x.x += y[n].x, x.y += y[n].y, x.z += y[n].z, x.w += y[n].w;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    reduce_gradients(const Strip* strips, const float* value, float* gradient, float* squares,
                     const float* losses, int rows, double* loss) {
    wait_for_launches();
    __shared__ float parts[WARPS][8];
    if (blockIdx.x == gridDim.x - 1) {  // beyond the strips
        const float all = total(losses, rows);
        if (threadIdx.x == 0) {
            loss[0] = all / rows;
            loss[1] += loss[0];
        }
        return;
    }
    const Strip strip = strips[blockIdx.x];
    const bool scaled = strip.gamma >= 0;
    const int column = threadIdx.x % 2 * 4;
    const float4 gamma = scaled ? *(const float4*)(value + strip.gamma + column) : float4{1, 1, 1, 1};
    float4 of_gamma = {};
    float square = 0.0f;
#pragma unroll 1
    for (int row = threadIdx.x / 2; row < strip.rows; row += THREADS / 2) {
        const long long place = (long long)row * strip.width + column;
        const float4 w = scaled ? *(const float4*)(value + strip.at + place) : float4{};
        float4 x = {};
        add_slices(x, strip.sums + place, strip);
        of_gamma.x += x.x * w.x;
        of_gamma.y += x.y * w.y;
        of_gamma.z += x.z * w.z;
        of_gamma.w += x.w * w.w;
        x.x *= gamma.x;
        x.y *= gamma.y;
        x.z *= gamma.z;
        x.w *= gamma.w;
        if (strip.added) add_slices(x, strip.added + place, strip);
        square += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
        ((float4*)gradient)[(strip.at + place) / 4] = x;
    }
    const float each[4] = {of_gamma.x, of_gamma.y, of_gamma.z, of_gamma.w};
    UNROLLED(e, 4) {
        const float of_warp = sum<2, 32>(each[e]);
        if (threadIdx.x % 32 < 2) parts[threadIdx.x / 32][column + e] = of_warp;
    }
    __syncthreads();
    if (scaled && threadIdx.x < 8) {
        float x = 0.0f;
        UNROLLED(w, WARPS) x += parts[w][threadIdx.x];
        gradient[strip.gamma + threadIdx.x] = x;
        square += x * x;
    }
    square = block_sum(square);
    if (threadIdx.x == 0) squares[blockIdx.x] = square;
}

// ---- optimizers ----

struct Flat {
    float *value, *gradient, *average, *first, *second;
};

constexpr int HEIGHT = 8;  // numbers of a thread, below each other in 32 columns of a warp
// At most 8 HEIGHT rows of 32 columns of a parameter.
struct Piece {
    long long at, x;            // the first number in the flat tensors, and in X
    int rows, width;            // of the piece, of the parameter
    int x_row, x_column, muon;  // from a row and a column to the next in X: one is 1; 0: AdamW updates it
    float rate, scale;          // the rate's peak; what X is multiplied with beside it

    __device__ inline int first_row() const { return threadIdx.x / 32 * HEIGHT; }
    // inside: whether the thread has a number i. in_flat, in_X: where it is.
    __device__ inline bool inside(int i) const { return first_row() + i < rows; }
    __device__ inline long long in_flat(int i) const {
        return at + (long long)(first_row() + i) * width + threadIdx.x % 32;
    }
    __device__ inline long long in_X(int i) const {
        return x + (long long)(first_row() + i) * x_row + (long long)(threadIdx.x % 32) * x_column;
    }
};

// Adds one to the number of updates, too.
extern "C" __global__ void __launch_bounds__(THREADS)
    momentum(const Piece* pieces, const Flat flat, Element* X, const float* squares, int count,
             float* squares_of_x, float* updates) {
    const Piece piece = pieces[blockIdx.x];
    wait_for_launches();
    float g[HEIGHT] = {}, m[HEIGHT] = {}, square = 0.0f;
    __align__(16) Element x[HEIGHT];
    UNROLLED(i, HEIGHT)
        if (piece.inside(i)) g[i] = flat.gradient[piece.in_flat(i)], m[i] = flat.first[piece.in_flat(i)];
    const float clip = clip_factor(squares, count);
    UNROLLED(i, HEIGHT) {
        m[i] += (1.0f - MOMENTUM) * (g[i] * clip - m[i]);
        const float nesterov = g[i] * clip + MOMENTUM * (m[i] - g[i] * clip);
        square += nesterov * nesterov;
        x[i] = to_element(nesterov);
    }
    if (piece.inside(0)) {
        UNROLLED(i, HEIGHT) flat.first[piece.in_flat(i)] = m[i];
        if (piece.x_row == 1)
            UNROLLED(i, HEIGHT / OF_LANE) ((uint4*)X)[piece.in_X(0) / OF_LANE + i] = ((const uint4*)x)[i];
        else
            UNROLLED(i, HEIGHT) X[piece.in_X(i)] = x[i];
    }
    square = block_sum(square);
    if (threadIdx.x == 0) squares_of_x[blockIdx.x] = square;
    if (threadIdx.x == 0 && blockIdx.x == 0) *updates += 1.0f;
}

// All is read before something is written, so that the latencies overlap.
extern "C" __global__ void __launch_bounds__(THREADS)
    update(const Piece* pieces, const Flat flat, const Element* X, const float* squares, int count,
           const float* updates, const float* fraction, const float* decay, float weight_decay) {
    const Piece piece = pieces[blockIdx.x];
    wait_for_launches();
    const float rate = piece.rate * *fraction, decayed = 1.0f - rate * weight_decay, toward = 1.0f - *decay;
    float value[HEIGHT] = {}, average[HEIGHT] = {}, by[HEIGHT];
    UNROLLED(i, HEIGHT)
        if (piece.inside(i))
            value[i] = flat.value[piece.in_flat(i)], average[i] = flat.average[piece.in_flat(i)];
    if (piece.muon) {
        __align__(16) Element x[HEIGHT];
        if (!piece.inside(0)) return;
        if (piece.x_row == 1)
            UNROLLED(i, HEIGHT / OF_LANE) ((uint4*)x)[i] = ((const uint4*)X)[piece.in_X(0) / OF_LANE + i];
        else
            UNROLLED(i, HEIGHT) x[i] = X[piece.in_X(i)];
        UNROLLED(i, HEIGHT) by[i] = rate * piece.scale * to_float(x[i]);
    } else {
        float g[HEIGHT] = {}, first[HEIGHT] = {}, second[HEIGHT] = {};
        UNROLLED(i, HEIGHT)
            if (piece.inside(i)) {
                const long long at = piece.in_flat(i);
                g[i] = flat.gradient[at];
                first[i] = flat.first[at];
                second[i] = flat.second[at];
            }
        const float clip = clip_factor(squares, count);
        const float length = rate / -expm1f(*updates * LOG_BETA_1);  // over 1 - beta_1^updates
        const float root = 1.0f / sqrtf(-expm1f(*updates * LOG_BETA_2));
        UNROLLED(i, HEIGHT) {
            first[i] += BLEND_1 * (g[i] * clip - first[i]);
            second[i] += BLEND_2 * (g[i] * clip * g[i] * clip - second[i]);
            by[i] = length * first[i] / (sqrtf(second[i]) * root + EPSILON);
            if (piece.inside(i))
                flat.first[piece.in_flat(i)] = first[i], flat.second[piece.in_flat(i)] = second[i];
        }
    }
    UNROLLED(i, HEIGHT)
        if (piece.inside(i)) {
            const float now = value[i] * decayed - by[i];
            flat.value[piece.in_flat(i)] = now;
            flat.average[piece.in_flat(i)] = average[i] + toward * (now - average[i]);
        }
}

// ---- packed weights ----

// Blocks of a packed W (rows, width) or its transpose, (n, k), with W's columns times gamma if that is not -1.
struct Packing {
    long long at, gamma, out;                  // out: of the packed matrix
    int rows, width, n, k, transposed, first;  // first: of the packed matrix's blocks; each warp has one
};

extern "C" __global__ void __launch_bounds__(THREADS)
    pack_weights(const Packing* packings, const float* value, Element* packed) {
    const Packing p = packings[blockIdx.x];
    wait_for_launches();
    const int block = p.first + threadIdx.x / 32, lane = threadIdx.x % 32, blocks = p.k / BLOCK_K;
    const int n = block / blocks * 8 + lane / 4, k = block % blocks * BLOCK_K;
    __align__(16) Element x[OF_LANE];
    if (n >= p.n) return;
    UNROLLED(j, OF_LANE) {
        const int other = k + packed_column(lane, j), row = p.transposed ? other : n;
        const int column = p.transposed ? n : other;
        float w = row < p.rows ? value[p.at + (long long)row * p.width + column] : 0.0f;
        if (p.gamma >= 0) w *= value[p.gamma + column];
        x[j] = to_element(w);
    }
    *(uint4*)(packed + p.out + (block * 32 + lane) * OF_LANE) = *(const uint4*)x;
}
