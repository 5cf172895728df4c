// The decoder's C interface, one library for every Python. generation/engines/native.py reads the signatures
// here: one declaration after the other, pointers for all arrays. A function that returns bool may fail;
// decoder_error() then says why. Arrays are the caller's, as long as commented. Decoders take one thread at a
// time.
#pragma once

#include <cstdint>

#include "sampling.h"
#include "team.h"

struct DecoderSizes;
struct Handle;
struct ModelShape;

#pragma GCC visibility push(default)
extern "C" {

// Why a call failed. kind: 1 a wrong argument, 2 no memory, 3 anything else.
const char* decoder_error(int* kind);

const char* decoder_simd_name();

// The tensors have names, data, numbers of floats and layouts; they are copied. A layout is the sum of 1 if it
// is transposed, and 2 if its file is mapped, whose pages are released. Null if it fails.
Handle* decoder_open(const ModelShape* shape, const DecoderSizes* sizes, const char* precision,
                     const char* kv_cache, const char* part, int64_t tensors, const char* const* names,
                     const float* const* data, const int64_t* floats, const int64_t* layouts);
void decoder_close(Handle* decoder);

// logprobs, and top of decoder_begin(): NO_LOGPROB, or how many alternatives each has.
bool decoder_set_sampling(Handle* decoder, int64_t slot, const SamplingNumbers* numbers, int64_t biases,
                          const int64_t* tokens, const double* values, int64_t logprobs);

bool decoder_begin(Handle* decoder, int64_t slot, int64_t count, const int64_t* ids, bool continues,
                   int64_t top);
bool decoder_read_for(Handle* decoder, int64_t slot, double seconds, bool* done);
bool decoder_drop(Handle* decoder, int64_t slot);

// uniforms, tokens: (rows, count). seconds: null takes the default. written: the rows of tokens.
bool decoder_write_rows(Handle* decoder, int64_t count, const int64_t* slots, int64_t rows,
                        const double* uniforms, const double* seconds, int64_t* tokens, int64_t* written);

// tags (CONTEXTS), pairs (CONTEXTS, LISTED, 2): Draft of model/draft.py, for vocab_size tokens; null: no draft.
bool decoder_set_draft(Handle* decoder, const uint32_t* tags, const uint8_t* pairs);

bool decoder_copy(Handle* decoder, int64_t from, int64_t to);
bool decoder_logits(Handle* decoder, int64_t slot, float* to);  // to: (vocab_size)

// Takes the log-probabilities of a slot, `count` ones with at most `top` alternatives; decoder_fetch_logprobs()
// then copies them. tokens: each token, and `top` alternatives, -1 for those that it lacks. logprobs: likewise.
bool decoder_take_logprobs(Handle* decoder, int64_t slot, int64_t* count, int64_t* top);
void decoder_fetch_logprobs(const Handle* decoder, int64_t top, int64_t* tokens, double* logprobs);

bool decoder_record(Handle* decoder, bool on);
bool decoder_take_spans(Handle* decoder, int64_t* count, const Span** spans);  // they stay until the next call

}  // extern "C"
#pragma GCC visibility pop
