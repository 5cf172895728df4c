// The products of a block's share of a matrix with the numbers of each text, for cluster.cu.
#pragma once

#include "cluster.h"

// Sums each of `count` (a power of two) groups of numbers over the 2 far lanes that differ in the bits up to
// `far`, as a tree from the farthest on. A lane gets the group of its highest bits. Sums `all` for all lanes.
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

// The products of a block's rows of a matrix with K numbers of each text; in(text, piece) returns a lane's.
// finish(row, text, product) changes each; store(row, text, numbers, lane, lanes) gets those of this and the
// following rows. squares: the lane's sum of squares, if the inputs are not yet normalised.
template <int rows, int K, class In, class Finish, class Store, class... Squares>
__device__ inline void products(const Weight (&matrix)[rows][K], int texts, const In& in, const Finish& finish,
                                const Store& store, Squares... squares) {
    using Of = Split<rows, K>;
    constexpr int count = power_of_two(TEXTS) < Of::lanes ? power_of_two(TEXTS) : Of::lanes;
    constexpr int numbers = (TEXTS + count - 1) / count, same = Of::lanes / count;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * Of::per_warp,
              own_row = lane / Of::lanes;
    const int row = first + own_row;
    const bool any = own_row < Of::per_warp && row < rows;
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
    float totals[numbers];
    reduce<Of::lanes / 2>(sums, totals, squares...);
    float scale = 1;
    ((scale = inverse_deviation(squares)), ...);
    if constexpr (TEXTS == 1 && Of::per_warp % 4 == 0 && rows % Of::per_warp == 0) {
        const float y = finish(any ? row : 0, 0, totals[0] * scale);
        UNROLLED(quad, Of::per_warp / 4) {
            float four[4];
            UNROLLED(i, 4) four[i] = __shfl_sync(~0u, y, (4 * quad + i) * Of::lanes);
            if (first < rows) store(first + 4 * quad, 0, four, lane, LANES);
        }
    } else {
        UNROLLED(n, numbers) {
            const int text = lane % Of::lanes / same * numbers + n;
            if (!any || text >= texts) continue;
            const float y[1] = {finish(row, text, totals[n] * scale)};
            store(row, text, y, lane % same, same);
        }
    }
}

// LayerNorm of x[t], not divided by the standard deviation. squares: the lane's share of the variance. By whole
// warps.
template <class Of> __device__ inline Deviations<Of> centred(const Norm& norm, int t, float& squares) {
    Deviations<Of> row(own().x[t]);
    squares = 0;
    UNROLLED(i, Of::pieces) {
        const int k = Of::input(i);
        if (k >= WIDTH) continue;
        squares += dot(0, row.at[i], row.at[i]);
        row.at[i] = row.at[i] * load4(&norm.gain[k]);
    }
    return row;
}

// LayerNorm of each text to `normed`, by one warp each.
__device__ inline void normalise(const Norm& norm) {
    for (int t = threadIdx.x / LANES; t < TEXTS; t += WARPS) {
        float squares;
        const auto row = centred<WholeWarp>(norm, t, squares);
        const float scale = inverse_deviation(sum<1, LANES>(squares));
        UNROLLED(i, WholeWarp::pieces) {
            const int k = WholeWarp::input(i);
            if (k < WIDTH) store4(&own().normed[t][k], norm.plus_bias(k, row.at[i] * scale));
        }
    }
    __syncthreads();
}

// products() with LayerNorm: each warp normalises one text, and its squares are summed beside the products.
template <int rows, class Finish, class Store>
__device__ inline void products_of_normalised(const Weight (&matrix)[rows][WIDTH], const Norm& norm, int texts,
                                              const Finish& finish, const Store& store) {
    using Of = Split<rows, WIDTH>;
#if TEXTS == 1 && !BIAS
    float squares;
    const auto row = centred<Of>(norm, 0, squares);
    products(matrix, texts, [&](int, int piece) { return row.at[piece]; }, finish, store, squares);
#else
    normalise(norm);
    const auto in = [](int t, int piece) { return load4(&own().normed[t][Of::input(piece)]); };
    products(matrix, texts, in, finish, store);
#endif
}
