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
// Threads: a batch is divided between them; a single text goes in stages, whose pieces (rows, heads, panels)
// they take as they come. The threads are a team of its own, not PyTorch's pool; team.h says why.
#include "decoder/decoder.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

#include "attention.h"
#include "decoder/team.h"

namespace {

constexpr int64_t PANEL = 128;     // keys of a transposed panel of the cache, at most
constexpr int64_t NEAR = 4 << 20;  // bytes of weights, and of caches, of a level that is shared with others
constexpr int64_t ROWS = 64;       // rows that pass through a layer together in prefill: their MLP stays in L2

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
            simd::transpose({packed + p * width * in, width}, {W + p * width * in, in},
                            std::min(width, out - p * width), in, 1.0f);
        weights = bf16 ? in_pairs(packed) : std::move(packed);
        if (b) std::copy_n(b, out, static_cast<float*>(bias = Buffer(columns())));
    }

    int64_t columns() const { return panels * width; }

    // Columns p * width .. (p + 1) * width - 1 of `rows` rows, or at least those from the `first` of these on.
    void set(float* y, int64_t ldY, const float* x, int64_t ldX, int64_t rows, int64_t p,
             int64_t first = 0) const {
        y += p * width;
        for (int64_t r = 0; bias && r < rows; r++) std::copy_n(bias + p * width, width, y + r * ldY);
        multiply(y, ldY, x, ldX, rows, p, bf16 ? 0 : first, bias != nullptr);
    }

    // The same, added to y.
    void add(float* y, int64_t ldY, const float* x, int64_t ldX, int64_t rows, int64_t p) const {
        y += p * width;
        for (int64_t r = 0; bias && r < rows; r++)
            for (int64_t c = 0; c < width; c++) y[r * ldY + c] += bias[p * width + c];
        multiply(y, ldY, x, ldX, rows, p, 0, true);
    }

  private:
    void multiply(float* y, int64_t ldY, const float* x, int64_t ldX, int64_t rows, int64_t p, int64_t first,
                  bool add) const {
        const int64_t at = p * width * in, n = width - first;
        if (bf16)
            simd::multiply_bf16({y, ldY}, {x, ldX}, {pairs() + at / 2, width / 2}, rows, width, in, add);
        else if (add)
            simd::multiply_add({y + first, ldY}, {x, ldX, 1}, {weights + at + first, width}, rows, n, in, in);
        else
            simd::multiply({y + first, ldY}, {x, ldX, 1}, {weights + at + first, width}, rows, n, in);
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

// Ba, Kiros & Hinton 2016 (arXiv:1607.06450), with PyTorch's epsilon.
struct LayerNorm {
    std::vector<float> weight, bias;  // bias may be empty

    void operator()(float* y, const float* x) const {
        simd::layer_norm(y, x, weight.data(), bias.empty() ? nullptr : bias.data(), weight.size());
    }
};

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
    const Part& part;
    bool transposed;  // K is
    int64_t d, br, bc, capacity, panel, threads;
    double weights;  // bytes of the matrices
    Buffer wte, wpe;
    std::vector<Layer> layers;
    LayerNorm ln_f;
    Linear head;
    Sampling sampling;
    std::vector<Slot> slots;

    // Of a step: a row for each slot that takes part. Shared, but for `normed` and `scratch`, one a thread.
    int64_t ldX, ldN;
    Buffer x, qkv, attended, hidden, logits, normed, scratch;
    int64_t scratch_floats;

    // A thread's spans, added inside of its pieces only: the caller reads them when all pieces are done.
    struct alignas(64) Track {
        std::vector<Span> spans;
    };
    bool recording = false;
    std::vector<Track> tracks;

    Pace pace;
    std::unique_ptr<Team, Team::Delete> team;  // the last, as its threads read the rest

    State(const ModelShape& s, const Tensors& tensors, bool bf16, const Part& part, int64_t br, int64_t bc,
          int64_t slot_count, int64_t capacity, int threads)
        : shape(s),
          part(part),
          transposed(part.transposed > 0),
          d(s.n_embd / s.n_head),
          br(br),
          bc(bc),
          capacity(capacity),
          panel(round_up(std::min({bc, capacity, PANEL}), simd::lanes())),
          threads(threads),
          weights((12.0 * s.n_layer * s.n_embd + s.vocab_size) * s.n_embd * (bf16 ? 2 : 4)),
          layers(s.n_layer),
          slots(slot_count),
          tracks(threads),
          team(new Team(4 * s.n_layer + 1, threads)) {
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

    // body(), and a span of it while they are recorded.
    template <class Body>
    void timed(const char* kind, int64_t thread, const Body& body) {
        const int64_t begin = recording ? now() : 0;
        body();
        if (recording) tracks[thread].spans.push_back({kind, static_cast<int>(thread), begin, now()});
    }

    static int64_t now() {
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    }

    // A member of the team; the caller's waiting for the others at the end of a stage is a span too. A helper's
    // may outlast the call, so it is left to the gaps between its spans.
    struct Recorded {
        State& state;
        Team::Member& member;

        template <class Piece>
        void run(int64_t stage, int64_t pieces, const Piece& piece) {
            if (member.thread > 0 || !state.recording) return member.run(stage, pieces, piece);
            int64_t begin = now();
            member.run(stage, pieces, piece);
            std::vector<Span>& spans = state.tracks[0].spans;
            if (!spans.empty()) begin = std::max(begin, spans.back().end);
            spans.push_back({"waiting", 0, begin, now()});
        }
    };

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
            if (normed_for == stage) return;
            timed("norm", thread, [&] {
                for (int64_t r = 0; r < rows; r++) norm(N + r * ldN, X + r * ldX);
            });
            normed_for = stage;
        };
        for (int64_t l = 0, stage = 0; stage + 1 < stages; l++) {
            const Layer& w = layers[l];
            pieces.run(stage, H, [&](int64_t h) {
                normalise(stage, w.ln_1);
                timed("QKV", thread, [&] { w.qkv.set(Q, ldQ, N, ldN, rows, h); });
                timed("attention", thread, [&] {
                    for (int64_t r = 0; r < rows; r++) {
                        const Slot& slot = slots[which[begin + r]];
                        const float* q = Q + r * ldQ + h * w.qkv.width;
                        append(slot, l, h, slot.length, q + d, 0, 1);
                        if (r + 1 < rows) prefetch_values(slots[which[begin + r + 1]], l, h);
                        attend(slot, l, h, q, A + r * C + h * d, thread);
                    }
                });
            });
            stage++;
            pieces.run(stage++, w.proj.panels, [&](int64_t p) {
                timed("projection", thread, [&] { w.proj.add(X, ldX, A, C, rows, p); });
            });
            pieces.run(stage, w.fc.panels, [&](int64_t p) {
                normalise(stage, w.ln_2);
                timed("MLP up", thread, [&] { w.fc.set(Y, ldH, N, ldN, rows, p); });
                timed("MLP GELU", thread, [&] {
                    for (int64_t r = 0; r < rows; r++) simd::gelu(Y + r * ldH + p * w.fc.width, w.fc.width);
                });
            });
            stage++;
            pieces.run(stage++, w.out.panels, [&](int64_t p) {
                timed("MLP down", thread, [&] { w.out.add(X, ldX, Y, ldH, rows, p); });
            });
        }
        pieces.run(stages - 1, head.panels, [&](int64_t p) {
            normalise(stages - 1, ln_f);
            timed("head", thread, [&] { head.set(L, ldL, N, ldN, rows, p); });
        });
    }

    // The caches of a batch lie far apart, and a processor fetches ahead only inside a run; 8 % of a step
    // of 32.
    void prefetch_values(const Slot& slot, int64_t l, int64_t h) const {
        const float* V = V_of(slot, l, h);
        for (int64_t i = 0; i < slot.length * d; i += 16) __builtin_prefetch(V + i, 0, 2);
    }

    // One head of one text: rows of k, each with its v behind it, go to the positions of the cache from `at`
    // on.
    void append(const Slot& slot, int64_t l, int64_t h, int64_t at, const float* k, int64_t ldK,
                int64_t rows) const {
        float *K = K_of(slot, l, h), *V = V_of(slot, l, h);
        for (int64_t r = 0, n; r < rows; r += n, at += n, k += n * ldK) {
            const int64_t in_panel = at % panel;
            n = std::min(rows - r, panel - in_panel);
            for (int64_t i = 0; i < n; i++) std::copy_n(k + i * ldK + d, d, V + (at + i) * d);
            if (transposed && n == 1)  // a token: twice as fast as what handles any shape
                for (int64_t f = 0; f < d; f++) K[(at - in_panel) * d + f * panel + in_panel] = k[f];
            else if (transposed)
                simd::transpose({K + (at - in_panel) * d + in_panel, panel}, {k, ldK}, n, d, 1.0f);
            else
                for (int64_t i = 0; i < n; i++) std::copy_n(k + i * ldK, d, K + (at + i) * d);
        }
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
        const int64_t T = static_cast<int64_t>(ids.size());
        const int64_t chunk = std::min(br, T);  // queries that attend together
        // The last queries may be few, for which part 4 has another way.
        const int64_t most =
            std::max(part.scratch(attention(1, chunk, T)), part.scratch(attention(1, std::min(FEW, T), T)));
        Prompt prompt{round_up(most, 16), {}, {}, {}, {}, {}};
        prompt.X = Buffer(T * ldX);
        prompt.Q = Buffer(T * layers[0].qkv.columns());
        prompt.A = Buffer(T * shape.n_embd);
        prompt.rows = Buffer(threads * prompt.per_thread(*this));
        prompt.scratch = Buffer(threads * prompt.scratch_floats);
        timed("embedding", 0, [&] {
            for (int64_t t = 0; t < T; t++) embed(prompt.X + t * ldX, ids[t], t);
        });
        if (threads == 1 || T < ROWS || !team->ours()) {
            Alone alone;
            read(slot, prompt, T, chunk, 0, alone);
        } else {
            team->take_turn([this, &slot, &prompt, T, chunk](Team::Member& member) {
                Recorded pieces{*this, member};
                read(slot, prompt, T, chunk, member.thread, pieces);
            });
        }
        timed("norm", 0, [&] { ln_f(normed, prompt.X + (T - 1) * ldX); });
        timed("head", 0, [&] {
            for (int64_t p = 0; p < head.panels; p++) head.set(logits, 0, normed, 0, 1, p);
        });
        std::copy_n(static_cast<const float*>(logits), shape.vocab_size, slot.logits.begin());
        slot.length = T;
        slot.pending = -1;
    }

    // What a prompt of T tokens needs beside the cache.
    struct Prompt {
        int64_t scratch_floats;
        Buffer X, Q, A, rows, scratch;  // (T, ldX), (T, heads' q k v), (H, T, d); the others for each thread

        static int64_t per_thread(const State& s) {
            return ROWS * (2 * s.shape.n_embd + s.layers[0].fc.columns());
        }
    };

    // A member's share of a prompt: through each layer in three stages. Outside of pieces nothing of the prompt
    // is read, as it may be gone when a late member comes.
    template <class Pieces>
    void read(Slot& slot, Prompt& prompt, int64_t T, int64_t chunk, int64_t thread, Pieces& pieces) {
        const int64_t C = shape.n_embd, H = shape.n_head, L = shape.n_layer;
        for (int64_t l = 0; l < L; l++) {
            const int64_t from = l + 1 < L ? 0 : T - 1;  // of the last layer only the last token counts
            const int64_t queries = T - from, chunks = (queries + chunk - 1) / chunk;
            pieces.run(3 * l, (T + ROWS - 1) / ROWS, [&](int64_t i) {
                float* N = prompt.rows + thread * prompt.per_thread(*this);
                const int64_t t0 = i * ROWS, rows = std::min(ROWS, T - t0);
                const Linear& qkv = layers[l].qkv;
                float *X = prompt.X + t0 * ldX, *Q = prompt.Q + t0 * qkv.columns();
                timed("norm", thread, [&] {
                    for (int64_t r = 0; r < rows; r++) layers[l].ln_1(N + r * C, X + r * ldX);
                });
                const int64_t first = t0 + rows > from ? 0 : d;  // q only where it is asked
                for (int64_t h = 0; h < H; h++) {
                    timed("QKV", thread, [&] { qkv.set(Q, qkv.columns(), N, C, rows, h, first); });
                    timed("attention", thread,
                          [&] { append(slot, l, h, t0, Q + h * qkv.width + d, qkv.columns(), rows); });
                }
            });
            pieces.run(3 * l + 1, H * chunks, [&](int64_t i) {
                const int64_t h = i % H, c = chunks - 1 - i / H;  // the longest first
                const int64_t t0 = from + c * chunk, rows = std::min(chunk, T - t0);
                const int64_t ldQ = layers[l].qkv.columns(), width = layers[l].qkv.width;
                Attention a = attention(1, rows, t0 + rows);
                const float* q = prompt.Q + h * width;
                a.q = {q + t0 * ldQ, 0, 0, ldQ, 1};
                a.k = {q + d, 0, 0, ldQ, 1};
                a.v = {q + 2 * d, 0, 0, ldQ, 1};
                a.out = prompt.A + (h * T + t0) * d;
                timed("attention", thread,
                      [&] { part.kernel(a, prompt.scratch + thread * prompt.scratch_floats); });
            });
            pieces.run(3 * l + 2, (queries + ROWS - 1) / ROWS, [&](int64_t i) {
                const Layer& w = layers[l];
                const int64_t t0 = from + i * ROWS, rows = std::min(ROWS, T - t0), ldY = w.fc.columns();
                float *N = prompt.rows + thread * prompt.per_thread(*this), *A = N + ROWS * C,
                      *Y = A + ROWS * C;
                float* X = prompt.X + t0 * ldX;
                timed("attention", thread, [&] {
                    for (int64_t r = 0; r < rows; r++)
                        for (int64_t h = 0; h < H; h++)
                            std::copy_n(prompt.A + (h * T + t0 + r) * d, d, A + r * C + h * d);
                });
                timed("projection", thread, [&] {
                    for (int64_t p = 0; p < w.proj.panels; p++) w.proj.add(X, ldX, A, C, rows, p);
                });
                timed("norm", thread, [&] {
                    for (int64_t r = 0; r < rows; r++) w.ln_2(N + r * C, X + r * ldX);
                });
                timed("MLP up", thread, [&] {
                    for (int64_t p = 0; p < w.fc.panels; p++) w.fc.set(Y, ldY, N, C, rows, p);
                });
                timed("MLP GELU", thread, [&] { simd::gelu(Y, rows * ldY); });
                timed("MLP down", thread, [&] {
                    for (int64_t p = 0; p < w.out.panels; p++) w.out.add(X, ldX, Y, ldY, rows, p);
                });
            });
        }
    }

    // Reads the pending tokens of these slots.
    void advance(const std::vector<int64_t>& which) {
        const int64_t rows = static_cast<int64_t>(which.size());
        if (rows == 0) return;
        timed("embedding", 0, [&] {
            for (int64_t r = 0; r < rows; r++) {
                const Slot& slot = slots[which[r]];
                embed(x + r * ldX, slot.pending, slot.length);
            }
        });
        const auto start = Pace::Clock::now();
        const bool together = threads > 1 && team->ours() && pace.together(rows, start);
        if (!together) {
            Alone alone;
            step(which, 0, rows, 0, alone);
        } else {
            team->take_turn([this, &which, rows](Team::Member& member) {
                Recorded pieces{*this, member};
                if (rows < threads) return step(which, 0, rows, member.thread, pieces);
                pieces.run(0, threads, [&](int64_t i) {
                    Alone alone;
                    step(which, rows * i / threads, rows * (i + 1) / threads, member.thread, alone);
                });
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

Decoder::Decoder(const ModelShape& shape, const Tensors& tensors, bool bf16, const Part& part, int64_t br,
                 int64_t bc, int64_t slots, int64_t capacity, int threads)
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
        state->timed("sampling", 0, [&] {
            slot.pending = sample(slot.logits.data(), slot.seen, uniforms[i], state->sampling);
        });
        slot.seen[slot.pending] = 1;
        tokens.push_back(slot.pending);
    }
    return tokens;
}

int64_t Decoder::near(const std::vector<int64_t>& slots) const {
    const State& s = *state;
    if (s.weights > NEAR) return std::max<int64_t>(1, slots.size());
    int64_t longest = 1;
    for (const int64_t slot : slots) longest = std::max(longest, length(slot));
    const int64_t bytes = 2 * s.shape.n_layer * s.shape.n_embd * longest * sizeof(float);
    return std::clamp(NEAR / bytes, s.threads, simd::rows() * s.threads);
}

void Decoder::copy(int64_t from, int64_t to) {
    const Slot& a = state->slots[from];
    Slot& b = state->slots[to];
    const int64_t heads = state->shape.n_layer * state->shape.n_head, per_head = state->per_head();
    const int64_t used = round_up(a.length, state->panel) * state->d;
    for (int64_t h = 0; h < heads; h++) {
        std::copy_n(a.K + h * per_head, used, b.K + h * per_head);
        std::copy_n(a.V + h * per_head, used, b.V + h * per_head);
    }
    b.length = a.length, b.pending = a.pending, b.logits = a.logits, b.seen = a.seen;
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

void Decoder::record(bool on) {
    for (State::Track& track : state->tracks) track.spans.reserve(on ? 1 << 16 : 0);
    state->recording = on;
}

std::vector<Span> Decoder::spans() {
    std::vector<Span> all;
    for (State::Track& track : state->tracks) {
        all.insert(all.end(), track.spans.begin(), track.spans.end());
        track.spans.clear();
    }
    return all;
}

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
    if (s.repetition_penalty != 1)
        for (size_t i = 0; i < n; i++)
            if (seen[i])
                weight[i] = weight[i] > 0 ? weight[i] / s.repetition_penalty : weight[i] * s.repetition_penalty;
    const auto best = std::max_element(weight.begin(), weight.end());
    if (!numbers || std::isinf(*best))
        throw std::invalid_argument("logits hold NaN, or the largest is infinite; they must be numbers");
    if (s.temperature == 0) return best - weight.begin();

    const double highest = *best;
    double least = 0;  // weights below it are left out; the highest weight is 1
    for (double& w : weight) w = std::exp((w - highest) / s.temperature);
    if (s.top_k > 0 && s.top_k < static_cast<int64_t>(n)) {
        sorted = weight;
        std::nth_element(sorted.begin(), sorted.begin() + (s.top_k - 1), sorted.end(), std::greater<>());
        least = sorted[s.top_k - 1];
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
    least = std::max(least, s.min_p);
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
