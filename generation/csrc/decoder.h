// The native decoder: nanoGPT's model with its own packed weights and caches, over the SIMD helpers and a
// chosen part. No torch and no Python here.
//
// The decoder has its own team of threads instead of PyTorch's pool; team.h says why. A text is the same alone,
// in a batch, and over any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache_precision.h"
#include "model/csrc/precision.h"
#include "model/csrc/shape.h"
#include "parts.h"
#include "sampling.h"
#include "trace.h"

class Decoder {
  public:
    // precision: the matrices'. kv: the cache's. br, bc: a tiled part's tile. slots: the number of texts that
    // it can hold, of up to `capacity` tokens each. cache_bytes: the size of the processor's last-level cache.
    Decoder(const ModelShape&, const Tensors&, Precision precision, CachePrecision kv, const Part& part,
            int64_t br, int64_t bc, int64_t slots, int64_t capacity, int threads, int64_t cache_bytes);
    ~Decoder();

    // Replaces a slot's text by these tokens, 1 to capacity of them, and computes the logits after the last.
    // `continues`: the text goes on, and the penalties still count its earlier tokens. top: alternatives in the
    // log-probabilities of ids[1:], which take_logprobs() returns; -1 skips them and their work.
    void prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top = -1);

    // The same in slices of time, with the same bits. The slot holds no text until the prompt is read.
    // prefill_some() stops when `seconds` are over, between pieces, or between stages with several threads; it
    // returns whether the prompt is read. prefill_drop() abandons the prompt and frees its memory.
    void prefill_begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, int64_t top = -1);
    bool prefill_some(int64_t slot, double seconds);
    void prefill_drop(int64_t slot);
    bool reading(int64_t slot) const;  // whether a prompt is begun and not read

    // Chooses a token for each slot from each row of uniforms; returns the rows of tokens. The slots are
    // distinct, prefilled and not full; uniforms[i] has a number in [0, 1) for each. Stops early, but not
    // before the first row, when a slot is full or `patience` seconds are over. With several rows, each group
    // of slots goes through all rows before the next group, so that its K and V stay in cache. The patience
    // then holds for each group, of which a thread may take several; earlier rows tell how many more fit.
    std::vector<std::vector<int64_t>> write(const std::vector<int64_t>& slots,
                                            const std::vector<std::vector<double>>& uniforms, double patience);

    // Copies a slot's text to another slot: cache, logits, counts of tokens and pending token, but neither the
    // sampling nor log-probabilities.
    void copy(int64_t from, int64_t to);

    // Appends this token to a slot that is not full and computes the logits after it.
    void push(int64_t slot, int64_t token);

    const std::vector<float>& logits(int64_t slot) const;  // after the last token read, (vocab_size)
    void set_sampling(int64_t slot, const Sampling&);

    // Keeps the log-probabilities of tokens chosen from now on, with `top` alternatives each, or none if -1.
    // Drops those that were not taken.
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
