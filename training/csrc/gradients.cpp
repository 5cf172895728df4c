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
// A block of rows goes through all operations between two attentions while it is in L2. Every sum belongs to
// one piece, so no bit depends on the number of threads. The forward pass keeps 11 C numbers per token and
// layer: both normalized inputs, q, k, v, the attention's result (twice), and GELU's input, whose GELU is
// recomputed with its derivative.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention.h"
#include "layers.h"
#include "parts.h"
#include "phases.h"
#include "training_step.h"

namespace training {
namespace {

constexpr int64_t LEAST_BLOCK_ROWS = 16;  // rows of a block
constexpr int64_t BLOCKS_PER_THREAD = 4;  // enough that a late thread costs little
constexpr int64_t CHUNK = 16384;          // gradients in a piece of their norm
constexpr int64_t WIDTH = 16;             // columns of an embedding's gradient in a piece

struct Block {
    int64_t first, count;
    int64_t end() const { return first + count; }
};

class Gradients {
  public:
    // parameters: the step's, or others in their place.
    Gradients(const TrainingStep& step, const std::vector<Parameter>& parameters, const int64_t* tokens)
        : s(step.sizes),
          parameters(parameters),
          clip(step.settings.clip),
          tokens(tokens),
          memory(s, parameters, step.scratch),
          endless(s.H, s.window),
          weights(memory.weights()) {
        const int64_t M = s.rows();
        block_rows = round_up(M / (BLOCKS_PER_THREAD * s.threads), 8);
        block_rows = std::clamp(block_rows, LEAST_BLOCK_ROWS, MOST_BLOCK_ROWS);
        blocks = (M + block_rows - 1) / block_rows;
        for (const Parameter& p : parameters)
            for (int64_t i = 0; i < p.shape.count; i += CHUNK)
                chunks.push_back({p.gradient + i, std::min(CHUNK, p.shape.count - i)});
        squares.resize(chunks.size());
        for (const Weight* w : weights)
            for (int64_t panel = 0; panel < w->panels(); panel++) to_pack.push_back({w, panel});
    }

    int64_t phases() const { return /* pack, embed, four at the end */ 6 + 4 * s.L; }

    void run(Worker& m) {
        forward(m, true);
        for (int64_t l = s.L - 1; l >= 0; l--) {
            backward_of_attention(m, l);
            m.run(blocks, [&](int64_t i) {
                back(m, block(i), memory.dx, memory.dx_2, memory.dqkv[l % 2], layer(l).w_qkv,
                     layer(l).normal_1);
                if (l > 0) mlp_backward(m, block(i), l - 1);
            });
        }
        finish(m);
    }

    // The losses; if it goes on, also what follows them in a block of rows.
    void forward(Worker& m, bool goes_on) {
        m.run(to_pack.size(), [&](int64_t i) {
            const auto [weight, panel] = to_pack[i];
            weight->pack(panel);
            m.lap("packing");
        });
        m.run(blocks, [&](int64_t i) {
            embed(block(i));
            m.lap("embedding");
            enter(m, block(i), layer(0));
        });
        for (int64_t l = 0; l < s.L; l++) {
            const int64_t tiles = (s.T + s.Br - 1) / s.Br;
            m.run(s.B * s.H * tiles, [&](int64_t i) {
                attend(m, l, i / tiles, tiles - 1 - i % tiles);
                m.lap("attention");
            });
            m.run(blocks, [&](int64_t i) {
                leave(m, block(i), l);
                if (l + 1 < s.L) return enter(m, block(i), layer(l + 1));
                predict(m, block(i));
                if (!goes_on) return;
                back(m, block(i), memory.dx, {}, memory.dlogits, memory.w_head, memory.normal);
                mlp_backward(m, block(i), l);
            });
        }
    }

    const float* losses() const { return memory.losses; }

    Result result() const {
        double loss = 0;
        for (int64_t r = 0; r < s.rows(); r++) loss += static_cast<double>(memory.losses[r]);
        return {static_cast<float>(loss / static_cast<double>(s.rows())), static_cast<float>(norm())};
    }

  private:
    struct Chunk {
        float* data;
        int64_t count;
    };

    const Sizes s;
    const std::vector<Parameter>& parameters;
    const double clip;
    const int64_t* const tokens;
    const Memory memory;
    const Endless endless;
    const std::vector<const Weight*> weights;
    int64_t block_rows, blocks;
    std::vector<Chunk> chunks;  // of all gradients
    std::vector<double> squares;
    std::vector<std::pair<const Weight*, int64_t>> to_pack;

    Block block(int64_t i) const { return {i * block_rows, std::min(block_rows, s.rows() - i * block_rows)}; }
    int64_t id(int64_t row) const { return tokens[row + row / s.T]; }
    int64_t target(int64_t row) const { return tokens[row + row / s.T + 1]; }
    const Layer& layer(int64_t l) const { return memory.layers[l]; }
    const ThreadScratch& own(const Worker& m) const { return memory.threads[m.thread]; }

    void embed(Block b) const {
        for (int64_t r = b.first; r < b.end(); r++) {
            const float* const token = parameters[WTE].value + id(r) * s.C;
            const float* const place = parameters[WPE].value + r % s.T * s.C;
            float* const x = memory.x.row(r);
            for (int64_t c = 0; c < s.C; c++) x[c] = token[c] + (s.window > 0 ? 0.0f : place[c]);
        }
    }

    void normalize_rows(Worker& m, Block b, const Normalized& to) const {
        for (int64_t r = b.first; r < b.end(); r++)
            to.factor[r] = normalize(to.rows.row(r), memory.x.row(r), s.C);
        m.lap("norm");
    }

    // The way back: dx <- before + the gradient of the norm's input, from dy, that of its product with W.
    void back(Worker& m, Block b, simd::Matrix dx, simd::Matrix before, simd::Matrix dy, const Weight& W,
              const Normalized& normal) const {
        const simd::Matrix d_normal = own(m).d_normal;
        multiply(d_normal, dy.from(b.first), W.backward, b.count);
        m.lap("products, backward");
        for (int64_t r = b.first; r < b.end(); r++)
            normalize_backward(dx.row(r), before.data ? before.row(r) : nullptr, d_normal.row(r - b.first),
                               normal.rows.row(r), normal.factor[r], s.C);
        m.lap("norm");
    }

    // y <- LN(x) W^T
    void enter(Worker& m, Block b, simd::Matrix y, const Normalized& to, const Weight& W) const {
        normalize_rows(m, b, to);
        multiply(y.from(b.first), to.rows.from(b.first), W.forward, b.count);
        m.lap("products");
    }

    void enter(Worker& m, Block b, const Layer& next) const {
        enter(m, b, next.qkv, next.normal_1, next.w_qkv);
    }

    // The call of layer l's attention, or of its gradient, for n queries of a head, from query i0 on.
    template <class Call> Call attention(int64_t l, int64_t head, int64_t i0, int64_t n) const {
        const Layer& kept = layer(l);
        const int64_t d = s.d(), ld = kept.qkv.ld, row = first_row(head);
        const float *const q = kept.qkv.row(row) + head % s.H * d, *const k = q + s.C, *const v = k + s.C;
        Call a = call_of<Call>(s, i0, n);
        a.q = {q + i0 * ld, 0, 0, ld, 1};
        a.k = {k, 0, 0, ld, 1};
        a.v = {v, 0, 0, ld, 1};
        a.out = kept.out + (head * s.T + i0) * d;
        a.lse = kept.lse + head * s.T + i0;
        a.rules = endless.rules(head % s.H);
        return a;
    }

    int64_t first_row(int64_t head) const { return head / s.H * s.T; }

    // Attention of a tile of queries of a head.
    void attend(Worker& m, int64_t l, int64_t head, int64_t tile) const {
        const int64_t i0 = tile * s.Br, n = std::min(s.Br, s.T - i0), d = s.d();
        const auto a = attention<Attention>(l, head, i0, n);
        flash_attention(a, own(m).attention);
        for (int64_t i = 0; i < n; i++)
            std::copy_n(a.out + i * d, d, layer(l).joined.row(first_row(head) + i0 + i) + head % s.H * d);
    }

    // Projection, norm and MLP of layer l.
    void leave(Worker& m, Block b, int64_t l) const {
        const Layer& kept = layer(l);
        const simd::Matrix x = memory.x.from(b.first), h = kept.h.from(b.first), g = own(m).g;
        multiply(x, kept.joined.from(b.first), kept.w_projection.forward, b.count, true);
        m.lap("products");
        normalize_rows(m, b, kept.normal_2);
        const Linear& up = kept.w_up.forward;
        for (int64_t p = 0; p < up.panels(); p++) {
            up.multiply(h, kept.normal_2.rows.from(b.first), b.count, p, false);
            m.lap("products");
            const int64_t at = p * up.width(), n = std::min(up.width(), 4 * s.C - at);
            for (int64_t r = 0; r < b.count; r++) {
                float* const to = g.row(r) + at;
                std::copy_n(h.row(r) + at, n, to);
                portable::gelu(to, n);
            }
            m.lap("GELU");
        }
        multiply(x, g, kept.w_down.forward, b.count, true);
        m.lap("products");
    }

    // The head, the loss and its gradient.
    void predict(Worker& m, Block b) const {
        const Memory& a = memory;
        enter(m, b, a.dlogits, a.normal, a.w_head);
        const float share = 1 / static_cast<float>(s.rows());
        for (int64_t r = b.first; r < b.end(); r++) {
            float* const logits = a.dlogits.row(r);
            const float right = logits[target(r)];
            const float most = portable::row_max(logits, s.V, -std::numeric_limits<float>::infinity());
            const float sum = portable::exp_sum(logits, s.V, most);
            a.losses[r] = std::log(sum) + (most - right);
            portable::scale_row(logits, s.V, share / sum);
            logits[target(r)] -= share;
        }
        m.lap("loss");
    }

    // From dx after layer l to dx_2 and the gradient of the attention's output.
    void mlp_backward(Worker& m, Block b, int64_t l) const {
        const Layer& kept = layer(l);
        const Memory& a = memory;
        const simd::Matrix dh = a.dh.from(b.first), g = a.g.from(b.first), h = kept.h.from(b.first);
        multiply(dh, a.dx.from(b.first), kept.w_down.backward, b.count);
        m.lap("products, backward");
        // Whole rows: strips of a panel's width are read and written several times as slowly.
        for (int64_t r = 0; r < b.count; r++) portable::gelu_gradient(dh.row(r), g.row(r), h.row(r), 4 * s.C);
        m.lap("GELU, backward");
        back(m, b, a.dx_2, a.dx, a.dh, kept.w_up, kept.normal_2);
        multiply(a.djoined.from(b.first), a.dx_2.from(b.first), kept.w_projection.backward, b.count);
        m.lap("products, backward");
    }

    void head_backward(Worker& m, int64_t l, int64_t head) const {
        const ThreadScratch& t = own(m);
        const int64_t first = first_row(head), d = s.d(), at = head % s.H * d;
        auto a = attention<AttentionGradient>(l, head, 0, s.T);
        a.dout = {memory.djoined.row(first) + at, 0, 0, memory.djoined.ld, 1};
        a.dq = t.dq;
        a.dk = t.dk;
        a.dv = t.dv;
        flash_backward(a, t.attention);
        for (int64_t i = 0; i < s.T; i++) {
            float* to = memory.dqkv[l % 2].row(first + i) + at;
            for (const float* each : {t.dq, t.dk, t.dv}) {
                std::copy_n(each + i * d, d, to);
                to += s.C;
            }
        }
    }

    static int64_t tiles_of(const std::vector<WeightGradient>& each) {
        int64_t all = 0;
        for (const WeightGradient& w : each) all += w.tiles();
        return all;
    }

    void compute(Worker& m, const std::vector<WeightGradient>& each, int64_t tile) const {
        for (const WeightGradient& w : each) {
            if (tile < w.tiles()) {
                w.compute(tile, s.rows(), own(m).tile);
                return m.lap("weights' gradients");
            }
            tile -= w.tiles();
        }
    }

    WeightGradient of_qkv(int64_t l) const {
        return {memory.dqkv[l % 2], layer(l).normal_1.rows, &layer(l).w_qkv};
    }

    // Attention's backward pass over layer l's heads, and the weight gradients that are ready; longest first.
    void backward_of_attention(Worker& m, int64_t l) const {
        const Memory& a = memory;
        const Layer& kept = layer(l);
        const std::vector<WeightGradient> ready{
            {a.dh, kept.normal_2.rows, &kept.w_up},
            {a.dx, a.g, &kept.w_down},
            {a.dx_2, kept.joined, &kept.w_projection},
            l + 1 < s.L ? of_qkv(l + 1) : WeightGradient{a.dlogits, a.normal.rows, &a.w_head}};
        const int64_t heads = s.B * s.H, tiles = tiles_of(ready);
        const bool long_heads = 2 * s.T * s.T * s.d() > TILE * WeightGradient::width() * s.rows();
        m.run(heads + tiles, [&](int64_t i) {
            const int64_t head = long_heads ? i : i - tiles;
            if (head < 0 || head >= heads) return compute(m, ready, long_heads ? i - heads : i);
            head_backward(m, l, head);
            m.lap("attention, backward");
        });
    }

    // Adds to columns of wte's gradient, which already holds the head's part.
    void add_tokens(int64_t piece) const {
        const int64_t c0 = piece * WIDTH, n = std::min(WIDTH, s.C - c0);
        for (int64_t r = 0; r < s.rows(); r++) {
            float* const to = parameters[WTE].gradient + id(r) * s.C + c0;
            const float* const dx = memory.dx.row(r) + c0;
            for (int64_t c = 0; c < n; c++) to[c] += dx[c];
        }
    }

    void add_places(int64_t t) const {
        float* const to = parameters[WPE].gradient + t * s.C;
        std::fill_n(to, s.C, 0.0f);
        for (int64_t b = 0; b < s.B; b++) {
            const float* const dx = memory.dx.row(b * s.T + t);
            for (int64_t c = 0; c < s.C; c++) to[c] += dx[c];
        }
    }

    // The gradient of the norm before W.
    void add_parts(const Weight& W) const {
        float* const to = W.norm->gradient;
        std::fill_n(to, s.C, 0.0f);
        for (int64_t i = 0; i < W.row_tiles(); i++)
            for (int64_t c = 0; c < s.C; c++) to[c] += W.dscale[i * s.C + c];
    }

    double norm() const {
        double sum = 0;
        for (const double square : squares) sum += square;
        return std::sqrt(sum);
    }

    void finish(Worker& m) {
        const std::vector<WeightGradient> ready{of_qkv(0)};
        const int64_t tiles = tiles_of(ready), columns = (s.C + WIDTH - 1) / WIDTH;
        m.run(tiles + columns + (s.window > 0 ? 0 : s.T), [&](int64_t i) {
            if (i < tiles) return compute(m, ready, i);
            if (i < tiles + columns)
                add_tokens(i - tiles);
            else
                add_places(i - tiles - columns);
            m.lap("embedding");
        });
        m.run(weights.size(), [&](int64_t i) {
            const Weight& W = *weights[i];
            if (W.norm) add_parts(W);
            m.lap("norm");
        });
        m.run(chunks.size(), [&](int64_t i) {
            const Chunk& chunk = chunks[i];
            squares[i] = static_cast<double>(
                sum_of(chunk.count, [&](int64_t j) { return chunk.data[j] * chunk.data[j]; }));
            m.lap("clipping");
        });
        const float factor = static_cast<float>(clip / (norm() + 1e-6));  // as PyTorch does
        if (factor >= 1) return;
        m.run(chunks.size(), [&](int64_t i) {
            const Chunk& chunk = chunks[i];
            portable::scale_row(chunk.data, chunk.count, factor);
            m.lap("clipping");
        });
    }
};

}  // namespace

int64_t gradients_scratch(const Sizes& s) {
    return Memory(s, std::vector<Parameter>(shapes(s).size()), nullptr).scratch.taken();
}

Result TrainingStep::gradients(const int64_t* tokens) {
    Gradients computed(*this, parameters, tokens);
    run_phases(computed.phases(), sizes.threads, sizes.pool, seconds,
               [&](Worker& worker) { computed.run(worker); });
    return computed.result();
}

void TrainingStep::losses(const int64_t* tokens, float* to) {
    std::vector<Parameter> averages = parameters;
    for (Parameter& p : averages) p.value = p.average;
    Gradients computed(*this, averages, tokens);
    run_phases(computed.phases(), sizes.threads, sizes.pool, seconds,
               [&](Worker& worker) { computed.forward(worker, false); });
    std::copy_n(computed.losses(), sizes.rows(), to);
}

}  // namespace training
