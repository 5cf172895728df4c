// The training step on CUDA after the backward pass: gradients of the weights, Muon, AdamW, the packed weights.
//
// Shapes: FORMAT of the operands is FP32 or BF16, widths are multiples of 32, rows of 16. Least architecture:
//     sm_80. Sums and the optimizers' numbers are float32. No atomics: two runs give equal bits.
// Launch: each kernel has a table of jobs by training/cuda/update.py, one for each block of THREADS threads:
//         weight_gradients   partial sums of dW' = dY^T X over slices of the rows       tensor cores
//         reduce_gradients   gradients, and their sums of squares; the mean loss
//         momentum           Muon's X, and its sums of squares
//     5x  gram               S <- X X^T                                                 tensor cores
//         polynomial         P <- a I + b S + c S^2                                     tensor cores
//         apply              X <- P X                                                   tensor cores
//         update             Muon's and AdamW's step, the average of the values
//         pack               the weights as passes.cu reads them
//     X has no more rows than columns: it is the momentum or its transpose. It is divided by its norm in the
//     first iteration only.
// Shared memory: of a product, STAGES stages of DEPTH terms of its two operands (`shared_bytes`).
#include "step.h"

constexpr int WARPS_BELOW = 4, WARPS_BESIDE = 2;  // a block's warps in a tile of a product
static_assert(THREADS == 32 * WARPS_BELOW * WARPS_BESIDE, "warps");
constexpr float A1 = 3.4445f, A3 = -4.7750f, A5 = 2.0315f;  // of Muon, see training/muon.py
constexpr float MOMENTUM = 0.95f, LEAST_NORM = 1e-7f;
constexpr float CLIP = 1.0f, CLIP_LEAST = 1e-6f;  // of training/trainer.py and clip_grad_norm_()
constexpr float EPSILON = 1e-8f, BLEND_1 = 0.1f, BLEND_2 = 0.01f;  // of AdamW: 1 - beta_1, 1 - beta_2
constexpr float LOG_BETA_1 = -0.10536051565782628f, LOG_BETA_2 = -0.01005033585350145f;

// The sum of x over the block's threads, in each.
__device__ inline float block_sum(float x) {
    __shared__ float sums[THREADS / 32];
    x = sum<1, 32>(x);
    __syncthreads();  // all have read the sums of the call before
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    UNROLLED(w, THREADS / 32) x += sums[w];
    return x;
}
__device__ inline float total(const float* x, int count) {
    float mine = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += THREADS) mine += x[i];
    return block_sum(mine);
}
__device__ inline float clip_factor(const float* squares, int count) {
    return fminf(1.0f, CLIP / (sqrtf(total(squares, count)) + CLIP_LEAST));
}

// ---- products ----

// A tile of a product A B, at most as large as the kernel's. Operands are row-major.
struct Tile {
    const Element *a, *b;  // the first terms of the tile's first row or column
    void* out;             // its first number
    const Element* S;      // polynomial: the same tile of S
    const float* squares;  // the matrix's sums of squares, `count` of them
    int a_stride, b_stride, out_stride;
    int rows, columns, depth;
    int diagonal;  // column - row of the matrix's diagonal in the tile
    int count;
};

// A's rows or B's columns of a tile, SIZE of them, in shared memory. ACROSS: terms of a sum are below each other.
template <int SIZE, int DEPTH, bool ACROSS>
struct Operand {
    static constexpr int ROWS = ACROSS ? DEPTH : SIZE, COLUMNS = ACROSS ? SIZE : DEPTH;
    // lanes that read at a time are in different banks
    static constexpr int STRIDE = COLUMNS * sizeof(Element) + (FORMAT == FP32 && ACROSS ? 32 : 16);
    static constexpr int BYTES = ROWS * STRIDE;

    // Copies of the terms from `from` on begin; those beyond size and depth become 0.
    __device__ inline static void copy(unsigned to, const Element* from, int stride, int size, int depth) {
        const int rows = ACROSS ? depth : size, columns = ACROSS ? size : depth;
        each_piece<ROWS, COLUMNS / OF_LANE>([&](int, int row, int piece) {
            const bool inside = row < rows && piece * OF_LANE < columns;
            const Element* const source = from + (inside ? (long long)row * stride + piece * OF_LANE : 0);
            copy_async(to + row * STRIDE + piece * 16, source, inside ? 16 : 0);
        });
    }

    // A's registers for 16 rows from `first` on and SLICE terms; for B x[0], x[2] and x[1], x[3] of two tiles.
    __device__ inline static void get(unsigned (&x)[4], const unsigned char* at, int first, int term) {
        const int lane = threadIdx.x % 32;
#if FORMAT == FP32
        UNROLLED(e, 4) {
            const int i = first + lane / 4 + e % 2 * 8, k = term + lane % 4 + e / 2 * 4;
            x[e] = *(const unsigned*)(at + (ACROSS ? k : i) * STRIDE + (ACROSS ? i : k) * 4);
        }
#else
        const unsigned from = shared_address(at);
        if (ACROSS)
            load_transposed(x, from + (term + lane % 8 + lane / 16 * 8) * STRIDE + (first + lane / 8 % 2 * 8) * 2);
        else
            load_matrices(x, from + (first + lane % 16) * STRIDE + (term + lane / 16 * 8) * 2);
#endif
    }
};

// Tiles of ROWS x COLUMNS: of a warp M x N tiles of mma.sync.
template <int M, int N, int DEPTH, int STAGES, bool A_ACROSS, bool B_ACROSS>
struct Product {
    static constexpr int ROWS = WARPS_BELOW * M * 16, COLUMNS = WARPS_BESIDE * N * 8;
    static constexpr int SLICE = FORMAT == FP32 ? 8 : 16;  // terms that an mma.sync sums
    using A = Operand<ROWS, DEPTH, A_ACROSS>;
    using B = Operand<COLUMNS, DEPTH, B_ACROSS>;
    static constexpr int STAGE = A::BYTES + B::BYTES, SHARED = STAGES * STAGE;
    using Sums = float[M][N][4];

    // f(row, column, x, y) for the lane's pairs of sums in the tile
    template <class F>
    __device__ inline static void each_pair(Sums& sums, const Tile& tile, const F& f) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        UNROLLED(i, M)
            UNROLLED(h, 2)
                UNROLLED(n, N) {
                    const int row = (warp / WARPS_BESIDE * M + i) * 16 + h * 8 + lane / 4;
                    const int column = (warp % WARPS_BESIDE * N + n) * 8 + lane % 4 * 2;
                    if (row < tile.rows && column < tile.columns)
                        f(row, column, sums[i][n][2 * h], sums[i][n][2 * h + 1]);
                }
    }

    // sums <- sums + A B
    __device__ inline static void add(Sums& sums, const Tile& of) {
        const Tile tile = of;
        extern __shared__ __align__(128) unsigned char shared[];
        const auto load = [&](int n) {
            const int term = n * DEPTH, left = tile.depth - term;
            if (left > 0) {
                const unsigned to = shared_address(shared) + n % STAGES * STAGE;
                const long long a = A_ACROSS ? (long long)term * tile.a_stride : term;
                const long long b = B_ACROSS ? (long long)term * tile.b_stride : term;
                A::copy(to, tile.a + a, tile.a_stride, tile.rows, left);
                B::copy(to + A::BYTES, tile.b + b, tile.b_stride, tile.columns, left);
            }
            close_group();
        };
        UNROLLED(n, STAGES - 1) load(n);
#pragma unroll 1
        for (int n = 0; n * DEPTH < tile.depth; ++n) {
            wait_groups<STAGES - 2>();
            __syncthreads();  // the stage is here, and no warp reads the one before
            load(n + STAGES - 1);
            add_stage(sums, shared + n % STAGES * STAGE);
        }
    }

    __device__ inline static void add_stage(Sums& sums, const unsigned char* at) {
        const int warp = threadIdx.x / 32, row = warp / WARPS_BESIDE * M * 16, column = warp % WARPS_BESIDE * N * 8;
#if FORMAT == FP32
        Sums of_stage = {};  // the tensor cores round sums towards zero: few terms are left to them
#endif
        UNROLLED(slice, DEPTH / SLICE) {
            unsigned a[M][4], b[N / 2][4];
            UNROLLED(i, M) A::get(a[i], at, row + i * 16, slice * SLICE);
            UNROLLED(n, N / 2) B::get(b[n], at + A::BYTES, column + n * 16, slice * SLICE);
#if FORMAT == FP32
            unsigned a_low[M][4], b_low[N / 2][4];
            UNROLLED(i, M) split(a[i], a[i], a_low[i]);
            UNROLLED(n, N / 2) split(b[n], b[n], b_low[n]);
            UNROLLED(part, 3)
                UNROLLED(n, N)
                    UNROLLED(i, M) {
                        const auto& right = part == 1 ? b_low[n / 2] : b[n / 2];
                        multiply_tf32(of_stage[i][n], part ? a[i] : a_low[i], right[n % 2], right[n % 2 + 2]);
                    }
#else
            UNROLLED(n, N)
                UNROLLED(i, M) multiply_16bit(sums[i][n], a[i], b[n / 2][n % 2], b[n / 2][n % 2 + 2]);
#endif
        }
#if FORMAT == FP32
        UNROLLED(i, M)
            UNROLLED(n, N)
                UNROLLED(e, 4) sums[i][n][e] += of_stage[i][n][e];
#endif
    }
};

__device__ inline void store_pair(Element* to, float x, float y) {
#if FORMAT == FP32
    *(float2*)to = float2{x, y};
#else
    *(unsigned*)to = pack(x, y);
#endif
}

constexpr int LINE = 128 / sizeof(Element);  // numbers of a cache line
using OfWeights = Product<2, FORMAT == FP32 ? 4 : 8, 32, FORMAT == FP32 ? 3 : 5, true, true>;
using OfRows = Product<1, 2, LINE, 5, false, false>;  // A B^T
using OfX = Product<1, 4, LINE, 4, false, true>;      // A B

// Of weight_gradients, of gram and polynomial, and of apply: rows and columns of a tile, bytes of shared memory.
extern "C" __device__ const int products[9] = {OfWeights::ROWS, OfWeights::COLUMNS, OfWeights::SHARED,
                                               OfRows::ROWS,    OfRows::COLUMNS,    OfRows::SHARED,
                                               OfX::ROWS,       OfX::COLUMNS,       OfX::SHARED};

extern "C" __global__ void __launch_bounds__(THREADS, 2) weight_gradients(const Tile* tiles) {
    const Tile& tile = tiles[blockIdx.x];  // what follows the product is read again, for want of registers
    OfWeights::Sums sums = {};
    OfWeights::add(sums, tile);
    OfWeights::each_pair(sums, tile, [&](int row, int column, float x, float y) {
        *(float2*)((float*)tile.out + (long long)row * tile.out_stride + column) = float2{x, y};
    });
}

// What divides X by its norm.
__device__ inline float inverse_norm(const Tile& tile) {
    return 1.0f / (sqrtf(total(tile.squares, tile.count)) + LEAST_NORM);
}

template <class Of>
__device__ inline void store(typename Of::Sums& sums, const Tile& tile, float factor) {
    Of::each_pair(sums, tile, [&](int row, int column, float x, float y) {
        store_pair((Element*)tile.out + (long long)row * tile.out_stride + column, x * factor, y * factor);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gram(const Tile* tiles, int first) {
    const Tile tile = tiles[blockIdx.x];
    const float factor = first ? inverse_norm(tile) : 1.0f;
    OfRows::Sums sums = {};
    OfRows::add(sums, tile);
    store<OfRows>(sums, tile, factor * factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) polynomial(const Tile* tiles) {
    const Tile tile = tiles[blockIdx.x];
    OfRows::Sums sums = {};
    OfRows::each_pair(sums, tile, [&](int row, int column, float& x, float& y) {
        const Element* const s = tile.S + (long long)row * tile.out_stride + column;
        const int at = column - row - tile.diagonal;
        x = A3 / A5 * to_float(s[0]) + (at == 0 ? A1 / A5 : 0.0f);
        y = A3 / A5 * to_float(s[1]) + (at == -1 ? A1 / A5 : 0.0f);
    });
    OfRows::add(sums, tile);
    store<OfRows>(sums, tile, A5);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) apply(const Tile* tiles, int first) {
    const Tile tile = tiles[blockIdx.x];
    const float factor = first ? inverse_norm(tile) : 1.0f;
    OfX::Sums sums = {};
    OfX::add(sums, tile);
    store<OfX>(sums, tile, factor);
}

// ---- gradients ----

// 8 columns of a gradient, which is a sum of `slices` matrices (rows, width).
struct Strip {
    const float *sums, *added;  // the first slice; added: what is added to it, or null
    long long slice, at, gamma;  // from slice to slice; in the flat tensors; gamma: that of the columns, or -1
    int slices, rows, width;
};

__device__ inline float4 sum_of_slices(const float* from, const Strip& strip) {
    float4 x = {};
#pragma unroll 4
    for (int s = 0; s < strip.slices; ++s) {
        const float4 y = *(const float4*)(from + s * strip.slice);
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    return x;
}

// The last block computes the mean loss.
extern "C" __global__ void __launch_bounds__(THREADS) reduce_gradients(const Strip* strips, const float* value,
                                                                      float* gradient, float* squares,
                                                                      const float* losses, int rows,
                                                                      float* loss) {
    __shared__ float parts[THREADS / 32][8];
    if (blockIdx.x == gridDim.x - 1) {
        const float all = total(losses, rows);
        if (threadIdx.x == 0) *loss = all / rows;
        return;
    }
    const Strip strip = strips[blockIdx.x];
    const int column = threadIdx.x % 2 * 4;
    float gamma[4] = {1.0f, 1.0f, 1.0f, 1.0f}, of_gamma[4] = {}, square = 0.0f;
    if (strip.gamma >= 0)
        UNROLLED(e, 4) gamma[e] = value[strip.gamma + column + e];
#pragma unroll 2
    for (int row = threadIdx.x / 2; row < strip.rows; row += THREADS / 2) {
        const long long place = (long long)row * strip.width + column;
        const float4 sums = sum_of_slices(strip.sums + place, strip);
        float x[4] = {sums.x, sums.y, sums.z, sums.w};
        if (strip.gamma >= 0)
            UNROLLED(e, 4) of_gamma[e] += x[e] * value[strip.at + place + e], x[e] *= gamma[e];
        if (strip.added) {
            const float4 more = sum_of_slices(strip.added + place, strip);
            x[0] += more.x, x[1] += more.y, x[2] += more.z, x[3] += more.w;
        }
        UNROLLED(e, 4) square += x[e] * x[e];
        *(float4*)(gradient + strip.at + place) = make_float4(x[0], x[1], x[2], x[3]);
    }
    if (strip.gamma >= 0) {
        UNROLLED(e, 4) {
            const float of_warp = sum<2, 32>(of_gamma[e]);
            if (threadIdx.x % 32 < 2) parts[threadIdx.x / 32][column + e] = of_warp;
        }
        __syncthreads();
        if (threadIdx.x < 8) {
            float x = 0.0f;
            UNROLLED(w, THREADS / 32) x += parts[w][threadIdx.x];
            gradient[strip.gamma + threadIdx.x] = x;
            square += x * x;
        }
    }
    square = block_sum(square);
    if (threadIdx.x == 0) squares[blockIdx.x] = square;
}

// ---- optimizers ----

struct Flat {
    float *value, *gradient, *average, *first, *second;
};

constexpr int HEIGHT = 8;  // a thread has so many numbers below each other, a warp 32 columns of them
// At most 8 HEIGHT rows of 32 columns of one of Muon's matrices, or 256 HEIGHT numbers in a row of AdamW's.
struct Piece {
    long long at, x;               // the first number in the flat tensors, and in X
    int rows, width;               // of Muon's: rows of the piece, columns of the matrix
    int x_row, x_column;           // from a row, a column to the next in X: one of them is 1
    int count;                     // AdamW's numbers, 0 in Muon's
    float rate, scale;             // the rate's peak; what X is multiplied with beside it

    // The thread's numbers of a matrix: in the flat tensors, `width` apart, and in X, x_row apart
    __device__ inline bool inside() const { return (int)threadIdx.x / 32 * HEIGHT < rows; }
    __device__ inline long long in_flat() const {
        return at + (long long)(threadIdx.x / 32 * HEIGHT) * width + threadIdx.x % 32;
    }
    __device__ inline long long in_x() const {
        return x + (long long)(threadIdx.x / 32 * HEIGHT) * x_row + (long long)(threadIdx.x % 32) * x_column;
    }
};

// Adds one to the number of updates.
extern "C" __global__ void __launch_bounds__(THREADS) momentum(const Piece* pieces, const Flat flat, Element* X,
                                                              const float* squares, int count,
                                                              float* squares_of_x, float* updates) {
    const Piece piece = pieces[blockIdx.x];
    const long long at = piece.in_flat();
    float g[HEIGHT], m[HEIGHT], square = 0.0f;
    if (piece.inside())
        UNROLLED(i, HEIGHT) {
            const long long place = at + (long long)i * piece.width;
            g[i] = flat.gradient[place], m[i] = flat.first[place];
        }
    const float clip = clip_factor(squares, count);
    if (piece.inside()) {
        Element x[HEIGHT];
        UNROLLED(i, HEIGHT) {
            g[i] *= clip;
            m[i] += (1.0f - MOMENTUM) * (g[i] - m[i]);
            flat.first[at + (long long)i * piece.width] = m[i];
            const float nesterov = g[i] + MOMENTUM * (m[i] - g[i]);
            square += nesterov * nesterov;
            x[i] = to_element(nesterov);
        }
        Element* const to = X + piece.in_x();
        if (piece.x_row == 1)
            UNROLLED(i, HEIGHT / OF_LANE) ((uint4*)to)[i] = ((const uint4*)x)[i];
        else
            UNROLLED(i, HEIGHT) to[(long long)i * piece.x_row] = x[i];
    }
    square = block_sum(square);
    if (threadIdx.x == 0) squares_of_x[blockIdx.x] = square;
    if (threadIdx.x == 0 && blockIdx.x == 0) *updates += 1.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) update(const Piece* pieces, const Flat flat, const Element* X,
                                                            const float* squares, int count, const float* updates,
                                                            const float* fraction, const float* decay,
                                                            float weight_decay) {
    const Piece piece = pieces[blockIdx.x];
    const float rate = piece.rate * *fraction, decayed = 1.0f - rate * weight_decay, toward = 1.0f - *decay;
    const auto step = [&](long long place, float by) {
        const float value = flat.value[place] * decayed - by, average = flat.average[place];
        flat.value[place] = value, flat.average[place] = average + toward * (value - average);
    };
    if (piece.count == 0) {
        if (!piece.inside()) return;
        const long long at = piece.in_flat();
        const Element* const from = X + piece.in_x();
        Element x[HEIGHT];
        if (piece.x_row == 1)
            UNROLLED(i, HEIGHT / OF_LANE) ((uint4*)x)[i] = ((const uint4*)from)[i];
        else
            UNROLLED(i, HEIGHT) x[i] = from[(long long)i * piece.x_row];
        UNROLLED(i, HEIGHT) step(at + (long long)i * piece.width, rate * piece.scale * to_float(x[i]));
        return;
    }
    const float clip = clip_factor(squares, count);
    const float length = rate / -expm1f(*updates * LOG_BETA_1);  // by 1 - beta_1^updates
    const float root = 1.0f / sqrtf(-expm1f(*updates * LOG_BETA_2));
#pragma unroll 4
    for (int i = threadIdx.x; i < piece.count; i += THREADS) {
        const long long place = piece.at + i;
        const float g = flat.gradient[place] * clip;
        const float first = flat.first[place] + BLEND_1 * (g - flat.first[place]);
        const float second = flat.second[place] + BLEND_2 * (g * g - flat.second[place]);
        flat.first[place] = first, flat.second[place] = second;
        step(place, length * first / (sqrtf(second) * root + EPSILON));
    }
}

// ---- packed weights ----

// Blocks of a packed (n, k), W or its transpose, times gamma of W's columns if that is not -1.
struct Packing {
    long long at, gamma, out;  // out: of the packed matrix, in all packed numbers
    int rows, width;           // of W
    int n, k, transposed;
    int first;  // of the packed matrix's blocks; each warp has one
};

extern "C" __global__ void __launch_bounds__(THREADS) pack_weights(const Packing* packings, const float* value,
                                                                  Element* packed) {
    const Packing p = packings[blockIdx.x];
    const int block = p.first + threadIdx.x / 32, lane = threadIdx.x % 32, across = p.k / BLOCK_K;
    const int n = block / across * 8 + lane / 4, k = block % across * BLOCK_K;
    if (n >= p.n) return;
    Element x[OF_LANE];
    UNROLLED(j, OF_LANE) {
        const int other = k + packed_column(lane, j), row = p.transposed ? other : n;
        const int column = p.transposed ? n : other;
        float w = row < p.rows ? value[p.at + (long long)row * p.width + column] : 0.0f;
        if (p.gamma >= 0) w *= value[p.gamma + column];
        x[j] = to_element(w);
    }
    *(uint4*)(packed + p.out + (block * 32 + lane) * OF_LANE) = *(const uint4*)x;
}
