// Split on the lanes of a warp, for few queries. split.cu includes it without TENSOR.
//
// LANES lanes load a row, 16 bytes each; a warp's 32 / LANES rows have their own m, l and O, merged at the
// end. The next strip's K is loaded after S, its V after O: LOADS to 2 LOADS loads are in flight.
#pragma once

constexpr int VECTOR = 16 / sizeof(Element);
constexpr int CHUNKS = d / VECTOR, PER = WIDTH / (LANES * VECTOR);  // of a row, of a lane
constexpr int ROWS = 32 / LANES;
constexpr int STRIP = LOADS * ROWS;  // keys of a warp at a time
static_assert(d % VECTOR == 0);

// What a lane loads: PER * 16 bytes of a row. Chunk c of the lane is chunk c * LANES + its place.
using Piece = unsigned[PER][4];
__device__ inline void load(Piece& piece, const Element* row, int place, bool exists) {
    UNROLLED(c, PER)
        load_words(piece[c], row + (c * LANES + place) * VECTOR,
                   exists && ((c + 1) * LANES <= CHUNKS || c * LANES + place < CHUNKS));
}
__device__ inline void widen(float (&to)[PER * VECTOR], const Piece& piece) {
    UNROLLED(c, PER)
        UNROLLED(w, 4) {
#if FORMAT == FP32
            to[4 * c + w] = __uint_as_float(piece[c][w]);
#else
            to[8 * c + 2 * w] = to_float((Element)(piece[c][w] & 0xffff));
            to[8 * c + 2 * w + 1] = to_float((Element)(piece[c][w] >> 16));
#endif
        }
}

// A lane's place among those that share a row, and its group's rows.
struct Lane {
    const int place = threadIdx.x % LANES, group = threadIdx.x % 32 / LANES;
    // Where the lane's numbers begin that hold number c of a row.
    __device__ int column(int c) const { return (c / VECTOR * LANES + place) * VECTOR + c % VECTOR; }
};

using Output = float[BR][PER * VECTOR];

// S <- q K^T
__device__ inline void scores(float (&s)[BR][LOADS], const float (*q)[WIDTH], const Piece (&K)[LOADS],
                              const Lane& lane) {
    UNROLLED(u, LOADS) {
        float x[PER * VECTOR];
        widen(x, K[u]);
        UNROLLED(i, BR) {
#pragma unroll
            for (int c = 0; c < PER * VECTOR; c += 4) {
                const float4 y = *(const float4*)&q[i][lane.column(c)];
                s[i][u] += y.x * x[c] + y.y * x[c + 1] + y.z * x[c + 2] + y.w * x[c + 3];
            }
        }
    }
}

// The results of the groups of a warp, merged.
__device__ inline void merge_groups(Output& o, float (&m)[BR], float (&l)[BR], const Result& result,
                                    const Lane& lane) {
    UNROLLED(i, BR) {
        const float top = largest<LANES, 32>(m[i]);
        const float shrink = exp2_approx(m[i] - subtrahend(top));
        l[i] *= shrink;
        UNROLLED(c, PER * VECTOR) o[i][c] *= shrink;
        l[i] = sum<LANES, 32>(l[i]);
        UNROLLED(c, PER * VECTOR) o[i][c] = sum<LANES, 32>(o[i][c]);
        if (lane.group == 0) {
#pragma unroll
            for (int c = 0; c < PER * VECTOR; c += 4)
                *(float4*)&result.o[i][lane.column(c)] = {o[i][c], o[i][c + 1], o[i][c + 2], o[i][c + 3]};
        }
        if (threadIdx.x % 32 == 0) result.m[i] = top, result.l[i] = l[i];
    }
}

// The strips of a team. queries: memory for BR rows of WIDTH numbers.
__device__ inline void attend_strips(const Span& span, int team, const Result& result, float* queries) {
    auto q_shared = (float (*)[WIDTH])queries;
    // The queries first: they would arrive after all of K and V that is under way.
    constexpr int NUMBERS = (BR * WIDTH + THREADS - 1) / THREADS;  // of the queries, a thread's
    float numbers[NUMBERS];
    UNROLLED(e, NUMBERS) {
        const int n = e * THREADS + threadIdx.x, i = n / WIDTH, c = n % WIDTH;
        const bool exists = i < BR && i < span.rows && c < d;
        numbers[e] = exists ? to_float(span.query(i)[c]) * span.scale : 0;
    }
    const Lane lane;
    const int end = span.end, sees = span.sees;
    int j = span.start + team * STRIP + lane.group;  // the lane's first key of the strip
    const Element *k_at = span.k + j * span.k_row, *v_at = span.v + j * span.v_row;
    Piece K[LOADS], V[LOADS];
    UNROLLED(u, LOADS) load(K[u], k_at + u * ROWS * span.k_row, lane.place, j + u * ROWS < end);
    UNROLLED(u, LOADS) load(V[u], v_at + u * ROWS * span.v_row, lane.place, j + u * ROWS < end);
    UNROLLED(e, NUMBERS)
        if (const int n = e * THREADS + threadIdx.x; n < BR * WIDTH)
            q_shared[n / WIDTH][n % WIDTH] = numbers[e];
    __syncthreads();
    Output o = {};
    float m[BR], l[BR] = {};
    UNROLLED(i, BR) m[i] = -INF;

    for (int j0 = span.start + team * STRIP; j0 < end; j0 += TEAMS * STRIP) {
        float s[BR][LOADS] = {};
        scores(s, q_shared, K, lane);
        const int next = j + TEAMS * STRIP;
        k_at += TEAMS * STRIP * span.k_row;
        UNROLLED(u, LOADS) load(K[u], k_at + u * ROWS * span.k_row, lane.place, next + u * ROWS < end);

        // P <- 2^(S - m), l and O as m grows
        const bool masked = RULES ? CHANGES || span.hides(j0, STRIP) : j0 + STRIP > min(end, sees);
        UNROLLED(i, BR) {
#pragma unroll
            for (int far = 1; far < LANES; far *= 2)
                UNROLLED(u, LOADS) s[i][u] += __shfl_xor_sync(~0u, s[i][u], far);
            if (masked) {
#if RULES
                const Row row = span.row(i, j);
                UNROLLED(u, LOADS) s[i][u] = row(s[i][u], u * ROWS);
#else
                UNROLLED(u, LOADS)
                    if (j + u * ROWS >= min(end, sees + i)) s[i][u] = -INF;
#endif
            }
            float top = m[i];
            UNROLLED(u, LOADS) top = fmaxf(top, s[i][u]);
            const float less = subtrahend(top), shrink = exp2_approx(m[i] - less);
            m[i] = top;
            l[i] *= shrink;
            UNROLLED(u, LOADS) s[i][u] = exp2_approx(s[i][u] - less), l[i] += s[i][u];
            UNROLLED(c, PER * VECTOR) o[i][c] *= shrink;
        }

        // O <- O + P V
        UNROLLED(u, LOADS) {
            float x[PER * VECTOR];
            widen(x, V[u]);
            UNROLLED(i, BR)
                UNROLLED(c, PER * VECTOR) o[i][c] += s[i][u] * x[c];
        }
        v_at += TEAMS * STRIP * span.v_row;
        UNROLLED(u, LOADS) load(V[u], v_at + u * ROWS * span.v_row, lane.place, next + u * ROWS < end);
        j = next;
    }
    merge_groups(o, m, l, result, lane);
}
