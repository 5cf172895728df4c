// The native decoder: nanoGPT's model with its own packed weights and caches, over the SIMD helpers and a
// chosen part. No torch and no Python here.
//
// Threads are a team of the decoder's own, not PyTorch's pool; team.h says why. A text is the same alone, in a
// batch, and over any number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache_precision.h"
#include "decoder/sampling.h"
#include "decoder/trace.h"
#include "matmul/precision.h"
#include "parts.h"

struct ModelShape {
    int64_t block_size, vocab_size, n_layer, n_head, n_embd;
};

// A checkpoint's tensor by nanoGPT's name; null for a bias that the model does not have. `floats` is the size
// that the tensor must have.
using Tensors = std::function<const float*(const std::string& name, int64_t floats)>;

class Decoder {
  public:
    // precision: of the matrices. kv: of the cache. br, bc: a tiled part's tile. slots: the number of texts
    // that it can hold, of up to `capacity` tokens each. cache_bytes: of the processor's last cache.
    Decoder(const ModelShape&, const Tensors&, Precision precision, CachePrecision kv, const Part& part,
            int64_t br, int64_t bc, int64_t slots, int64_t capacity, int threads, int64_t cache_bytes);
    ~Decoder();

    // Replaces a slot's text by these tokens, 1 to capacity of them, and computes the logits after the last.
    // `continues`: the text goes on, and the penalties still count its earlier tokens. top: of the
    // log-probabilities of ids[1:], which take_logprobs() gives; -1 computes none, and leaves out what only
    // they need.
    void prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top = -1);

    // The same in slices of time, with the same result to the bit. Until the end the slot holds no text.
    // prefill_some() stops between pieces, those of several threads between stages, when `seconds` are over,
    // and returns whether all is read. prefill_drop() gives up and frees the memory.
    void prefill_begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top = -1);
    bool prefill_some(int64_t slot, double seconds);
    void prefill_drop(int64_t slot);
    bool reading(int64_t slot) const;  // whether a prompt is begun and not read

    // A token for each slot from each row of uniforms, in turn; returns the rows of tokens. The slots are
    // different, prefilled and not full; uniforms[i] has a number in [0, 1) for each. Stops early, but not
    // before the first row, when a slot is full or `patience` seconds are over. With several rows, groups of
    // slots go through all of them in turn, so that a group's caches stay near the processor. The patience is
    // then that of each group, of which a thread may take several; how many rows fit is estimated from the rows
    // before.
    std::vector<std::vector<int64_t>> write(const std::vector<int64_t>& slots,
                                            const std::vector<std::vector<double>>& uniforms, double patience);

    // Copies a slot's text to another slot: cache, logits, counts of tokens and pending token, but neither the
    // sampling nor log-probabilities.
    void copy(int64_t from, int64_t to);

    // Appends this token to a slot that is not full and computes the logits after it.
    void push(int64_t slot, int64_t token);

    const std::vector<float>& logits(int64_t slot) const;  // after the last token read, (vocab_size)
    void set_sampling(int64_t slot, const Sampling&);

    // Whether the log-probabilities of tokens chosen from now on are kept: `top` alternatives for each, none if
    // -1. Forgets those that were not taken.
    void set_logprobs(int64_t slot, int64_t top);
    std::vector<TokenLogprob> take_logprobs(int64_t slot);  // in the order of the tokens, since the last call

    void record(bool on);       // whether threads record their spans; off at first
    std::vector<Span> spans();  // the spans since the last call, thread by thread, each in order

    const ModelShape& shape() const;
    int64_t slots() const;
    int64_t capacity() const;
    int64_t length(int64_t slot) const;  // tokens in the cache, and the one chosen last if it is not there yet

  private:
    struct State;
    std::unique_ptr<State> state;
};
