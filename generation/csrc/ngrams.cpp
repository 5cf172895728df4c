#include "ngrams.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace {

// The likely error of a boundary between two tokens, at `b` of the distribution, but for a factor.
double boundary_error(double b) {
    constexpr double LEAST = 0.01;
    return std::sqrt(std::max(b * (1 - b), 0.0)) + LEAST;
}

}  // namespace

// The pairs of the longest context that ends a text, or null.
const Ngrams::Pair* Ngrams::find(const Tail& tail) const {
    for (int length = tail.size(); length > 0; length--) {
        const uint64_t hash = context_hash(tail.recent(), length);
        const size_t first = (hash >> BUCKET_SHIFT) * WAYS;
        for (size_t i = first; i < first + WAYS; i++)
            if (tags[i] == static_cast<uint32_t>(hash >> TAG_SHIFT)) return &pairs[i * LISTED];
    }
    return nullptr;
}

Guess Ngrams::guess(const Tail& tail, double uniform, const Occurrences& occurrences, const Sampling& s) const {
    const Pair* listed = find(tail);
    if (!listed) return {};
    const bool all_tokens = s.top_k == 0 || s.top_k >= static_cast<double>(vocab_size);
    const bool plain = all_tokens && s.top_p == 1 && s.min_p == 0 && s.typical_p == 1 && s.logit_bias.empty() &&
                       s.repetition_penalty == 1 && s.presence_penalty == 0 && s.frequency_penalty == 0;
    const bool greedy = plain && s.temperature == 0;
    const double exponent = greedy ? 1 : plain ? SHARPNESS / s.temperature : SHARPNESS;
    std::array<double, LISTED> weight;
    for (int i = 0; i < LISTED; i++) weight[i] = std::pow(listed[i].code / 255.0, 2 * exponent);
    if (!plain) {
        constexpr float UNLISTED = -80;
        std::vector<float> logits(vocab_size, UNLISTED);
        for (int i = 0; i < LISTED; i++)
            if (listed[i].code > 0) logits[listed[i].token] = static_cast<float>(std::log(weight[i]));
        const std::vector<double>& weights = weigh(logits.data(), occurrences, s);
        for (int i = 0; i < LISTED; i++) weight[i] = listed[i].code > 0 ? weights[listed[i].token] : 0;
    }
    std::array<double, LISTED> ends;  // of the tokens' parts of the distribution
    std::partial_sum(weight.begin(), weight.end(), ends.begin());
    const double total = ends.back(), point = uniform * total;
    if (!(total > 0)) return {};
    if (greedy) {
        const int64_t best = std::max_element(weight.begin(), weight.end()) - weight.begin();
        const double likeliest = std::exchange(weight[best], 0);
        const double second = *std::max_element(weight.begin(), weight.end());
        return {listed[best].token, (likeliest - second) / total / 2 / boundary_error(likeliest / total)};
    }
    const int64_t i = std::upper_bound(ends.begin(), ends.end() - 1, point) - ends.begin();
    const double at = uniform, low = (ends[i] - weight[i]) / total, high = ends[i] / total;
    return {listed[i].token, std::min((at - low) / boundary_error(low), (high - at) / boundary_error(high))};
}
