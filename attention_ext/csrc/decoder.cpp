// The whole model, a token at a time:
//
//   x <- wte[token] + wpe[position]
//   for each layer:
//       q, k, v <- LN(x) Wqkv^T;   K, V <- K, V with k, v appended
//       x <- x + attention(q, K, V) Wproj^T
//       x <- x + gelu(LN(x) Wfc^T) Wout^T
//   logits <- LN(x) wte^T
//
// A small model's step is bound by reading its weights. They are packed once, in the order in which they are
// read: panels of columns, each (in, width), so that a step is one sequential stream through them. Every sum
// over `in` goes from first to last in one chain, whatever the number of rows, panels or threads: a text is
// the same alone, in a batch, and over any number of threads.
//
// Threads: a batch is divided between them; a single text goes in stages, whose pieces (heads, panels) they
// take as they come. A thread that comes late finds the work done.
#include "decoder.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "attention.h"

namespace {

constexpr int64_t PANEL = 128;  // keys of a transposed panel of the cache, at most
constexpr int64_t ROWS = 64;    // rows that pass through a layer together in prefill: their MLP stays in L2

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Floats, all 0 at first, that start on a cache line; many of them on huge pages where Linux has them, which
// saves page walks: 5 % of a step at a context of 2048.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t size) {
        const bool huge = size * sizeof(float) >= 2 * HUGE_PAGE;
        const auto align = static_cast<std::align_val_t>(huge ? HUGE_PAGE : 64);
        data = {static_cast<float*>(operator new(size * sizeof(float), align)), Free{align}};
#ifdef MADV_HUGEPAGE
        if (huge) madvise(data.get(), size * sizeof(float), MADV_HUGEPAGE);
#endif
        std::fill_n(data.get(), size, 0.0f);
    }
    operator float*() const { return data.get(); }

  private:
    static constexpr size_t HUGE_PAGE = 2 << 20;
    struct Free {
        std::align_val_t align{};
        void operator()(float* p) const { operator delete(p, align); }
    };
    std::unique_ptr<float, Free> data{nullptr, Free{}};
};

// y <- x W^T + b; W (out, in) as panels of `width` outputs, the last one padded with zeros. In bfloat16 the
// weights are rounded to its 8 bits and take half the memory; the sums are float32 all the same.
class Linear {
  public:
    int64_t in = 0, width = 0, panels = 0;

    Linear() = default;
    Linear(const float* W, const float* b, int64_t out, int64_t in, int64_t width, bool bf16)
        : in(in), width(width), panels((out + width - 1) / width), bf16(bf16) {
        Buffer packed(panels * width * in);
        for (int64_t p = 0; p < panels; p++)
            simd::transpose(packed + p * width * in, width, W + p * width * in, in,
                            std::min(width, out - p * width), in, 1.0f);
        weights = bf16 ? in_pairs(packed) : std::move(packed);
        if (b) std::copy_n(b, out, static_cast<float*>(bias = Buffer(columns())));
    }

    int64_t columns() const { return panels * width; }

    // Columns p * width .. (p + 1) * width - 1 of `rows` rows.
    void set(float* y, int64_t ldY, const float* x, int64_t ldX, int64_t rows, int64_t p) const {
        y += p * width;
        for (int64_t r = 0; bias && r < rows; r++) std::copy_n(bias + p * width, width, y + r * ldY);
        multiply(y, ldY, x, ldX, rows, p, bias != nullptr);
    }

    // The same, added to y.
    void add(float* y, int64_t ldY, const float* x, int64_t ldX, int64_t rows, int64_t p) const {
        y += p * width;
        for (int64_t r = 0; bias && r < rows; r++)
            for (int64_t c = 0; c < width; c++) y[r * ldY + c] += bias[p * width + c];
        multiply(y, ldY, x, ldX, rows, p, true);
    }

  private:
    void multiply(float* y, int64_t ldY, const float* x, int64_t ldX, int64_t rows, int64_t p, bool add) const {
        const int64_t at = p * width * in;
        if (bf16)
            simd::multiply_bf16(y, ldY, x, ldX, pairs() + at / 2, width / 2, rows, width, in, add);
        else if (add)
            simd::multiply_add(y, ldY, x, ldX, 1, weights + at, width, rows, width, in, in);
        else
            simd::multiply(y, ldY, x, ldX, 1, weights + at, width, rows, width, in);
    }

    // The upper half of a float rounded to nearest, ties to even; x is finite.
    static uint32_t round_to_bf16(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }

    // As simd::multiply_bf16 reads them.
    Buffer in_pairs(const float* packed) const {
        const int64_t W = simd::lanes(), pairs = panels * in * width / 2;
        Buffer made(pairs);
        for (int64_t i = 0; i < pairs; i++) {
            const float* lower = packed + i / W * 2 * W + i % W;
            const uint32_t pair = round_to_bf16(lower[0]) | round_to_bf16(lower[W]) << 16;
            std::memcpy(made + i, &pair, sizeof pair);
        }
        return made;
    }

    const uint32_t* pairs() const { return reinterpret_cast<const uint32_t*>(static_cast<float*>(weights)); }

    bool bf16 = false;
    Buffer weights, bias;
};

// term(0) + ... + term(n - 1), as 16 sums side by side that a compiler can keep in a vector.
template <class Term>
float sum(int64_t n, const Term& term) {
    float part[16] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int64_t lane = 0; lane < 16; lane++) part[lane] += term(i + lane);
    for (int64_t lane = 0; i + lane < n; lane++) part[lane] += term(i + lane);
    for (int64_t half = 8; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; lane++) part[lane] += part[lane + half];
    return part[0];
}

// Ba, Kiros & Hinton 2016 (arXiv:1607.06450), with PyTorch's epsilon.
struct LayerNorm {
    std::vector<float> weight, bias;  // bias may be empty

    void operator()(float* y, const float* x) const {
        const int64_t n = static_cast<int64_t>(weight.size());
        const float mean = sum(n, [&](int64_t i) { return x[i]; }) / n;
        const float variance = sum(n, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / n;
        const float factor = 1 / std::sqrt(variance + 1e-5f);
        for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * factor * weight[i];
        for (size_t i = 0; i < bias.size(); i++) y[i] += bias[i];
    }
};

// x <- x Phi(x), the exact GELU: Phi(-|x|) = P(t) exp(-x^2 / 2) / 2 with t = 1 / (1 + p |x| / sqrt(2)), to
// 1e-7 (Abramowitz & Stegun 1964, formula 7.1.26).
void gelu(float* x, int64_t n) {
    constexpr int64_t AT_ONCE = 128;
    float e[AT_ONCE];
    for (int64_t i0 = 0; i0 < n; i0 += AT_ONCE, x += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, n - i0);
        for (int64_t i = 0; i < count; i++) e[i] = -0.5f * x[i] * x[i];
        simd::exp_sum(e, count, 0.0f);
        for (int64_t i = 0; i < count; i++) {
            const float t = 1 / (1 + 0.3275911f * 0.707106781f * std::fabs(x[i]));
            float p = t * 1.061405429f - 1.453152027f;
            p = p * t + 1.421413741f;
            p = p * t - 0.284496736f;
            p = p * t + 0.254829592f;
            const float tail = 0.5f * p * t * e[i];
            x[i] *= x[i] > 0 ? 1 - tail : tail;
        }
    }
}

// Stages of work that threads pass through together. Each takes pieces until none is left, then waits for
// those still at work; a thread that never comes is not missed.
class Team {
  public:
    explicit Team(int64_t stages) : stages(stages) {}

    void start() {
        for (Stage& s : stages) s.taken = 0, s.done = 0;
    }

    template <class Piece>
    void run(int64_t stage, int64_t pieces, const Piece& piece) {
        Stage& s = stages[stage];
        for (int64_t i = s.taken++; i < pieces; i = s.taken++) {
            piece(i);
            s.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; s.done.load(std::memory_order_acquire) < pieces; spins++)
            if (spins > 2000) std::this_thread::yield();  // about a stage's time: the other lost its core
    }

  private:
    struct alignas(64) Stage {
        std::atomic<int64_t> taken{0}, done{0};
    };
    std::vector<Stage> stages;
};

// The team of one.
struct Alone {
    template <class Piece>
    void run(int64_t, int64_t pieces, const Piece& piece) {
        for (int64_t i = 0; i < pieces; i++) piece(i);
    }
};

// Whether a step goes over all threads. Where another process takes a core, it then waits for a whole turn of
// the scheduler, the time of hundreds of steps; so a step that took much longer than one alone is followed by
// steps alone, for twenty times as long as was lost, and twice as long each time that it happens again.
class Pace {
  public:
    using Clock = std::chrono::steady_clock;

    bool together(int64_t rows, Clock::time_point now) const { return rows == measured && now >= alone_until; }

    void took(int64_t rows, bool together, Clock::time_point start) {
        const Clock::time_point now = Clock::now();
        const Clock::duration elapsed = now - start;
        if (!together) {
            if (rows != measured || elapsed < alone) alone = elapsed;
            measured = rows;
        } else if (elapsed > 3 * alone) {
            alone_until = now + 20 * patience * elapsed;
            patience = std::min(2 * patience, 64);
            measured = 0;  // the first step alone measures again: contexts grow
        } else {
            patience = 1;
        }
    }

  private:
    int64_t measured = 0;  // rows of the fastest step alone, `alone`
    Clock::duration alone{};
    Clock::time_point alone_until{};
    int patience = 1;
};

struct Part {
    int64_t (*scratch)(const Attention&);
    void (*kernel)(const Attention&, float* scratch);
};

constexpr Part PARTS[] = {{naive_scratch, naive_attention},
                          {blocked_scratch, blocked_attention},
                          {fused_scratch, fused_attention},
                          {flash_scratch, flash_attention}};

struct Layer {
    LayerNorm ln_1, ln_2;
    Linear qkv;  // a panel is one head's q, k and v
    Linear proj, fc, out;
};

struct Slot {
    Buffer K, V;           // per layer and head (T, d), but K in transposed panels where the part takes it so
    int64_t length = 0;    // tokens whose K and V are there
    int64_t pending = -1;  // the token chosen last, not yet among them
    std::vector<float> logits;
    std::vector<char> seen;
};

}  // namespace

struct Decoder::State {
    ModelShape shape;
    Part part;
    bool transposed;  // K is
    int64_t d, br, bc, capacity, panel, threads;
    Buffer wte, wpe;
    std::vector<Layer> layers;
    LayerNorm ln_f;
    Linear head;
    Sampling sampling;
    std::vector<Slot> slots;
    Team team;
    Pace pace;

    // Of a step: a row for each slot that takes part. Shared, but for `normed` and `scratch`, one a thread.
    int64_t ldX, ldN;
    Buffer x, qkv, attended, hidden, logits, normed, scratch;
    int64_t scratch_floats;

    State(const ModelShape& s, const Tensors& tensors, bool bf16, int part_number, int64_t br, int64_t bc,
          int64_t slot_count, int64_t capacity, int threads)
        : shape(s),
          part(PARTS[part_number - 1]),
          transposed(part.kernel == flash_attention),
          d(s.n_embd / s.n_head),
          br(br),
          bc(bc),
          capacity(capacity),
          panel(round_up(std::min({bc, capacity, PANEL}), simd::lanes())),
          threads(threads),
          layers(s.n_layer),
          slots(slot_count),
          team(4 * s.n_layer + 1) {
        const int64_t C = s.n_embd, V = s.vocab_size;
        const auto copy = [&](const std::string& name, int64_t floats) {
            Buffer b(floats);
            std::copy_n(tensors(name, floats), floats, static_cast<float*>(b));
            return b;
        };
        const auto layer_norm = [&](const std::string& name) {
            const float *weight = tensors(name + ".weight", C), *bias = tensors(name + ".bias", C);
            return LayerNorm{{weight, weight + C},
                             bias ? std::vector<float>(bias, bias + C) : std::vector<float>()};
        };
        const auto width = [&](int64_t out) {  // at most eight vectors, and a panel for each thread
            const int64_t W = bf16 ? 2 * simd::lanes() : simd::lanes();
            return std::min(8 * simd::lanes(), round_up((out + threads - 1) / threads, W));
        };
        const auto linear = [&](const std::string& name, int64_t out, int64_t in) {
            return Linear(tensors(name + ".weight", out * in), tensors(name + ".bias", out), out, in,
                          width(out), bf16);
        };

        wte = copy("transformer.wte.weight", V * C);
        wpe = copy("transformer.wpe.weight", s.block_size * C);
        for (int64_t l = 0; l < s.n_layer; l++) {
            const std::string name = "transformer.h." + std::to_string(l) + ".";
            layers[l].ln_1 = layer_norm(name + "ln_1");
            layers[l].qkv = by_head(tensors(name + "attn.c_attn.weight", 3 * C * C),
                                    tensors(name + "attn.c_attn.bias", 3 * C), bf16);
            layers[l].proj = linear(name + "attn.c_proj", C, C);
            layers[l].ln_2 = layer_norm(name + "ln_2");
            layers[l].fc = linear(name + "mlp.c_fc", 4 * C, C);
            layers[l].out = linear(name + "mlp.c_proj", C, 4 * C);
        }
        ln_f = layer_norm("transformer.ln_f");
        head = Linear(wte, nullptr, V, C, width(V), bf16);

        for (Slot& slot : slots) {
            slot.K = Buffer(s.n_layer * s.n_head * per_head());
            slot.V = Buffer(s.n_layer * s.n_head * per_head());
            slot.logits.resize(V);
            slot.seen.resize(V);
        }
        ldX = layers[0].proj.columns();  // no less than C
        ldN = C;
        x = Buffer(slot_count * ldX);
        qkv = Buffer(slot_count * layers[0].qkv.columns());
        attended = Buffer(slot_count * C);
        hidden = Buffer(slot_count * layers[0].fc.columns());
        logits = Buffer(slot_count * head.columns());
        normed = Buffer(threads * slot_count * ldN);
        Attention one = attention(1, 1, capacity);
        one.Bc = std::max(one.Bc, panel);
        scratch_floats = round_up(part.scratch(one), 16);
        scratch = Buffer(threads * scratch_floats);
    }

    int64_t per_head() const { return round_up(capacity, panel) * d; }
    float* K_of(const Slot& s, int64_t l, int64_t h) const { return s.K + (l * shape.n_head + h) * per_head(); }
    float* V_of(const Slot& s, int64_t l, int64_t h) const { return s.V + (l * shape.n_head + h) * per_head(); }

    // c_attn's rows are all heads' q, then all k, then all v; here each head's q, k and v are a panel.
    Linear by_head(const float* W, const float* b, bool bf16) const {
        const int64_t C = shape.n_embd, width = round_up(3 * d, 2 * simd::lanes());
        Buffer rows(shape.n_head * width * C), bias(shape.n_head * width);
        for (int64_t h = 0; h < shape.n_head; h++) {
            for (int64_t which = 0; which < 3; which++) {
                const int64_t from = which * C + h * d, to = h * width + which * d;
                std::copy_n(W + from * C, d * C, rows + to * C);
                if (b) std::copy_n(b + from, d, bias + to);
            }
        }
        return Linear(rows, b ? static_cast<float*>(bias) : nullptr, shape.n_head * width, C, width, bf16);
    }

    // What all calls of the part have in common.
    Attention attention(int64_t heads, int64_t Nq, int64_t Nk) const {
        Attention a{};
        a.B = 1, a.H = heads, a.Nq = Nq, a.Nk = Nk, a.d = d;
        a.causal = true;
        a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
        a.Br = std::min(br, Nq), a.Bc = std::min(bc, Nk);
        a.threads = 1;
        return a;
    }

    void embed(float* to, int64_t token, int64_t position) const {
        const int64_t C = shape.n_embd;
        for (int64_t i = 0; i < C; i++) to[i] = wte[token * C + i] + wpe[position * C + i];
    }

    // A step of the rows begin .. end - 1, row r being slots[which[r]] with its pending token.
    template <class Pieces>
    void step(const std::vector<int64_t>& which, int64_t begin, int64_t end, int64_t thread, Pieces& pieces) {
        const int64_t rows = end - begin, C = shape.n_embd, H = shape.n_head, stages = 4 * shape.n_layer + 1;
        const int64_t ldQ = layers[0].qkv.columns(), ldH = layers[0].fc.columns(), ldL = head.columns();
        float *X = x + begin * ldX, *Q = qkv + begin * ldQ, *A = attended + begin * C,
              *Y = hidden + begin * ldH;
        float *L = logits + begin * ldL,
              *N = normed + (thread * static_cast<int64_t>(slots.size()) + begin) * ldN;

        // Each thread normalises for itself, if it gets a piece that needs it.
        int64_t normed_for = -1;
        const auto normalise = [&](int64_t stage, const LayerNorm& norm) {
            for (int64_t r = 0; normed_for != stage && r < rows; r++) norm(N + r * ldN, X + r * ldX);
            normed_for = stage;
        };
        for (int64_t l = 0, stage = 0; stage + 1 < stages; l++) {
            const Layer& w = layers[l];
            pieces.run(stage, H, [&](int64_t h) {
                normalise(stage, w.ln_1);
                w.qkv.set(Q, ldQ, N, ldN, rows, h);
                for (int64_t r = 0; r < rows; r++) {
                    const Slot& slot = slots[which[begin + r]];
                    const float* q = Q + r * ldQ + h * w.qkv.width;
                    append(slot, l, h, q + d);
                    if (r + 1 < rows) prefetch_values(slots[which[begin + r + 1]], l, h);
                    attend(slot, l, h, q, A + r * C + h * d, thread);
                }
            });
            stage++;
            pieces.run(stage++, w.proj.panels, [&](int64_t p) { w.proj.add(X, ldX, A, C, rows, p); });
            pieces.run(stage, w.fc.panels, [&](int64_t p) {
                normalise(stage, w.ln_2);
                w.fc.set(Y, ldH, N, ldN, rows, p);
                for (int64_t r = 0; r < rows; r++) gelu(Y + r * ldH + p * w.fc.width, w.fc.width);
            });
            stage++;
            pieces.run(stage++, w.out.panels, [&](int64_t p) { w.out.add(X, ldX, Y, ldH, rows, p); });
        }
        pieces.run(stages - 1, head.panels, [&](int64_t p) {
            normalise(stages - 1, ln_f);
            head.set(L, ldL, N, ldN, rows, p);
        });
    }

    // The caches of a batch lie far apart, and a processor fetches ahead only inside a run; 8 % of a step
    // of 32.
    void prefetch_values(const Slot& slot, int64_t l, int64_t h) const {
        const float* V = V_of(slot, l, h);
        for (int64_t i = 0; i < slot.length * d; i += 16) __builtin_prefetch(V + i, 0, 2);
    }

    // One head of one text: its k and v become the last in the cache.
    void append(const Slot& slot, int64_t l, int64_t h, const float* k) const {
        float *K = K_of(slot, l, h), *V = V_of(slot, l, h);
        const float* v = k + d;
        const int64_t at = slot.length;
        if (transposed)
            for (int64_t c = 0; c < d; c++) K[at / panel * panel * d + c * panel + at % panel] = k[c];
        else
            std::copy_n(k, d, K + at * d);
        std::copy_n(v, d, V + at * d);
    }

    // One head of one text: the part attends to all that is in the cache and the last.
    void attend(const Slot& slot, int64_t l, int64_t h, const float* q, float* to, int64_t thread) const {
        Attention a = attention(1, 1, slot.length + 1);
        a.q = {q, 0, 0, d, 1};
        a.k = {K_of(slot, l, h), 0, 0, d, transposed ? panel : 1};
        if (transposed) a.Bc = panel;
        a.v = {V_of(slot, l, h), 0, 0, d, 1};
        a.out = to;
        part.kernel(a, scratch + thread * scratch_floats);
    }

    void prefill(Slot& slot, const std::vector<int64_t>& ids) {
        const int64_t T = static_cast<int64_t>(ids.size()), C = shape.n_embd, H = shape.n_head;
        const int64_t ldQ = layers[0].qkv.columns(), ldH = layers[0].fc.columns();
        const int64_t blocks = (T + ROWS - 1) / ROWS, per_thread = ROWS * (2 * C + ldH);
        Buffer X(T * ldX), Q(T * ldQ), A(T * C), work(threads * per_thread);

        for (int64_t t = 0; t < T; t++) embed(X + t * ldX, ids[t], t);
        for (int64_t l = 0; l < shape.n_layer; l++) {
            const Layer& w = layers[l];
            const bool last = l + 1 == shape.n_layer;  // of which only the last token's result is used
            for_each_item(blocks, threads, [&](int64_t block, int thread) {
                const int64_t t0 = block * ROWS, rows = std::min(ROWS, T - t0);
                float* N = work + thread * per_thread;
                for (int64_t r = 0; r < rows; r++) w.ln_1(N + r * C, X + (t0 + r) * ldX);
                for (int64_t h = 0; h < H; h++) w.qkv.set(Q + t0 * ldQ, ldQ, N, C, rows, h);
            });
            for_each_item(H, threads, [&](int64_t h, int) {
                const float *k = Q + h * w.qkv.width + d, *v = k + d;
                float *K = K_of(slot, l, h), *V = V_of(slot, l, h);
                for (int64_t t = 0; transposed && t < T; t += panel)
                    simd::transpose(K + t * d, panel, k + t * ldQ, ldQ, std::min(panel, T - t), d, 1.0f);
                for (int64_t t = 0; t < T; t++) {
                    if (!transposed) std::copy_n(k + t * ldQ, d, K + t * d);
                    std::copy_n(v + t * ldQ, d, V + t * d);
                }
            });
            const int64_t from = last ? T - 1 : 0;
            Attention a = attention(H, T - from, T);
            a.threads = static_cast<int>(threads);
            a.q = {Q + from * ldQ, 0, w.qkv.width, ldQ, 1};
            a.k = {Q + d, 0, w.qkv.width, ldQ, 1};
            a.v = {Q + 2 * d, 0, w.qkv.width, ldQ, 1};
            a.out = A;  // (H, Nq, d)
            Buffer attention_scratch(part.scratch(a));
            part.kernel(a, attention_scratch);

            for_each_item((T - from + ROWS - 1) / ROWS, threads, [&](int64_t block, int thread) {
                const int64_t t0 = from + block * ROWS, rows = std::min(ROWS, T - t0);
                float *N = work + thread * per_thread, *heads = N + ROWS * C, *Y = heads + ROWS * C;
                float* rows_of_X = X + t0 * ldX;
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t h = 0; h < H; h++)
                        std::copy_n(A + (h * a.Nq + t0 - from + r) * d, d, heads + r * C + h * d);
                for (int64_t p = 0; p < w.proj.panels; p++) w.proj.add(rows_of_X, ldX, heads, C, rows, p);
                for (int64_t r = 0; r < rows; r++) w.ln_2(N + r * C, rows_of_X + r * ldX);
                for (int64_t p = 0; p < w.fc.panels; p++) w.fc.set(Y, ldH, N, C, rows, p);
                gelu(Y, rows * ldH);
                for (int64_t p = 0; p < w.out.panels; p++) w.out.add(rows_of_X, ldX, Y, ldH, rows, p);
            });
        }
        ln_f(normed, X + (T - 1) * ldX);
        for_each_item(head.panels, threads, [&](int64_t p, int) { head.set(logits, 0, normed, 0, 1, p); });
        std::copy_n(static_cast<const float*>(logits), shape.vocab_size, slot.logits.begin());
        slot.length = T;
        slot.pending = -1;
    }

    // Reads the pending tokens of these slots.
    void advance(const std::vector<int64_t>& which) {
        const int64_t rows = static_cast<int64_t>(which.size());
        for (int64_t r = 0; r < rows; r++) {
            const Slot& slot = slots[which[r]];
            embed(x + r * ldX, slot.pending, slot.length);
        }
        if (rows == 0) return;
        const auto start = Pace::Clock::now();
        const bool together = threads > 1 && pace.together(rows, start);
        if (!together) {
            Alone alone;
            step(which, 0, rows, 0, alone);
        } else if (rows < threads) {
            team.start();
            on_threads(static_cast<int>(threads), [&](int thread) { step(which, 0, rows, thread, team); });
        } else {
            on_threads(static_cast<int>(threads), [&](int thread) {
                Alone alone;
                step(which, rows * thread / threads, rows * (thread + 1) / threads, thread, alone);
            });
        }
        if (threads > 1) pace.took(rows, together, start);
        for (int64_t r = 0; r < rows; r++) {
            Slot& slot = slots[which[r]];
            std::copy_n(logits + r * head.columns(), shape.vocab_size, slot.logits.begin());
            slot.length++;
            slot.pending = -1;
        }
    }
};

Decoder::Decoder(const ModelShape& shape, const Tensors& tensors, bool bf16, int part, int64_t br, int64_t bc,
                 int64_t slots, int64_t capacity, int threads)
    : state(std::make_unique<State>(shape, tensors, bf16, part, br, bc, slots, capacity, threads)) {}

Decoder::~Decoder() = default;

void Decoder::prefill(int64_t slot, const std::vector<int64_t>& ids, bool continues) {
    Slot& s = state->slots[slot];
    if (!continues) std::fill(s.seen.begin(), s.seen.end(), 0);
    for (const int64_t id : ids) s.seen[id] = 1;
    state->prefill(s, ids);
}

std::vector<int64_t> Decoder::next(const std::vector<int64_t>& slots, const std::vector<double>& uniforms) {
    std::vector<int64_t> behind, tokens;
    for (const int64_t slot : slots)
        if (state->slots[slot].pending >= 0) behind.push_back(slot);
    state->advance(behind);
    for (size_t i = 0; i < slots.size(); i++) {
        Slot& slot = state->slots[slots[i]];
        slot.pending = sample(slot.logits.data(), slot.seen, uniforms[i], state->sampling);
        slot.seen[slot.pending] = 1;
        tokens.push_back(slot.pending);
    }
    return tokens;
}

void Decoder::push(int64_t slot, int64_t token) {
    Slot& s = state->slots[slot];
    if (s.pending >= 0) state->advance({slot});
    s.pending = token;
    s.seen[token] = 1;
    state->advance({slot});
}

const std::vector<float>& Decoder::logits(int64_t slot) const { return state->slots[slot].logits; }
void Decoder::set_sampling(const Sampling& sampling) { state->sampling = sampling; }
const ModelShape& Decoder::shape() const { return state->shape; }
int64_t Decoder::slots() const { return static_cast<int64_t>(state->slots.size()); }
int64_t Decoder::capacity() const { return state->capacity; }
int64_t Decoder::length(int64_t slot) const {
    return state->slots[slot].length + (state->slots[slot].pending >= 0);
}

int64_t sample(const float* logits, const std::vector<char>& seen, double uniform, const Sampling& s) {
    const size_t n = seen.size();
    thread_local std::vector<double> weight, sorted;
    weight.assign(logits, logits + n);
    const bool numbers = std::none_of(logits, logits + n, [](float x) { return std::isnan(x); });
    if (!numbers || std::isinf(*std::max_element(logits, logits + n)))
        throw std::invalid_argument("logits hold NaN, or the largest is infinite; they must be numbers");
    if (s.repetition_penalty != 1)
        for (size_t i = 0; i < n; i++)
            if (seen[i])
                weight[i] = weight[i] > 0 ? weight[i] / s.repetition_penalty : weight[i] * s.repetition_penalty;
    const auto best = std::max_element(weight.begin(), weight.end());
    if (s.temperature == 0) return best - weight.begin();

    const double highest = *best;
    double least = s.min_p;  // weights below it are left out; the highest weight is 1
    for (double& w : weight) w = std::exp((w - highest) / s.temperature);
    if (s.top_k > 0 && s.top_k < static_cast<int64_t>(n)) {
        sorted = weight;
        std::nth_element(sorted.begin(), sorted.begin() + (s.top_k - 1), sorted.end(), std::greater<>());
        least = std::max(least, sorted[s.top_k - 1]);
    }
    if (s.top_p < 1) {
        sorted.clear();
        std::copy_if(weight.begin(), weight.end(), std::back_inserter(sorted),
                     [&](double w) { return w >= least; });
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        double rest = s.top_p * std::accumulate(sorted.begin(), sorted.end(), 0.0);
        size_t i = 0;
        for (; i + 1 < sorted.size() && (rest -= sorted[i]) > 0;) i++;
        least = sorted[i];
    }
    double total = 0;
    for (double& w : weight) total += w = w >= least ? w : 0;
    double point = uniform * total;
    int64_t chosen = 0;
    for (size_t i = 0; i < n; i++) {
        if (weight[i] > 0) chosen = static_cast<int64_t>(i);  // the last possible, should rounding leave a rest
        if ((point -= weight[i]) < 0) break;
    }
    return chosen;
}
