// The native decoder: nanoGPT's model with its own packed weights and caches, over the SIMD helpers and a
// chosen part. No torch and no Python here.
//
// The decoder has its own team of threads instead of PyTorch's pool; team.h says why. A text is the same alone,
// in a batch, and over any number of threads.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cache_precision.h"
#include "model/csrc/precision.h"
#include "model/csrc/shape.h"
#include "parts.h"
#include "sampling.h"
#include "trace.h"

struct Slot;

constexpr int64_t MAX_TOP = 5;  // alternatives of a token

// Methods throw std::invalid_argument naming the wrong argument, on the page refuse(), and change nothing then.
class Decoder {
  public:
    // precision: the matrices'. kv: the cache's. br, bc: a tiled part's tile. slots: the number of texts that
    // it can hold, of up to `capacity` tokens each. cache_bytes: the size of the processor's last-level cache.
    Decoder(const ModelShape&, const Tensors&, Precision precision, CachePrecision kv, const Part& part,
            int64_t br, int64_t bc, int64_t slots, int64_t capacity, int threads, int64_t cache_bytes);
    ~Decoder();

    // How a slot's tokens are chosen from now on, and how many alternatives the log-probability of each has;
    // none are kept without a number. Drops those that were not taken.
    void set_sampling(int64_t slot, const Sampling&, std::optional<int64_t> logprobs = {});
    std::vector<TokenLogprob> take_logprobs(int64_t slot);  // in the order of the tokens, since the last call

    // Replaces a slot's text by these tokens, 1 to capacity of them, which read() reads; until then the slot
    // holds no text. `continues`: the text goes on, and the penalties still count its earlier tokens. top:
    // alternatives in the log-probabilities of ids[1:], which take_logprobs() returns; without it they are not
    // computed.
    void begin(int64_t slot, const std::vector<int64_t>& ids, bool continues, std::optional<int64_t> top = {});

    // Reads until the logits after the last token are computed; returns whether they are. Stops when `seconds`
    // are over, between pieces, or between stages with several threads. The bits do not depend on it.
    bool read(int64_t slot, double seconds = std::numeric_limits<double>::infinity());

    void drop(int64_t slot);  // abandons what was begun and frees its memory

    // Chooses a token for each slot from each row of uniforms; returns the rows of tokens. The slots are
    // distinct, read and not full; uniforms[i] has a number in [0, 1) for each. Stops early, but not before the
    // first row, when a slot is full or `seconds` are over, by default so soon that Ctrl-C takes effect. With
    // several rows, each group of slots goes through all rows before the next group, so that its K and V stay
    // in cache. The seconds then hold for each group, of which a thread may take several; earlier rows tell how
    // many more fit.
    std::vector<std::vector<int64_t>> write(const std::vector<int64_t>& slots,
                                            const std::vector<std::vector<double>>& uniforms,
                                            std::optional<double> seconds = {});

    // Copies a slot's text to another slot: cache, logits, counts of tokens and pending token, but neither the
    // sampling nor log-probabilities.
    void copy(int64_t from, int64_t to);

    std::vector<float> logits(int64_t slot);  // after the last token read, (vocab_size)

    void record(bool on);       // whether threads record their spans; off at first
    std::vector<Span> spans();  // the spans since the last call, thread by thread, each in order

    int64_t slots() const;
    int64_t capacity() const;
    int64_t length(int64_t slot) const;  // tokens read, and the one chosen last; 0 until all are read

  private:
    struct State;
    std::unique_ptr<State> state;

    Slot& slot_of(const char* name, int64_t slot);  // checked
};
