// Part 4's backward pass: the tiles of P are recomputed from the logsumexp, so no row of P is stored.
//
// FlashAttention-2 (Dao 2023, arXiv:2307.08691), Algorithm 2, with its loops exchanged:
//
//   for each batch, head, panel i of queries from the last to the first, over all threads:
//       D <- rowsum(dOi * Oi) - dlse_i                                     line 4
//       dQi <- 0
//       for each step j of keys:
//           S  <- scale * Qi Kj^T;  P <- exp(S - lse_i)                    lines 10-11
//           dVj <- dVj + P^T dOi                                           line 12
//           dP <- dOi Vj^T;  dS <- scale * P * (dP - D)                    lines 13-14
//           dQi <- dQi + dS Kj                                             line 15
//           dKj <- dKj + dS^T Qi                                           line 16
//
// The lanes span queries in S, P, dP, dS and dQ, held transposed, and features in dK and dV. A panel takes a
// step after the panel before it, so the sums do not depend on the number of threads.
//
// Scratch: threads x (3 panel d + 2 strip + 3 panel) floats, whatever N is.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "cpu/part4.h"
#include "simd/constants.h"
#include "simd/portable.h"
#include "threads.h"

namespace {

constexpr int64_t STEP = 64;  // keys of a strip, not counting its diagonal

// What D, dO and so dS are multiplied by: the scale, unless dbias could not be told from dS then.
float factor(const AttentionGradient& a) { return a.dbias && a.scale == 0 ? 1 : a.scale; }

// One thread's scratch for a panel of R queries.
struct Panel {
    int64_t R, d;
    float *Qt, *dOt, *dQt, *St, *dPt, *slope, *of_mod, *lse, *rest, *D;

    Panel(int64_t d, Scratch& scratch) : R(portable::panel()), d(d) {
        for (float** each : {&Qt, &dOt, &dQt}) *each = scratch.take(d * R);
        for (float** each : {&St, &dPt, &slope, &of_mod}) *each = scratch.take((STEP + R) * R);
        for (float** each : {&lse, &rest, &D}) *each = scratch.take(R);
    }
    static int64_t floats(int64_t d) {
        Scratch counted;
        Panel(d, counted);
        return counted.taken();
    }
};

// Rows of a head's matrices, from the panel's first query or the step's first key on.
struct Queries {
    int64_t first;
    simd::ConstMatrix Q, dO;
    int64_t count, padded;
};
struct Keys {
    int64_t first;
    simd::ConstMatrix K, V;
    simd::Matrix dK, dV;
};

// The panel's Q^T, dO^T, lse and D; all numbers of `padded` queries are set.
void load(const Panel& t, const Queries& i, const float* out, const float* lse, const float* dlse, float scale,
          float factor) {
    const int64_t R = t.R, d = t.d;
    float* const Ot = t.dQt;  // not in use yet
    for (float* each : {t.Qt, t.dOt, Ot}) std::fill_n(each, d * R, 0.0f);
    portable::transpose({t.Qt, R}, i.Q, i.count, d, scale * SIMD_LOG2E);  // scores are in units of log(2)
    portable::transpose({t.dOt, R}, i.dO, i.count, d, factor);
    portable::transpose({Ot, R}, {out, d}, i.count, d, 1.0f);
    for (float* each : {t.lse, t.rest, t.D}) std::fill_n(each, R, 0.0f);
    for (int64_t r = 0; r < i.count; r++) {
        // lse in units of log(2), with its rounding error kept: P is 2^ of a small difference.
        if (lse[r] == -std::numeric_limits<float>::infinity()) continue;  // it sees no key
        const double exact = static_cast<double>(lse[r]) / static_cast<double>(SIMD_LN2);
        t.lse[r] = static_cast<float>(exact);
        t.rest[r] = static_cast<float>(exact - static_cast<double>(t.lse[r]));
    }
    for (int64_t r = 0; dlse && r < i.count; r++) t.D[r] = -factor * dlse[r];
    for (int64_t e = 0; e < d; e++)
        for (int64_t r = 0; r < R; r++) t.D[r] += t.dOt[e * R + r] * Ot[e * R + r];
    std::fill_n(t.dQt, d * R, 0.0f);
}

// dC_j <- dC_j + sum_r A[j][r] * X_r for `keys` keys; masked numbers of A (key j >= first + r) are 0.
void add_rows(simd::Matrix dC, const float* A, int64_t ldA, simd::ConstMatrix X, const Queries& i, int64_t d,
              int64_t keys, int64_t first) {
    part4::staircase(keys, first, portable::lanes(), [&](int64_t j, int64_t r, int64_t n) {
        portable::multiply_add(dC.from(j), {A + j * ldA + r, ldA, 1}, X.from(r), n, d, i.count - r,
                               i.count - r);
    });
}

// The rules' part of dS^T: the derivatives of mod and softcap; dbias <- what lies between.
void add_rules(const AttentionGradient& a, int64_t head, const Panel& t, const Queries& i, const Keys& j,
               int64_t keys) {
    float* const dbias = a.dbias ? a.dbias + (head * a.Nq + i.first) * a.Nk + j.first : nullptr;
    for (int64_t k = 0; k < keys; k++)
        for (int64_t r = 0; r < i.count; r++) {
            float& dS = t.dPt[k * t.R + r];
            if (a.rules->mod) dS *= t.of_mod[k * t.R + r];
            if (dbias) dbias[r * a.Nk + k] = dS / factor(a), dS *= a.scale / factor(a);
            if (a.rules->softcap != 0) dS *= t.slope[k * t.R + r];
        }
}

// Lines 10 to 16 for `keys` keys, of which query r sees the first `first + r`.
void attend(const AttentionGradient& a, int64_t head, const Panel& t, const Queries& i, const Keys& j,
            int64_t keys, int64_t first) {
    const int64_t R = t.R, d = t.d;
    const auto scores = [&](float* to, simd::ConstMatrix rows, const float* columns) {
        part4::staircase(keys, first, portable::lanes(), [&](int64_t j, int64_t r, int64_t n) {
            portable::multiply({to + j * R + r, R}, {rows.row(j), rows.ld, 1}, {columns + r, R}, n,
                               i.padded - r, d);
        });
    };
    scores(t.St, j.K, t.Qt);    // S^T <- K Q^T
    scores(t.dPt, j.V, t.dOt);  // dP^T <- V dO^T
    if (a.rules)
        a.rules->change(a, head, {t.St, 1, R, i.first, i.count, j.first, keys, SIMD_LOG2E},
                        a.rules->softcap != 0 ? t.slope : nullptr, t.of_mod);
    portable::softmax_gradient({t.St, R}, {t.dPt, R}, keys, i.padded, first, t.lse, t.rest, t.D);
    if (a.rules) add_rules(a, head, t, i, j, keys);
    add_rows(j.dV, t.St, R, i.dO, i, d, keys, first);
    add_rows(j.dK, t.dPt, R, i.Q, i, d, keys, first);
    // dQ^T <- dQ^T + K^T dS^T
    portable::multiply_add({t.dQt, R}, {j.K.data, 1, j.K.ld}, {t.dPt, R}, d, i.padded, keys, first);
}

// The n-th panel of a head in the order in which panels add to dK and dV. done: the number of its finished
// keys; the panel before it has done[-1].
void attend_panel(const AttentionGradient& a, int64_t head, int64_t n, int64_t panels,
                  std::atomic<int64_t>* done, float* scratch) {
    const int64_t b = head / a.H, h = head % a.H, d = a.d, R = portable::panel();
    const int64_t i0 = (panels - 1 - n) * R, row = head * a.Nq + i0;  // causal: the longest first
    Scratch own(scratch);
    const Panel t(d, own);
    Queries i{};
    i.first = i0;
    i.count = std::min(R, a.Nq - i0);
    i.padded = round_up(i.count, portable::lanes());
    i.Q = {a.q.at(b, h) + i0 * a.q.row_stride, a.q.row_stride};
    i.dO = {a.dout.at(b, h) + i0 * a.dout.row_stride, a.dout.row_stride};
    load(t, i, a.out + row * d, a.lse + row, a.dlse ? a.dlse + row : nullptr, a.scale, factor(a));

    float *const dK = a.dk + head * a.Nk * d, *const dV = a.dv + head * a.Nk * d;
    const auto step = [&](int64_t j, int64_t keys, int64_t first, bool seen = true) {
        if (n == 0) {
            std::fill_n(dK + j * d, keys * d, 0.0f);
            std::fill_n(dV + j * d, keys * d, 0.0f);
        } else {
            while (done[-1].load(std::memory_order_acquire) < j + keys) yield();
        }
        const Keys rows{j,
                        {a.k.at(b, h) + j * a.k.row_stride, a.k.row_stride},
                        {a.v.at(b, h) + j * a.v.row_stride, a.v.row_stride},
                        {dK + j * d, d},
                        {dV + j * d, d}};
        if (seen) attend(a, head, t, i, rows, keys, first);
        done->store(j + keys, std::memory_order_release);
    };
    const Range seen = a.keys(head, i0, i.count);
    const bool staircase = a.causal && !a.rules;
    // The last step's first key, which all queries of the panel see.
    const int64_t last = staircase ? (a.seen(i0) - 1) / STEP * STEP : a.Nk;
    for (int64_t j = 0; j < last; j += STEP) {
        const int64_t keys = std::min(STEP, last - j);
        step(j, keys, keys, j < seen.end && j + keys > seen.first);
    }
    if (staircase) step(last, a.seen(i0 + i.count - 1) - last, a.seen(i0) - last);
    portable::transpose({a.dq + row * d, d}, {t.dQt, R}, d, i.count, 1.0f);
}

}  // namespace

int64_t flash_backward_scratch(const AttentionGradient& a) { return a.threads * Panel::floats(a.d); }

void flash_backward(const AttentionGradient& a, float* scratch) {
    const int64_t heads = a.B * a.H, panels = (a.Nq + portable::panel() - 1) / portable::panel();
    std::vector<std::atomic<int64_t>> done(heads * panels);
    for_each_item(heads, panels, a.threads, a.pool, [&](int64_t head, int64_t n, int thread) {
        attend_panel(a, head, n, panels, &done[head * panels + n], scratch + thread * Panel::floats(a.d));
    });
}
