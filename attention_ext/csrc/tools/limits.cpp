// The limits of this processor: fused multiply-adds in registers, and sequential reads.
#include "tools/limits.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "cpu/tiles_of_amx.h"
#include "simd/vectors/vectors.h"

using portable::Vec, portable::W;

constexpr int CHAINS = W == 16 ? 8 : 4;  // times 3: independent sums, more than the units' latency needs

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

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Seconds of the fastest run(), repeated for `seconds`; at least once, even if the thread loses its core.
template <class Run> static double fastest(double seconds, const Run& run) {
    const auto begin = Clock::now();
    double best = std::numeric_limits<double>::infinity();
    do {
        const auto start = Clock::now();
        run();
        best = std::min(best, since(start));
    } while (since(begin) < seconds);
    return best;
}

double fma_peak(double seconds) {
    double work = 0;
    const double best = fastest(seconds, [&] { work = multiply_adds(20000); });
    return work / best;
}

double amx_peak([[maybe_unused]] double seconds) {
#if defined(TILES_OF_AMX)
    constexpr int64_t STEPS = 2000, FLOP = 2 * 16 * 16 * 32;
    if (!amx::available()) return 0;
    amx::configure();
    amx::zero<4>(), amx::zero<5>(), amx::zero<6>(), amx::zero<7>();
    const double best = fastest(seconds, [] {
        for (int64_t step = 0; step < STEPS; step++) {
            amx::multiply_add<0, 4, 6>(), amx::multiply_add<1, 4, 7>();
            amx::multiply_add<2, 5, 6>(), amx::multiply_add<3, 5, 7>();
        }
    });
    amx::release();
    return 4.0 * FLOP * STEPS / best;
#else
    return 0;
#endif
}

double fma_latency(double seconds) {
    constexpr int64_t STEPS = 100000;
    volatile float given = 0.999f;
    const float factor = given;
    float sum = 1;
    const double best = fastest(seconds, [&] {
        for (int64_t step = 0; step < STEPS; step++) sum = sum * factor + 0.001f;
        given = sum;  // the result is used, so the work is done
    });
    return best / STEPS;
}

double nops() {
    const auto start = Clock::now();
    for (int i = 0; i < 3000; i++) asm volatile(".rept 60\n nop\n .endr");
    return since(start);
}

double read_floats(const float* data, int64_t floats, int64_t passes) {
    Vec total[CHAINS] = {};
    const int64_t blocks = floats / (W * CHAINS);
    for (int64_t pass = 0; pass < passes; pass++) {
        asm volatile("" : : "r"(data) : "memory");  // each pass reads again
        for (int64_t b = 0; b < blocks; b++)
            for (int i = 0; i < CHAINS; i++) total[i] += portable::load(data + (b * CHAINS + i) * W);
    }
    for (int i = 1; i < CHAINS; i++) total[0] += total[i];
    volatile float kept = total[0][0];
    (void)kept;
    return static_cast<double>(sizeof(float)) * W * CHAINS * static_cast<double>(blocks * passes);
}

double read_bandwidth(int64_t bytes, double seconds) {
    const std::vector<Vec> buffer(std::max<int64_t>(1, bytes / static_cast<int64_t>(sizeof(Vec)) / CHAINS) *
                                  CHAINS);
    const float* const data = reinterpret_cast<const float*>(buffer.data());
    double read = 0;
    const double best = fastest(seconds, [&] { read = read_floats(data, buffer.size() * W, 1); });
    return read / best;
}
