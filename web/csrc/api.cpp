// The decoder for a page: JavaScript fills in a checkpoint's tensors, opens a decoder and writes with it.
// The page closes what it opens, and drops the whole instance after refuse().
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "generation/csrc/decoder.h"
#include "page.h"
#include "parts.h"
#include "simd/simd.h"

namespace {

constexpr std::chrono::milliseconds HALF_A_FRAME{8};
constexpr int64_t CACHE_BYTES = 8 << 20;  // the processor's; a single text does not depend on it

// A decoder of one text, and the uniform numbers that choose the text's tokens.
struct Writer {
    Decoder decoder;
    Uniforms uniforms{0};
};

}  // namespace

EXPORT(allocate) void* page_allocate(int32_t bytes) { return std::malloc(std::max(bytes, 1)); }
EXPORT(release) void page_release(void* memory) { std::free(memory); }

EXPORT(open_checkpoint)
Checkpoint* page_open_checkpoint(int32_t block_size, int32_t vocab_size, int32_t n_layer, int32_t n_head,
                                 int32_t n_embd, int32_t window) {
    return new Checkpoint{{block_size, vocab_size, n_layer, n_head, n_embd, /* tanh_gelu */ 0, window}, {}};
}

// The memory into which the page writes the tensor's floats.
EXPORT(add_tensor) float* page_add_tensor(Checkpoint* checkpoint, const char* name, int32_t floats) {
    return checkpoint->tensors[name] = Buffer(floats);
}

EXPORT(close_checkpoint) void page_close_checkpoint(Checkpoint* checkpoint) { delete checkpoint; }

// precision and part: rows of PRECISIONS and PARTS.
EXPORT(open_decoder)
Writer* page_open_decoder(const Checkpoint* checkpoint, int32_t precision, int32_t part, int32_t br, int32_t bc,
                          int32_t capacity) {
    return new Writer{{checkpoint->shape,
                       checkpoint->lookup(),
                       PRECISIONS[precision].precision,
                       CachePrecision::fp32,
                       PARTS[part],
                       {br, bc, 1, capacity, 1, CACHE_BYTES}}};
}

EXPORT(close_decoder) void page_close_decoder(Writer* writer) { delete writer; }

EXPORT(begin_text) void page_begin_text(Writer* writer, uint64_t seed, const SamplingNumbers* sampling) {
    writer->uniforms = Uniforms(seed);
    writer->decoder.set_sampling(0, {*sampling});
}

// to (count, 2) <- a seed's numbers from `first` on, for decoder.wgsl: the nearest float below, and the rest.
EXPORT(uniforms) void page_uniforms(uint64_t seed, int32_t first, int32_t count, float* to) {
    Uniforms numbers(seed);
    for (int32_t i = 0; i < first; i++) numbers.next();
    for (int32_t i = 0; i < count; i++) {
        const double number = numbers.next();
        auto below = static_cast<float>(number);
        if (below > number) below = std::nextafter(below, 0.0F);
        *to++ = below;
        *to++ = static_cast<float>(number - below);
    }
}

EXPORT(prefill) void page_prefill(Writer* writer, const int32_t* ids, int32_t count, int32_t continues) {
    writer->decoder.begin(0, {ids, ids + count}, continues);
    writer->decoder.read(0);
}

// Appends 1 to `most` tokens, for half a frame; returns their number. Token i was chosen from the i-th row of
// logits (most, vocab_size).
EXPORT(write_tokens) int32_t page_write_tokens(Writer* writer, int32_t most, int32_t* tokens, float* logits) {
    const auto end = Clock::now() + HALF_A_FRAME;
    int32_t i = 0;
    do {
        tokens[i] = static_cast<int32_t>(writer->decoder.write({0}, {{writer->uniforms.next()}})[0][0]);
        const std::vector<float> row = writer->decoder.logits(0);
        logits = std::copy(row.begin(), row.end(), logits);
    } while (++i < most && Clock::now() < end);
    return i;
}

// to (V) <- the probabilities from which a token is drawn, after `count` tokens, of which the first `prompt`
// were given.
EXPORT(distribution)
void page_distribution(const float* logits, int32_t V, const int32_t* ids, int32_t count, int32_t prompt,
                       const SamplingNumbers* sampling, double* to) {
    Occurrences text{std::vector<char>(V), std::vector<int32_t>(V)};
    for (int32_t i = 0; i < count; i++) text.seen[ids[i]] = 1;
    for (int32_t i = prompt; i < count; i++) text.written[ids[i]]++;
    const std::vector<double>& weight = weigh(logits, text, {*sampling});
    const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
    std::transform(weight.begin(), weight.end(), to, [&](double w) { return w / total; });
}

// The sizes that the kernels are compiled with, in the order of Block in lab/traffic.py.
EXPORT(block) void page_block(double* to) {
    const std::array sizes{simd::lanes(), simd::panel(), simd::rows(), part2::T, part2::DEPTH, part4::STEP};
    std::copy(sizes.begin(), sizes.end(), to);
}
