#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>

#include "model/csrc/refuse.h"

#if defined(__wasm__)  // no threads, and nothing runs a thread_local's destructor
#define OF_THIS_THREAD static
#else
#define OF_THIS_THREAD thread_local
#endif

namespace {

// The first place where the sum of weights, in this order, reaches a share of all.
size_t reached(const std::vector<double>& ordered, double share) {
    double rest = share * std::accumulate(ordered.begin(), ordered.end(), 0.0);
    size_t i = 0;
    for (; i + 1 < ordered.size() && (rest -= ordered[i]) > 0;) i++;
    return i;
}

// Sets the weights to 0 whose logarithm is far from the mean: a token's surprise is then far from the entropy.
// Weights below `least` are not kept before.
void keep_typical(std::vector<double>& weight, double least, double typical_p) {
    const auto kept = [&](double w) { return w > 0 && w >= least; };
    double total = 0, mean = 0;
    for (const double w : weight)
        if (kept(w)) {
            total += w;
            mean += w * std::log(w);
        }
    mean /= total;
    const auto distance = [&](double w) { return std::abs(std::log(w) - mean); };
    std::vector<std::pair<double, double>> order;  // (distance, weight)
    for (const double w : weight)
        if (kept(w)) order.emplace_back(distance(w), w);
    std::sort(order.begin(), order.end());
    std::vector<double> ordered;
    for (const auto& [_, w] : order) ordered.push_back(w);
    const double farthest = order[reached(ordered, typical_p)].first;
    for (double& w : weight)
        if (!kept(w) || distance(w) > farthest) w = 0;
}

}  // namespace

const std::vector<double>& weigh(const float* logits, const Occurrences& occurrences, const Sampling& s) {
    const size_t n = occurrences.seen.size();
    OF_THIS_THREAD std::vector<double> weight, sorted;
    weight.assign(logits, logits + n);
    const bool numbers = std::none_of(logits, logits + n, [](float x) { return std::isnan(x); });
    if (s.repetition_penalty != 1)
        for (size_t i = 0; i < n; i++)
            if (occurrences.seen[i])
                weight[i] = weight[i] > 0 ? weight[i] / s.repetition_penalty : weight[i] * s.repetition_penalty;
    if (s.presence_penalty != 0 || s.frequency_penalty != 0)
        for (size_t i = 0; i < n; i++)
            if (const int32_t count = occurrences.written[i])
                weight[i] -= count * s.frequency_penalty + s.presence_penalty;
    for (const auto& [token, bias] : s.logit_bias) weight[token] += bias;
    const auto best = std::max_element(weight.begin(), weight.end());
    if (!numbers || std::isinf(*best))
        refuse("logits hold NaN, or the largest is infinite; they must be numbers");
    if (s.temperature == 0) {
        const auto first = best - weight.begin();
        weight.assign(n, 0);
        weight[first] = 1;
        return weight;
    }

    // weight <- exp((logit - max) / temperature), so the largest weight is 1
    const double highest = *best;
    for (double& w : weight) w = std::exp((w - highest) / s.temperature);

    double least = 0;  // smaller weights are dropped
    if (s.top_k > 0 && s.top_k < static_cast<double>(n)) {
        const auto last = static_cast<int64_t>(s.top_k) - 1;
        sorted = weight;
        std::nth_element(sorted.begin(), sorted.begin() + last, sorted.end(), std::greater<>());
        least = sorted[last];
    }
    if (s.typical_p < 1) keep_typical(weight, least, s.typical_p);
    if (s.top_p < 1) {
        sorted.clear();
        std::copy_if(weight.begin(), weight.end(), std::back_inserter(sorted),
                     [&](double w) { return w >= least; });
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        least = sorted[reached(sorted, s.top_p)];
    }
    least = std::max(least, s.min_p * *std::max_element(weight.begin(), weight.end()));

    for (double& w : weight) w = w >= least ? w : 0;
    return weight;
}

int64_t draw(const std::vector<double>& weight, double uniform) {
    double point = uniform * std::accumulate(weight.begin(), weight.end(), 0.0);
    int64_t chosen = 0;
    for (size_t i = 0; i < weight.size(); i++) {
        if (weight[i] > 0) chosen = static_cast<int64_t>(i);  // the last one if rounding leaves a remainder
        if ((point -= weight[i]) < 0) break;
    }
    return chosen;
}

TokenLogprob token_logprob(const float* logits, int64_t vocab_size, int64_t token, int64_t top) {
    const double highest = *std::max_element(logits, logits + vocab_size);
    double sum = 0;
    for (int64_t i = 0; i < vocab_size; i++) sum += std::exp(logits[i] - highest);
    const double log_sum = highest + std::log(sum);
    TokenLogprob result{token, logits[token] - log_sum, {}};
    for (int64_t i = 0; i < vocab_size && top > 0; i++) {
        const double logprob = logits[i] - log_sum;
        if (static_cast<int64_t>(result.top.size()) == top) {
            if (!(logprob > result.top.back().second)) continue;
            result.top.pop_back();
        }
        auto at = result.top.end();
        while (at != result.top.begin() && logprob > std::prev(at)->second) --at;
        result.top.insert(at, {i, logprob});
    }
    return result;
}
