// The native decoder: nanoGPT's model in fp32 with its own packed weights and caches, over the SIMD helpers
// and a chosen part. No torch and no Python here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parts.h"

struct ModelShape {
    int64_t block_size, vocab_size, n_layer, n_head, n_embd;
};

// A checkpoint's tensor by nanoGPT's name; null for a bias that the model has not. Called with the number of
// floats that it must have.
using Tensors = std::function<const float*(const std::string& name, int64_t floats)>;

// How a token is chosen; model/sampling.py says what each does.
struct Sampling {
    double temperature = 1;
    int64_t top_k = 0;  // 0 keeps all
    double top_p = 1, min_p = 0, repetition_penalty = 1;
};

// What a thread did, from begin to end in the steady clock's nanoseconds. Thread 0 is the caller; only it has
// spans of the kind `waiting`, for the others.
struct Span {
    const char* kind;
    int thread;
    int64_t begin, end;
};

// The token that `uniform`, in [0, 1), falls on; seen[i] is not 0 where token i has occurred.
int64_t sample(const float* logits, const std::vector<char>& seen, double uniform, const Sampling&);

class Decoder {
  public:
    // bf16: keep the matrices in bfloat16, for half the memory. br, bc: a tiled part's tile. slots:
    // texts that it can hold, of up to `capacity` tokens each.
    Decoder(const ModelShape&, const Tensors&, bool bf16, const Part& part, int64_t br, int64_t bc,
            int64_t slots, int64_t capacity, int threads);
    ~Decoder();

    // Replaces what a slot holds by these tokens, 1 to capacity of them, and computes the logits after the
    // last. `continues`: the slot's text goes on, and what has occurred in it is kept.
    void prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues);

    // For each of these different slots, which have been prefilled: computes the logits after the token chosen
    // last, unless prefill has, and chooses the next. None may be full.
    std::vector<int64_t> next(const std::vector<int64_t>& slots, const std::vector<double>& uniforms);

    // How many of these slots to take through several tokens before the next are, at least one. Where the
    // weights stay near the processor anyway: as many as their caches do too, but one a thread at least, and no
    // more than their products need. Else all, so that the weights are fetched seldom.
    int64_t near(const std::vector<int64_t>& slots) const;

    // Makes a slot hold what another one holds.
    void copy(int64_t from, int64_t to);

    // Appends this token to a slot that is not full and computes the logits after it.
    void push(int64_t slot, int64_t token);

    const std::vector<float>& logits(int64_t slot) const;  // of the last call that read, vocab_size of them
    void set_sampling(const Sampling&);

    void record(bool on);       // whether what follows leaves spans; not at first
    std::vector<Span> spans();  // those left since the last call, thread by thread, each in order

    const ModelShape& shape() const;
    int64_t slots() const;
    int64_t capacity() const;
    int64_t length(int64_t slot) const;  // tokens in the cache, and the one chosen last if there is one

  private:
    struct State;
    std::unique_ptr<State> state;
};
