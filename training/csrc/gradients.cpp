// Forward and backward pass of the whole model, over all threads.
//
//   phases, with a barrier after each                     pieces, taken by whichever thread is free
//   pack the weights                                      panels
//   embed, norm, QKV of the first layer                   blocks of rows
//   for each layer:
//       attention (part 4)                                heads, and tiles of queries of a long sequence
//       projection, norm, MLP; norm and QKV of the next   blocks of rows
//       (last layer: head, loss, and back to the MLP)
//   for each layer, the last one first:
//       attention's backward; dW of MLP and projection,   heads; tiles of dW
//       and of the QKV of the layer after it
//       QKV and norm back, the MLP of the layer before    blocks of rows
//   the first QKV's dW; gradients of the embeddings       tiles of dW; columns, positions
//   gradients of the norms' weights                       layers
//   the norm of all gradients, then scale them            chunks
//
// A block of rows goes through all operations between two attentions while it is in L2: norms, GELU and the
// loss read what a product has just written. A tile of dW sums over all tokens in order, and every other sum
// belongs to one piece, so no bit depends on the number of threads.
//
// The forward pass keeps 11 C numbers per token and layer for the backward pass: both normalized inputs, q, k,
// v, the attention's result (twice), and GELU's input. GELU is recomputed with its derivative.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "gradient.h"
#include "memory.h"
#include "model.h"
#include "norm.h"
#include "parts.h"
#include "phases.h"
#include "products.h"

namespace training {
namespace {

constexpr int64_t LEAST_ROWS = 16;        // rows of a block
constexpr int64_t BLOCKS_PER_THREAD = 4;  // enough that a late thread costs little
constexpr int64_t CHUNK = 16384;          // gradients in a piece of their norm
constexpr int64_t WIDTH = 16;             // columns of an embedding's gradient in a piece

struct Block {
    int64_t first, count;
};

simd::Matrix from(simd::Matrix m, int64_t row) { return {m.data + row * m.ld, m.ld}; }
simd::ConstMatrix constant(simd::Matrix m) { return {m.data, m.ld}; }
simd::ConstMatrix read_from(simd::Matrix m, int64_t row) { return constant(from(m, row)); }

class Step {
  public:
    Step(const Sizes& s, const Batch& batch, const ModelOf<const float>& model, const ModelOf<float>& grads,
         const std::vector<Run>& runs, float clip, float* scratch)
        : s(s), batch(batch), model(model), grads(grads), clip(clip), memory(s, model, scratch) {
        const int64_t M = s.rows();
        block_rows = round_up(M / (BLOCKS_PER_THREAD * s.threads), 8);
        block_rows = std::clamp(block_rows, LEAST_ROWS, MOST_ROWS);
        blocks = (M + block_rows - 1) / block_rows;
        for (const Run& run : runs)
            for (int64_t i = 0; i < run.count; i += CHUNK)
                chunks.push_back({run.data + i, std::min(CHUNK, run.count - i)});
        squares.resize(chunks.size());
        for (const Layer* layer : memory.packed.all())
            for (int64_t piece = 0; piece < layer->pieces(); piece++) to_pack.push_back({layer, piece});
    }

    int64_t phases() const { return /* pack, embed, four at the end */ 6 + 4 * s.L; }

    void run(Phases::Member& m) {
        m.run(static_cast<int64_t>(to_pack.size()), [&](int64_t i) {
            const Piece& piece = to_pack[static_cast<size_t>(i)];
            piece.layer->pack(piece.number);
            m.clock.lap(PACKING);
        });
        m.run(blocks, [&](int64_t i) {
            embed(block(i));
            m.clock.lap(EMBEDDING);
            enter(m, block(i), 0);
        });
        for (int64_t l = 0; l < s.L; l++) {
            const int64_t tiles = (s.T + QUERIES - 1) / QUERIES;
            m.run(s.B * s.H * tiles, [&](int64_t i) {
                attend(m, l, i / tiles, tiles - 1 - i % tiles);
                m.clock.lap(ATTENTION);
            });
            m.run(blocks, [&](int64_t i) {
                leave(m, block(i), l);
                if (l + 1 < s.L) return enter(m, block(i), l + 1);
                predict(m, block(i));
                mlp_backward(m, block(i), l);
            });
        }
        for (int64_t l = s.L - 1; l >= 0; l--) {
            backward_of_attention(m, l);
            m.run(blocks, [&](int64_t i) {
                qkv_backward(m, block(i), l);
                if (l > 0) mlp_backward(m, block(i), l - 1);
            });
        }
        finish(m);
    }

    Result result() const {
        double loss = 0;
        for (int64_t r = 0; r < s.rows(); r++) loss += static_cast<double>(memory.shared.losses[r]);
        return {static_cast<float>(loss / static_cast<double>(s.rows())), static_cast<float>(norm())};
    }

  private:
    struct Piece {
        const Layer* layer;
        int64_t number;
    };

    Sizes s;
    Batch batch;
    ModelOf<const float> model;
    ModelOf<float> grads;
    float clip;
    Memory memory;
    int64_t block_rows, blocks;
    std::vector<Run> chunks;
    std::vector<double> squares;
    std::vector<Piece> to_pack;

    Block block(int64_t i) const { return {i * block_rows, std::min(block_rows, s.rows() - i * block_rows)}; }
    const PackedLayer& packed(int64_t l) const { return memory.packed.layers[static_cast<size_t>(l)]; }
    const LayerActivations& kept(int64_t l) const { return memory.layers[static_cast<size_t>(l)]; }
    const ThreadScratch& own(const Phases::Member& m) const {
        return memory.threads[static_cast<size_t>(m.thread)];
    }

    void embed(Block b) const {
        for (int64_t r = b.first; r < b.first + b.count; r++) {
            const float *const token = model.wte + batch.ids[r] * s.C, *const place = model.wpe + r % s.T * s.C;
            float* const x = from(memory.shared.x, r).data;
            for (int64_t c = 0; c < s.C; c++) x[c] = token[c] + place[c];
        }
    }

    void normalize_rows(Block b, simd::Matrix y, float* factor) const {
        const simd::Matrix& x = memory.shared.x;
        for (int64_t r = b.first; r < b.first + b.count; r++)
            factor[r] = normalize(y.data + r * y.ld, x.data + r * x.ld, s.C);
    }

    // Norm and QKV of layer l.
    void enter(Phases::Member& m, Block b, int64_t l) const {
        const LayerActivations& a = kept(l);
        normalize_rows(b, a.normal_1, a.factor_1);
        m.clock.lap(NORM);
        multiply_panels(from(a.qkv, b.first), read_from(a.normal_1, b.first), packed(l).qkv.forward, b.count,
                        3 * s.C, s.C, false);
        m.clock.lap(PRODUCTS);
    }

    // Attention of a tile of queries of a head.
    void attend(Phases::Member& m, int64_t l, int64_t head, int64_t tile) const {
        const LayerActivations& kept_l = kept(l);
        const int64_t first = head / s.H * s.T, h = head % s.H, d = s.d();
        const int64_t i0 = tile * QUERIES, n = std::min(QUERIES, s.T - i0);
        const float* const q = kept_l.qkv.data + first * kept_l.qkv.ld + h * d;
        const int64_t ld = kept_l.qkv.ld;
        Attention a = attention_call(s, i0, n);
        a.q = {q + i0 * ld, 0, 0, ld, 1}, a.k = {q + s.C, 0, 0, ld, 1}, a.v = {q + 2 * s.C, 0, 0, ld, 1};
        a.out = kept_l.out + (head * s.T + i0) * d, a.lse = kept_l.lse + head * s.T + i0;
        flash_attention(a, own(m).attention);
        for (int64_t i = 0; i < n; i++)
            std::copy_n(a.out + i * d, d, from(kept_l.joined, first + i0 + i).data + h * d);
    }

    // Projection, norm and MLP of layer l.
    void leave(Phases::Member& m, Block b, int64_t l) const {
        const LayerActivations& a = kept(l);
        const PackedLayer& w = packed(l);
        const simd::Matrix x = from(memory.shared.x, b.first), h = from(a.h, b.first), g = own(m).g;
        multiply_panels(x, read_from(a.joined, b.first), w.projection.forward, b.count, s.C, s.C, true);
        m.clock.lap(PRODUCTS);
        normalize_rows(b, a.normal_2, a.factor_2);
        m.clock.lap(NORM);
        for (int64_t p = 0; p < panels_of(4 * s.C); p++) {
            multiply_panel(h, read_from(a.normal_2, b.first), w.up.forward, b.count, 4 * s.C, s.C, p, false);
            m.clock.lap(PRODUCTS);
            const int64_t at = p * portable::panel(), n = std::min(portable::panel(), 4 * s.C - at);
            for (int64_t r = 0; r < b.count; r++) {
                std::copy_n(h.data + r * h.ld + at, n, g.data + r * g.ld + at);
                portable::gelu(g.data + r * g.ld + at, n);
            }
            m.clock.lap(GELU);
        }
        multiply_panels(x, constant(g), w.down.forward, b.count, s.C, 4 * s.C, true);
        m.clock.lap(PRODUCTS);
    }

    // The head, the loss and its gradient, and back through the last norm.
    void predict(Phases::Member& m, Block b) const {
        const SharedActivations& a = memory.shared;
        const Layer& head = memory.packed.head;
        normalize_rows(b, a.normal, a.factor);
        m.clock.lap(NORM);
        multiply_panels(from(a.dlogits, b.first), read_from(a.normal, b.first), head.forward, b.count, s.V, s.C,
                        false);
        m.clock.lap(PRODUCTS);
        const float share = 1 / static_cast<float>(s.rows());
        for (int64_t r = b.first; r < b.first + b.count; r++) {
            float* const logits = from(a.dlogits, r).data;
            const float right = logits[batch.targets[r]];
            const float most = portable::row_max(logits, s.V, -std::numeric_limits<float>::infinity());
            const float sum = portable::exp_sum(logits, s.V, most);
            a.losses[r] = std::log(sum) + (most - right);
            portable::scale_row(logits, s.V, share / sum);
            logits[batch.targets[r]] -= share;
        }
        m.clock.lap(LOSS);
        const simd::Matrix d_normal = own(m).d_normal;
        multiply_panels(d_normal, read_from(a.dlogits, b.first), head.backward, b.count, s.C, s.V, false);
        m.clock.lap(PRODUCTS_BACKWARD);
        for (int64_t r = 0; r < b.count; r++)
            normalize_backward(from(a.dx, b.first + r).data, nullptr, d_normal.data + r * d_normal.ld,
                               from(a.normal, b.first + r).data, a.factor[b.first + r], s.C);
        m.clock.lap(NORM);
    }

    // From dx after layer l to dx_2 and the gradient of the attention's output.
    void mlp_backward(Phases::Member& m, Block b, int64_t l) const {
        const LayerActivations& kept_l = kept(l);
        const SharedActivations& a = memory.shared;
        const PackedLayer& w = packed(l);
        const simd::Matrix dh = from(a.dh, b.first), g = from(a.g, b.first), h = from(kept_l.h, b.first);
        for (int64_t p = 0; p < panels_of(4 * s.C); p++) {
            multiply_panel(dh, read_from(a.dx, b.first), w.down.backward, b.count, 4 * s.C, s.C, p, false);
            m.clock.lap(PRODUCTS_BACKWARD);
            const int64_t at = p * portable::panel(), n = std::min(portable::panel(), 4 * s.C - at);
            for (int64_t r = 0; r < b.count; r++)
                portable::gelu_gradient(dh.data + r * dh.ld + at, g.data + r * g.ld + at,
                                        h.data + r * h.ld + at, n);
            m.clock.lap(GELU_BACKWARD);
        }
        const simd::Matrix d_normal = own(m).d_normal;
        multiply_panels(d_normal, constant(dh), w.up.backward, b.count, s.C, 4 * s.C, false);
        m.clock.lap(PRODUCTS_BACKWARD);
        for (int64_t r = 0; r < b.count; r++)
            normalize_backward(from(a.dx_2, b.first + r).data, from(a.dx, b.first + r).data,
                               d_normal.data + r * d_normal.ld, from(kept_l.normal_2, b.first + r).data,
                               kept_l.factor_2[b.first + r], s.C);
        m.clock.lap(NORM);
        multiply_panels(from(a.djoined, b.first), read_from(a.dx_2, b.first), w.projection.backward, b.count,
                        s.C, s.C, false);
        m.clock.lap(PRODUCTS_BACKWARD);
    }

    // From dqkv and dx_2 to dx before layer l.
    void qkv_backward(Phases::Member& m, Block b, int64_t l) const {
        const LayerActivations& kept_l = kept(l);
        const SharedActivations& a = memory.shared;
        const simd::Matrix d_normal = own(m).d_normal;
        multiply_panels(d_normal, read_from(a.dqkv[l % 2], b.first), packed(l).qkv.backward, b.count, s.C,
                        3 * s.C, false);
        m.clock.lap(PRODUCTS_BACKWARD);
        for (int64_t r = 0; r < b.count; r++)
            normalize_backward(from(a.dx, b.first + r).data, from(a.dx_2, b.first + r).data,
                               d_normal.data + r * d_normal.ld, from(kept_l.normal_1, b.first + r).data,
                               kept_l.factor_1[b.first + r], s.C);
        m.clock.lap(NORM);
    }

    void head_backward(Phases::Member& m, int64_t l, int64_t head) const {
        const LayerActivations& kept_l = kept(l);
        const ThreadScratch& t = own(m);
        const simd::Matrix djoined = memory.shared.djoined, dqkv = memory.shared.dqkv[l % 2];
        const int64_t first = head / s.H * s.T, h = head % s.H, d = s.d(), ld = kept_l.qkv.ld;
        const float* const q = kept_l.qkv.data + first * ld + h * d;
        AttentionGradient a = gradient_call(s);
        a.q = {q, 0, 0, ld, 1}, a.k = {q + s.C, 0, 0, ld, 1}, a.v = {q + 2 * s.C, 0, 0, ld, 1};
        a.dout = {from(djoined, first).data + h * d, 0, 0, djoined.ld, 1};
        a.out = kept_l.out + head * s.T * d, a.lse = kept_l.lse + head * s.T;
        a.dq = t.dq, a.dk = t.dk, a.dv = t.dv;
        flash_backward(a, t.attention);
        for (int64_t i = 0; i < s.T; i++) {
            float* to = from(dqkv, first + i).data + h * d;
            for (const float* each : {t.dq, t.dk, t.dv}) {
                std::copy_n(each + i * d, d, to);
                to += s.C;
            }
        }
    }

    static int64_t pieces_of(const std::vector<WeightGradient>& each) {
        int64_t all = 0;
        for (const WeightGradient& w : each) all += w.pieces();
        return all;
    }

    void compute(Phases::Member& m, const std::vector<WeightGradient>& each, int64_t piece) const {
        for (const WeightGradient& w : each) {
            if (piece < w.pieces()) {
                w.compute(piece, s.rows(), own(m).tile);
                return m.clock.lap(WEIGHT_GRADIENTS);
            }
            piece -= w.pieces();
        }
    }

    WeightGradient of_qkv(int64_t l) const {
        return {constant(memory.shared.dqkv[l % 2]), constant(kept(l).normal_1), &packed(l).qkv,
                grads.layers[static_cast<size_t>(l)].c_attn, packed(l).dscale_1};
    }

    // Attention's backward pass over the heads of layer l, and the weight gradients that are ready. Longer
    // pieces come first.
    void backward_of_attention(Phases::Member& m, int64_t l) const {
        const SharedActivations& a = memory.shared;
        const PackedLayer& w = packed(l);
        const LayerOf<float>& grad = grads.layers[static_cast<size_t>(l)];
        std::vector<WeightGradient> ready{
            {constant(a.dh), constant(kept(l).normal_2), &w.up, grad.c_fc, w.dscale_2},
            {constant(a.dx), constant(a.g), &w.down, grad.mlp_proj, nullptr},
            {constant(a.dx_2), constant(kept(l).joined), &w.projection, grad.attn_proj, nullptr}};
        if (l + 1 < s.L)
            ready.push_back(of_qkv(l + 1));
        else
            ready.push_back({constant(a.dlogits), constant(a.normal), &memory.packed.head, grads.wte,
                             memory.packed.dscale_head});
        const int64_t heads = s.B * s.H, tiles = pieces_of(ready);
        const bool long_heads = 2 * s.T * s.T * s.d() > TILE * portable::panel() * s.rows();
        m.run(heads + tiles, [&](int64_t i) {
            const int64_t head = long_heads ? i : i - tiles;
            if (head < 0 || head >= heads) return compute(m, ready, long_heads ? i - heads : i);
            head_backward(m, l, head);
            m.clock.lap(ATTENTION_BACKWARD);
        });
    }

    // Adds to columns of wte's gradient, which already holds the head's part.
    void add_tokens(int64_t piece) const {
        const int64_t c0 = piece * WIDTH, n = std::min(WIDTH, s.C - c0);
        for (int64_t r = 0; r < s.rows(); r++) {
            float* const to = grads.wte + batch.ids[r] * s.C + c0;
            const float* const dx = from(memory.shared.dx, r).data + c0;
            for (int64_t c = 0; c < n; c++) to[c] += dx[c];
        }
    }

    void add_places(int64_t t) const {
        float* const to = grads.wpe + t * s.C;
        std::fill_n(to, s.C, 0.0f);
        for (int64_t b = 0; b < s.B; b++) {
            const float* const dx = from(memory.shared.dx, b * s.T + t).data;
            for (int64_t c = 0; c < s.C; c++) to[c] += dx[c];
        }
    }

    void add_parts(float* to, const float* parts, int64_t out) const {
        std::fill_n(to, s.C, 0.0f);
        for (int64_t i = 0; i < WeightGradient::row_tiles(out); i++)
            for (int64_t c = 0; c < s.C; c++) to[c] += parts[i * s.C + c];
    }

    double norm() const {
        double sum = 0;
        for (const double square : squares) sum += square;
        return std::sqrt(sum);
    }

    void finish(Phases::Member& m) {
        const std::vector<WeightGradient> ready{of_qkv(0)};
        const int64_t tiles = pieces_of(ready), columns = (s.C + WIDTH - 1) / WIDTH;
        m.run(tiles + columns + s.T, [&](int64_t i) {
            if (i < tiles) return compute(m, ready, i);
            if (i < tiles + columns)
                add_tokens(i - tiles);
            else
                add_places(i - tiles - columns);
            m.clock.lap(EMBEDDING);
        });
        m.run(s.L + 1, [&](int64_t l) {
            if (l == s.L) {
                add_parts(grads.ln_f, memory.packed.dscale_head, s.V);
            } else {
                add_parts(grads.layers[static_cast<size_t>(l)].ln_1, packed(l).dscale_1, 3 * s.C);
                add_parts(grads.layers[static_cast<size_t>(l)].ln_2, packed(l).dscale_2, 4 * s.C);
            }
            m.clock.lap(NORM);
        });
        m.run(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
            const Run& chunk = chunks[static_cast<size_t>(i)];
            squares[static_cast<size_t>(i)] = static_cast<double>(
                sum_of(chunk.count, [&](int64_t j) { return chunk.data[j] * chunk.data[j]; }));
            m.clock.lap(CLIPPING);
        });
        const float factor =
            static_cast<float>(static_cast<double>(clip) / (norm() + 1e-6));  // as PyTorch does
        if (factor >= 1) return;
        m.run(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
            const Run& chunk = chunks[static_cast<size_t>(i)];
            portable::scale_row(chunk.data, chunk.count, factor);
            m.clock.lap(CLIPPING);
        });
    }
};

}  // namespace

int64_t gradients_scratch(const Sizes& s) {
    ModelOf<const float> model{};
    model.layers.resize(static_cast<size_t>(s.L));
    return Memory(s, model, nullptr).space.taken();
}

Result gradients(const Sizes& s, const Batch& batch, const ModelOf<const float>& model,
                 const ModelOf<float>& grads, const std::vector<Run>& runs, float clip, float* scratch,
                 double* seconds) {
    Step step(s, batch, model, grads, runs, clip, scratch);
    Phases::run(step.phases(), s.threads, seconds, [&](Phases::Member& member) { step.run(member); });
    return step.result();
}

}  // namespace training
