// The limits of this processor: throughput and latency of fused multiply-adds in registers, and the bandwidth
// of sequential reads.
#include "tools/limits.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "cpu/tiles_of_amx.h"

#if defined(__AVX512F__)
constexpr int W = 16, CHAINS = 8;  // times 3: independent sums, more than the units' latency needs
#elif defined(__AVX__)
constexpr int W = 8, CHAINS = 4;
#else
constexpr int W = 4, CHAINS = 4;
#endif

typedef float Vec __attribute__((vector_size(W * sizeof(float))));

double multiply_adds(int64_t steps) {
    // volatile: the compiler must not see that 1 * 0.999 + 0.001 is 1, or it drops that chain.
    volatile float given[2] = {0.999f, 0.001f};
    Vec acc[CHAINS][3], factor = Vec{} + given[0], term = Vec{} + given[1];
    for (int i = 0; i < CHAINS; i++)  // all different, so that none is dropped
        for (int v = 0; v < 3; v++) acc[i][v] = Vec{} + static_cast<float>(3 * i + v);
    for (int64_t step = 0; step < steps; step++)
        for (int i = 0; i < CHAINS; i++)
            for (int v = 0; v < 3; v++) acc[i][v] = acc[i][v] * factor + term;
    Vec total{};
    for (int i = 0; i < CHAINS; i++) total += acc[i][0] + acc[i][1] + acc[i][2];
    volatile float kept = total[0];  // the results are used, so the work is done
    (void)kept;
    return 2.0 * W * CHAINS * 3 * static_cast<double>(steps);
}

// Floating-point operations per second of one thread, the best of several runs within `seconds`.
double fma_peak(double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    double best = 0;
    while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
        const auto start = Clock::now();
        const double work = multiply_adds(20000);
        best = std::max(best, work / std::chrono::duration<double>(Clock::now() - start).count());
    }
    return best;
}

// Floating-point operations per second of one thread, the best of several runs within `seconds`.
double amx_peak([[maybe_unused]] double seconds) {
    double best = 0;
#if defined(TILES_OF_AMX)
    using Clock = std::chrono::steady_clock;
    constexpr int64_t STEPS = 2000, FLOP = 2 * 16 * 16 * 32;
    if (!amx::available()) return 0;
    amx::configure();
    amx::zero<4>(), amx::zero<5>(), amx::zero<6>(), amx::zero<7>();
    const auto begin = Clock::now();
    while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
        const auto start = Clock::now();
        for (int64_t step = 0; step < STEPS; step++) {
            amx::multiply_add<0, 4, 6>(), amx::multiply_add<1, 4, 7>();
            amx::multiply_add<2, 5, 6>(), amx::multiply_add<3, 5, 7>();
        }
        const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
        best = std::max(best, 4.0 * FLOP * STEPS / elapsed);
    }
    amx::release();
#endif
    return best;
}

// Seconds of a multiply-add that depends on the one before it, the best of several runs within `seconds`.
double fma_latency(double seconds) {
    using Clock = std::chrono::steady_clock;
    constexpr int64_t STEPS = 100000;
    volatile float given = 0.999f;
    const float factor = given;
    float sum = 1;
    const auto begin = Clock::now();
    double best = std::numeric_limits<double>::infinity();
    while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
        const auto start = Clock::now();
        for (int64_t step = 0; step < STEPS; step++) sum = sum * factor + 0.001f;
        best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count() / STEPS);
        given = sum;  // the result is used, so the work is done
    }
    return best;
}

// Bytes per second that one thread reads from a buffer of `bytes`, the best of several passes within `seconds`:
// the bandwidth of the cache level, or memory, that holds it.
double read_bandwidth(int64_t bytes, double seconds) {
    using Clock = std::chrono::steady_clock;
    const int64_t blocks = std::max<int64_t>(1, bytes / static_cast<int64_t>(sizeof(Vec)) / CHAINS);
    std::vector<Vec> buffer(blocks * CHAINS, Vec{} + 1.0f);
    Vec total[CHAINS] = {};
    const auto begin = Clock::now();
    double best = 0;
    do {  // at least once, even if the thread loses its core for longer
        const auto start = Clock::now();
        for (int64_t b = 0; b < blocks; b++)
            for (int i = 0; i < CHAINS; i++) total[i] += buffer[b * CHAINS + i];
        const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
        best = std::max(best, blocks * CHAINS * sizeof(Vec) / elapsed);
    } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
    for (int i = 1; i < CHAINS; i++) total[0] += total[i];
    volatile float kept = total[0][0];
    (void)kept;
    return best;
}
