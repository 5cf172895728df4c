#include "ngrams.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "model/csrc/refuse.h"

namespace {

constexpr int64_t MOST_VOCABULARY = 256, HEAD = 3, MOST_BUCKETS = int64_t{1} << 24;
constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15;
constexpr double SHARPNESS = 1.15;  // the model is surer; with this exponent the guesses of shakes256 hit most

// The likely error of a boundary between two tokens, at `b` of the distribution, but for a factor.
double boundary_error(double b) {
    constexpr double LEAST = 0.01;
    return std::sqrt(std::max(b * (1 - b), 0.0)) + LEAST;
}

// The hash of a context with one more token in front.
uint64_t extended(uint64_t hash, int64_t token) {
    hash = (hash ^ static_cast<uint64_t>(token + 1)) * FACTOR;
    return hash ^ hash >> 29;
}

}  // namespace

Ngrams::Ngrams(NgramTables of_file, int64_t vocab_size) : tables(std::move(of_file)), vocab_size(vocab_size) {
    const auto& [first, starts, records] = tables;
    const int64_t V = static_cast<int64_t>(first.size()), buckets = static_cast<int64_t>(starts.size()) - 1;
    check("the draft's vocabulary", V, 1, MOST_VOCABULARY);
    if (V != vocab_size) refuse("the draft's vocabulary", V, "the model's, " + std::to_string(vocab_size));
    check("the draft's number of buckets", buckets, 2, MOST_BUCKETS);
    while (int64_t{1} << bits < buckets) bits++;
    if (int64_t{1} << bits != buckets) refuse("the draft's number of buckets is no power of 2");
    if (std::all_of(first.begin(), first.end(), [](uint8_t code) { return code == 0; }))
        refuse("the draft holds no probabilities");
    if (starts[0] != 0 || starts[buckets] != records.size())
        refuse("the draft's buckets do not fit its records");
    for (int64_t b = 0; b < buckets; b++) {
        if (starts[b] > starts[b + 1] || starts[b + 1] > records.size())
            refuse("the draft's buckets are out of order");
        for (int64_t at = starts[b], end = starts[b + 1]; at < end;) {
            const int64_t next = at + HEAD <= end ? at + HEAD + 2 * (records[at + 1] >> 2) : end + 1;
            if (next > end) refuse("a record of the draft leaves its bucket");
            for (at += HEAD; at < next; at += 2)
                if (records[at] >= vocab_size) refuse("a token of the draft is outside its vocabulary");
        }
    }
}

const Ngrams::Powers& Ngrams::powers(double exponent) const {
    for (const Powers& known : cached)
        if (known.exponent == exponent) return known;
    Powers powers{exponent, std::vector<float>(CODES), std::vector<float>(CODES)};
    for (int code = 0; code < CODES; code++) {
        powers.share[code] = static_cast<float>(std::pow(code / 255.0, 2 * exponent));
        powers.factor[code] = static_cast<float>(std::pow(code / 128.0, 2 * exponent));
    }
    if (cached.size() < MOST_POWERS) return cached.emplace_back(std::move(powers));
    return cached[oldest++ % MOST_POWERS] = std::move(powers);
}

// weight (V) <- the probabilities after `tail` to the power of `exponent`, not normalized.
void Ngrams::weigh_all(const Tail& tail, double exponent, float* weight) const {
    std::array<uint64_t, Tail::MOST> hashes;  // all first: their buckets come from afar
    uint64_t hash = FACTOR;
    for (int64_t n = 0; n < tail.size(); n++) {
        hashes[n] = hash = extended(hash, tail[n]);
        __builtin_prefetch(&tables.starts[hash >> (64 - bits)]);
    }
    for (int64_t n = 0; n < tail.size(); n++) {
        const uint8_t* bucket = tables.records.data() + tables.starts[hashes[n] >> (64 - bits)];
        __builtin_prefetch(bucket);
        __builtin_prefetch(bucket + 64);
    }
    const Powers& of = powers(exponent);
    for (int64_t i = 0; i < vocab_size; i++) weight[i] = of.share[tables.first[i]];
    for (int64_t n = 0; n < tail.size(); n++) {
        const uint64_t bucket = hashes[n] >> (64 - bits);
        const auto tag = static_cast<int>(hashes[n] >> 20 & 1023);
        const uint8_t* at = tables.records.data() + tables.starts[bucket];
        const uint8_t* end = tables.records.data() + tables.starts[bucket + 1];
        while (at < end && (at[0] | (at[1] & 3) << 8) != tag) at += HEAD + 2 * (at[1] >> 2);
        if (at >= end) continue;
        const float factor = of.factor[at[2]];
        for (int64_t i = 0; i < vocab_size; i++) weight[i] *= factor;
        const uint8_t* pair = at + HEAD;
        for (int i = at[1] >> 2; i > 0; i--, pair += 2) weight[pair[0]] = of.share[pair[1]];
    }
}

Guess Ngrams::guess(const Tail& tail, double uniform, const Occurrences& text, const Sampling& s) const {
    float weight[MOST_VOCABULARY];
    const bool all_tokens = s.top_k == 0 || s.top_k >= static_cast<double>(vocab_size);
    const bool plain = all_tokens && s.top_p == 1 && s.min_p == 0 && s.typical_p == 1 && s.logit_bias.empty() &&
                       s.repetition_penalty == 1 && s.presence_penalty == 0 && s.frequency_penalty == 0;
    if (plain && s.temperature == 0) {
        weigh_all(tail, 1, weight);
        const float* best = std::max_element(weight, weight + vocab_size);
        float second = 0, total = 0;
        for (int64_t i = 0; i < vocab_size; i++) {
            total += weight[i];
            if (weight + i != best) second = std::max(second, weight[i]);
        }
        const double share = *best / total;
        return {best - weight, total > 0 ? (*best - second) / total / 2 / boundary_error(share) : 0};
    }
    if (!plain) {
        weigh_all(tail, 1, weight);
        for (int64_t i = 0; i < vocab_size; i++)
            weight[i] = static_cast<float>(SHARPNESS * std::log(std::max(weight[i], 1e-30f)));
        std::vector<double> weights;
        weigh(weight, text, s, weights);
        for (int64_t i = 0; i < vocab_size; i++) weight[i] = static_cast<float>(weights[i]);
    } else {
        weigh_all(tail, SHARPNESS / s.temperature, weight);
    }
    float ends[MOST_VOCABULARY];  // of the tokens' parts of the distribution
    std::partial_sum(weight, weight + vocab_size, ends);
    const float total = ends[vocab_size - 1], point = static_cast<float>(uniform) * total;
    if (!(total > 0)) return {};
    int64_t token = 0;
    for (int64_t i = 0; i + 1 < vocab_size; i++) token += ends[i] <= point;
    const float below = token > 0 ? ends[token - 1] : 0;
    const double at = point / total, low = below / total, high = ends[token] / total;
    return {token, std::min((at - low) / boundary_error(low), (high - at) / boundary_error(high))};
}
