// The decoder's C interface, which generation/engines/native.py calls: no Python header, one library for every Python.
//
// A function that may fail returns whether it did not; error() then says why. Pointers are to arrays of the
// caller, of the lengths that the comments give. The caller calls a decoder from one thread at a time.
#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder.h"
#include "ngrams.h"
#include "simd/simd.h"
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// The decoder has its own threads, and its calls of a kernel have one.
void on_threads(int threads, const std::function<void(int)>& body) {
    for (int thread = 0; thread < threads; thread++) body(thread);
}

namespace {

struct Handle : Decoder {
    using Decoder::Decoder;
    std::vector<TokenLogprob> logprobs;  // those that were taken last
    std::vector<Span> taken;             // likewise
};

thread_local std::string failure;
thread_local int kind = 0;  // of the failure: 1 a wrong argument, 2 no memory, 3 anything else

template <class Body>
bool guarded(const Body& body) {
    try {
        body();
        return true;
    } catch (const std::invalid_argument& error) {
        failure = error.what(), kind = 1;
    } catch (const std::bad_alloc&) {
        failure = "not enough memory", kind = 2;
    } catch (const std::exception& error) {
        failure = error.what(), kind = 3;
    }
    return false;
}

// The row of this name in a table.
template <class Row, size_t N>
const Row& find(const std::string& what, const std::string& name, const Row (&table)[N]) {
    std::string names;
    for (const Row& row : table) {
        if (name == row.name) return row;
        names += (names.empty() ? "" : ", ") + std::string(row.name);
    }
    throw std::invalid_argument(what + " is '" + name + "'; it must be one of " + names);
}

// The least number stands for none.
std::optional<int64_t> given(int64_t number) {
    return number == std::numeric_limits<int64_t>::min() ? std::nullopt : std::optional(number);
}

}  // namespace

EXPORT const char* error(int* its_kind) {
    *its_kind = kind;
    return failure.c_str();
}

EXPORT const char* simd_name() { return simd::name(); }

// The names of SAMPLING_NUMBERS, each followed by a line end.
EXPORT const char* sampling_names() {
    static const std::string all = [] {
        std::string names;
        Sampling().each([&](const char* name, double) { names += std::string(name) + '\n'; });
        return names;
    }();
    return all.c_str();
}

// The most alternatives of a token's log-probability.
EXPORT int64_t most_top() { return MAX_TOP; }

// The generator of a seed in `state`, which has uniforms_bytes() bytes.
EXPORT int64_t uniforms_bytes() { return sizeof(Uniforms); }
EXPORT void uniforms_seed(void* state, uint64_t seed) { new (state) Uniforms(seed); }
EXPORT void uniforms_next(void* state, int64_t count, double* numbers) {
    for (int64_t i = 0; i < count; i++) numbers[i] = static_cast<Uniforms*>(state)->next();
}

// sizes: block_size, vocab_size, n_layer, n_head, n_embd, br, bc, slots, capacity, threads, cache_bytes. The
// tensors have names, data and numbers of floats; they are copied. nullptr if it fails.
EXPORT Handle* open_decoder(const int64_t* sizes, const char* precision, const char* kv_cache, const char* part,
                            int64_t tensors, const char* const* names, const float* const* data,
                            const int64_t* floats) {
    Handle* made = nullptr;
    guarded([&] {
        const Tensors lookup = [&](const std::string& name, int64_t wanted) -> const float* {
            for (int64_t i = 0; i < tensors; i++) {
                if (name != names[i]) continue;
                if (floats[i] == wanted) return data[i];
                throw std::invalid_argument("the size of " + name + " is " + std::to_string(floats[i]) +
                                            "; it must be " + std::to_string(wanted));
            }
            if (name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0) return nullptr;
            throw std::invalid_argument("tensors has no " + name);
        };
        made = new Handle(ModelShape{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, lookup,
                          find("precision", precision, PRECISIONS).precision,
                          find("kv_cache", kv_cache, CACHE_PRECISIONS).precision, find("part", part, PARTS),
                          sizes[5], sizes[6], sizes[7], sizes[8],
                          static_cast<int>(std::clamp<int64_t>(sizes[9], INT32_MIN, INT32_MAX)), sizes[10]);
    });
    return made;
}

EXPORT void close_decoder(Handle* decoder) { delete decoder; }

// numbers: all of SAMPLING_NUMBERS, in their order; NaN for one that changes nothing. logprobs: see given().
EXPORT bool set_sampling(Handle* decoder, int64_t slot, const double* numbers, int64_t biases,
                         const int64_t* tokens, const double* values, int64_t logprobs) {
    return guarded([&] {
        Sampling sampling;
        sampling.each([&](const char*, double& number) {
            if (!std::isnan(*numbers)) number = *numbers;
            numbers++;
        });
        for (int64_t i = 0; i < biases; i++) sampling.logit_bias.emplace_back(tokens[i], values[i]);
        decoder->set_sampling(slot, sampling, given(logprobs));
    });
}

// top: see given().
EXPORT bool begin(Handle* decoder, int64_t slot, int64_t count, const int64_t* ids, bool continues,
                  int64_t top) {
    return guarded([&] { decoder->begin(slot, {ids, ids + count}, continues, given(top)); });
}

EXPORT bool read_for(Handle* decoder, int64_t slot, double seconds, bool* done) {
    return guarded([&] { *done = decoder->read(slot, seconds); });
}

EXPORT bool drop(Handle* decoder, int64_t slot) {
    return guarded([&] { decoder->drop(slot); });
}

// uniforms, tokens: (rows, count). seconds: nullptr takes the default. written: the rows of tokens.
EXPORT bool write_rows(Handle* decoder, int64_t count, const int64_t* slots, int64_t rows,
                       const double* uniforms, const double* seconds, int64_t* tokens, int64_t* written) {
    return guarded([&] {
        std::vector<std::vector<double>> numbers;
        for (int64_t i = 0; i < rows; i++)
            numbers.emplace_back(uniforms + i * count, uniforms + (i + 1) * count);
        const auto limit = seconds ? std::optional(*seconds) : std::nullopt;
        const auto made = decoder->write({slots, slots + count}, numbers, limit);
        *written = static_cast<int64_t>(made.size());
        for (const std::vector<int64_t>& row : made) tokens = std::copy(row.begin(), row.end(), tokens);
    });
}

// first (vocab_size), starts (buckets + 1), records (bytes): NgramTables; a null `first` leaves no draft.
EXPORT bool set_draft(Handle* decoder, int64_t vocab_size, const uint8_t* first, int64_t buckets,
                      const uint32_t* starts, int64_t bytes, const uint8_t* records) {
    return guarded([&] {
        if (!first) return decoder->set_draft(nullptr);
        NgramTables tables{
            {first, first + vocab_size}, {starts, starts + buckets + 1}, {records, records + bytes}};
        decoder->set_draft(std::make_shared<Ngrams>(std::move(tables), decoder->vocab_size()));
    });
}

// to: the numbers of DraftCounts since the last call, in their order.
EXPORT bool draft_counts(Handle* decoder, double* to) {
    return guarded([&] {
        const DraftCounts c = decoder->draft_counts();
        for (const int64_t each : {c.steps, c.tokens, c.guesses, c.hits, c.drafted, c.accepted})
            *to++ = static_cast<double>(each);
        for (const double each : {c.guessing, c.verifying, c.wasted}) *to++ = each;
    });
}

EXPORT bool copy(Handle* decoder, int64_t from, int64_t to) {
    return guarded([&] { decoder->copy(from, to); });
}

// to: (vocab_size).
EXPORT bool logits(Handle* decoder, int64_t slot, float* to) {
    return guarded([&] {
        const std::vector<float> all = decoder->logits(slot);
        std::copy(all.begin(), all.end(), to);
    });
}

// Takes the log-probabilities of a slot; fetch_logprobs() then copies these `count` ones.
EXPORT bool take_logprobs(Handle* decoder, int64_t slot, int64_t* count) {
    return guarded([&] {
        decoder->logprobs = decoder->take_logprobs(slot);
        *count = static_cast<int64_t>(decoder->logprobs.size());
    });
}

// tokens: each token, its MAX_TOP alternatives and -1 for those that it lacks. logprobs: likewise.
EXPORT void fetch_logprobs(const Handle* decoder, int64_t* tokens, double* logprobs) {
    for (const TokenLogprob& each : decoder->logprobs) {
        *tokens++ = each.token, *logprobs++ = each.logprob;
        for (size_t i = 0; i < MAX_TOP; i++) {
            const bool has = i < each.top.size();
            *tokens++ = has ? each.top[i].first : -1, *logprobs++ = has ? each.top[i].second : 0;
        }
    }
}

EXPORT bool record(Handle* decoder, bool on) {
    return guarded([&] { decoder->record(on); });
}

// Takes the spans since the last call; they stay until the next one.
EXPORT bool take_spans(Handle* decoder, int64_t* count, const Span** spans) {
    return guarded([&] {
        decoder->taken = decoder->spans();
        *count = static_cast<int64_t>(decoder->taken.size());
        *spans = decoder->taken.data();
    });
}
