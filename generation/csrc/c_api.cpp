// The functions of api.h, over the class Decoder.
#include "api.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder.h"
#include "ngrams.h"
#include "simd/simd.h"

struct Handle : Decoder {
    using Decoder::Decoder;
    std::vector<TokenLogprob> logprobs;  // those that were taken last
    std::vector<Span> spans_taken;       // likewise
};

namespace {

thread_local std::string failure;
thread_local int failure_kind = 0;

// Keeps for decoder_error() why a call failed. A handler of all exceptions calls it.
bool failed() {
    try {
        throw;
    } catch (const std::invalid_argument& error) {
        failure = error.what();
        failure_kind = 1;
    } catch (const std::bad_alloc&) {
        failure = "not enough memory";
        failure_kind = 2;
    } catch (const std::exception& error) {
        failure = error.what();
        failure_kind = 3;
    }
    return false;
}

#define GUARDED(...)     \
    try {                \
        __VA_ARGS__;     \
        return true;     \
    } catch (...) {      \
        return failed(); \
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

}  // namespace

const char* decoder_error(int* kind) {
    *kind = failure_kind;
    return failure.c_str();
}

const char* decoder_simd_name() { return simd::name(); }
Handle* decoder_open(const ModelShape* shape, const DecoderSizes* sizes, const char* precision,
                     const char* kv_cache, const char* part, int64_t tensors, const char* const* names,
                     const float* const* data, const int64_t* floats, const int64_t* layouts) try {
    const Tensors lookup = [&](const std::string& name, int64_t wanted) -> Tensor {
        for (int64_t i = 0; i < tensors; i++) {
            if (name != names[i]) continue;
            if (floats[i] == wanted) return {data[i], (layouts[i] & 1) != 0, (layouts[i] & 2) != 0};
            throw std::invalid_argument("the size of " + name + " is " + std::to_string(floats[i]) +
                                        "; it must be " + std::to_string(wanted));
        }
        const bool bias = name.size() > 5 && name.compare(name.size() - 5, 5, ".bias") == 0;
        if (bias || name == "lm_head.weight") return nullptr;
        throw std::invalid_argument("tensors has no " + name);
    };
    return new Handle(*shape, lookup, find("precision", precision, PRECISIONS).precision,
                      find("kv_cache", kv_cache, CACHE_PRECISIONS).precision, find("part", part, PARTS),
                      *sizes);
} catch (...) {
    failed();
    return nullptr;
}

void decoder_close(Handle* decoder) { delete decoder; }

bool decoder_set_sampling(Handle* decoder, int64_t slot, const SamplingNumbers* numbers, int64_t biases,
                          const int64_t* tokens, const double* values, int64_t logprobs) try {
    Sampling sampling{*numbers};
    for (int64_t i = 0; i < biases; i++) sampling.logit_bias.emplace_back(tokens[i], values[i]);
    decoder->set_sampling(slot, sampling, logprobs);
    return true;
} catch (...) {
    return failed();
}

bool decoder_begin(Handle* decoder, int64_t slot, int64_t count, const int64_t* ids, bool continues,
                   int64_t top) {
    GUARDED(decoder->begin(slot, {ids, ids + count}, continues, top))
}

bool decoder_read_for(Handle* decoder, int64_t slot, double seconds, bool* done) {
    GUARDED(*done = decoder->read(slot, seconds))
}

bool decoder_drop(Handle* decoder, int64_t slot) { GUARDED(decoder->drop(slot)) }

bool decoder_write_rows(Handle* decoder, int64_t count, const int64_t* slots, int64_t rows,
                        const double* uniforms, const double* seconds, int64_t* tokens, int64_t* written) try {
    std::vector<std::vector<double>> numbers;
    for (int64_t i = 0; i < rows; i++) numbers.emplace_back(uniforms + i * count, uniforms + (i + 1) * count);
    const auto limit = seconds ? std::optional(*seconds) : std::nullopt;
    const auto chosen = decoder->write({slots, slots + count}, numbers, limit);
    *written = chosen.size();
    for (const std::vector<int64_t>& row : chosen) tokens = std::copy(row.begin(), row.end(), tokens);
    return true;
} catch (...) {
    return failed();
}

bool decoder_set_draft(Handle* decoder, const uint32_t* tags, const uint8_t* pairs) try {
    if (!tags) {
        decoder->set_draft(nullptr);
        return true;
    }
    const auto* first = reinterpret_cast<const Ngrams::Pair*>(pairs);
    std::vector copied(first, first + CONTEXTS * LISTED);
    decoder->set_draft(
        std::make_shared<Ngrams>(std::vector(tags, tags + CONTEXTS), std::move(copied), decoder->vocab_size()));
    return true;
} catch (...) {
    return failed();
}

bool decoder_copy(Handle* decoder, int64_t from, int64_t to) { GUARDED(decoder->copy(from, to)) }

bool decoder_logits(Handle* decoder, int64_t slot, float* to) try {
    const std::vector<float> all = decoder->logits(slot);
    std::copy(all.begin(), all.end(), to);
    return true;
} catch (...) {
    return failed();
}

bool decoder_take_logprobs(Handle* decoder, int64_t slot, int64_t* count, int64_t* top) try {
    decoder->logprobs = decoder->take_logprobs(slot);
    *count = decoder->logprobs.size();
    *top = 0;
    for (const TokenLogprob& row : decoder->logprobs) *top = std::max<int64_t>(*top, row.top.size());
    return true;
} catch (...) {
    return failed();
}

void decoder_fetch_logprobs(const Handle* decoder, int64_t top, int64_t* tokens, double* logprobs) {
    for (const TokenLogprob& row : decoder->logprobs) {
        *tokens++ = row.token;
        *logprobs++ = row.logprob;
        for (int64_t i = 0; i < top; i++) {
            const auto [token, logprob] =
                i < static_cast<int64_t>(row.top.size()) ? row.top[i] : std::pair(int64_t{-1}, 0.0);
            *tokens++ = token;
            *logprobs++ = logprob;
        }
    }
}

bool decoder_record(Handle* decoder, bool on) { GUARDED(decoder->record(on)) }

bool decoder_take_spans(Handle* decoder, int64_t* count, const Span** spans) try {
    decoder->spans_taken = decoder->spans();
    *count = decoder->spans_taken.size();
    *spans = decoder->spans_taken.data();
    return true;
} catch (...) {
    return failed();
}
