#include "weights.h"

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <utility>

#include "buffer.h"
#include "refuse.h"

namespace {

// W (rows, columns), row by row.
RUNS_ONCE Buffer copied(const Tensor& W, int64_t rows, int64_t columns) {
    Buffer copy(rows * columns, /* unset */ true);
    const simd::Strided from = W.strided(rows, columns);
    pack_rows(copy, columns, {from.data, from.depth_stride, from.row_stride}, columns, rows);
    W.release(0, rows * columns);
    return copy;
}

RUNS_ONCE LayerNorm layer_norm(const Tensors& tensors, const std::string& name, int64_t n) {
    const float *weight = tensors(name + ".weight", n).data, *bias = tensors(name + ".bias", n).data;
    return {{weight, weight + n}, bias ? std::vector<float>(bias, bias + n) : std::vector<float>()};
}

// The width of panels of `out` outputs when `members` share them.
RUNS_ONCE int64_t panel_width(int64_t out, int members, const PrecisionRow& row) {
    const int64_t share = round_up((out + members - 1) / members, row.vectors * portable::lanes());
    return std::min(row.widest * portable::lanes(), share);
}

}  // namespace

void ModelShape::check() const {
    constexpr int64_t MOST = int64_t{1} << 31;
    ::check("block_size", block_size, 1, MOST);
    ::check("vocab_size", vocab_size, 1, MOST);
    ::check("n_layer", n_layer, 1, MOST);
    ::check("n_head", n_head, 1, MOST);
    ::check("n_embd", n_embd, 1, MOST);
    ::check("window", window, 0, MOST);
    if (n_embd % n_head) refuse("n_embd", n_embd, "a multiple of n_head=" + std::to_string(n_head));
}

void Tensor::release([[maybe_unused]] int64_t first, [[maybe_unused]] int64_t floats) const {
#ifdef __linux__
    if (!mapped) return;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(data + first), end = begin + sizeof(float) * floats;
    madvise(reinterpret_cast<void*>(begin / page * page), end - begin / page * page, MADV_DONTNEED);
#endif
}

RUNS_ONCE Weights::Weights(const ModelShape& s, const Tensors& tensors, Precision precision, int threads,
                           const Parallel& parallel)
    : layers(s.n_layer) {
    const int64_t C = s.n_embd, V = s.vocab_size, d = C / s.n_head;
    const PrecisionRow& row = row_of(precision);
    matrix_bytes = (12.0 * s.n_layer * s.n_embd + s.vocab_size) * s.n_embd * row.bytes;
    const int members = fit_twice() ? 1 : threads;

    const Tensor embedding = tensors("transformer.wte.weight", V * C);

    // In the order of matrices().
    struct Packing {
        std::string name;
        Panels shape;
        Source from;
    };
    std::vector<Packing> all;
    const auto add = [&](const std::string& name, int64_t out, int64_t in) {
        const int64_t width = panel_width(out, members, row);
        all.push_back({name, {out, in, width}, {{}, width, out}});
    };
    for (int64_t l = 0; l < s.n_layer; l++) {
        const std::string name = "transformer.h." + std::to_string(l) + ".";
        layers[l].ln_1 = layer_norm(tensors, name + "ln_1", C);
        layers[l].ln_2 = layer_norm(tensors, name + "ln_2", C);
        // c_attn has all heads' q, then all k, then all v. Here a panel holds one head's q, k and v.
        const int64_t width = round_up(3 * d, row.vectors * portable::lanes());
        all.push_back({name + "attn.c_attn", {s.n_head * width, C, width}, {{}, d, C, 3}});
        add(name + "attn.c_proj", C, C);
        add(name + "mlp.c_fc", 4 * C, C);
        add(name + "mlp.c_proj", C, 4 * C);
        if (!portable::SMALL && s.tanh_gelu) layers[l].gelu = portable::gelu_tanh;
    }
    const bool tied = !tensors("lm_head.weight", V * C).data;
    add(tied ? "transformer.wte" : "lm_head", V, C);
    ln_f = layer_norm(tensors, "transformer.ln_f", C);
    if (s.window == 0) wpe = copied(tensors("transformer.wpe.weight", s.block_size * C), s.block_size, C);
    if (fit_twice() || !tied || precision != Precision::fp32) wte = copied(embedding, V, C);

    std::vector<Panels> shapes;
    for (const Packing& m : all) shapes.push_back(m.shape);
    std::vector<std::vector<float*>> panels = lay_out(shapes, row, members);
    const std::vector<Linear*> linears = matrices();
    for (size_t i = 0; i < all.size(); i++) {
        const std::string& name = all[i].name;
        const Panels& shape = all[i].shape;
        Source& from = all[i].from;
        const int64_t rows = from.runs * from.apart;
        const Tensor W = tensors(name + ".weight", rows * shape.in);
        const float* const b = i + 1 < all.size() ? tensors(name + ".bias", rows).data : nullptr;
        from.W = W.strided(rows, shape.in);
        const Buffer bias(b ? shape.count() * shape.width : 0);
        for (int64_t p = 0; b && p < shape.count(); p++)
            for (int64_t run = 0; run < from.runs; run++)
                std::copy_n(b + run * from.apart + p * from.rows, from.count(p),
                            bias + p * shape.width + run * from.rows);
        Linear& to = *linears[i] =
            Linear(shape, row, b ? static_cast<float*>(bias) : nullptr, std::move(panels[i]));
        parallel(to.panels(), [&](int64_t p) {
            to.pack(p, from);
            for (int64_t run = 0; !W.transposed && run < from.runs; run++)
                W.release((run * from.apart + p * from.rows) * shape.in, from.count(p) * shape.in);
        });
        W.release(0, rows * shape.in);
    }
}

void Weights::embed(float* x, int64_t token, int64_t position) const {
    const int64_t C = head.inputs();
    for (int64_t i = 0; i < C; i++)
        x[i] = (wte ? wte[token * C + i] : head.weight(token, i)) + (wpe ? wpe[position * C + i] : 0.0f);
}

std::vector<Linear*> Weights::matrices() {
    std::vector<Linear*> all;
    for (Layer& w : layers) all.insert(all.end(), {&w.qkv, &w.proj, &w.fc, &w.out});
    all.push_back(&head);
    return all;
}

RUNS_ONCE std::vector<std::vector<float*>> Weights::lay_out(const std::vector<Panels>& shapes,
                                                            const PrecisionRow& row, int members) {
    std::vector<std::vector<float*>> panels(shapes.size());
    const auto take = [&](Scratch at) {
        for (int member = 0; member < members; member++)
            for (size_t i = 0; i < shapes.size(); i++) {
                const int64_t count = shapes[i].count();
                panels[i].resize(count);
                for (int64_t p = count * member / members; p < count * (member + 1) / members; p++)
                    panels[i][p] = at.take(row.words(shapes[i]));
            }
        return at.taken();
    };
    memory = Buffer(take(Scratch()), /* unset */ true);
    take(Scratch(memory));
    return panels;
}

RUNS_ONCE Weights Weights::shared_by(int members) {
    Weights shared;
    for (const Layer& w : layers) shared.layers.push_back({w.ln_1, w.ln_2, {}, {}, {}, {}, w.gelu});
    shared.ln_f = ln_f;
    const std::vector<Linear*> from = matrices(), to = shared.matrices();
    std::vector<Panels> shapes;
    for (size_t i = 0; i < from.size(); i++) {  // a panel of q, k and v stays a head's
        const Linear& w = *from[i];
        const bool is_qkv = i % 4 == 0 && i / 4 < layers.size();
        shapes.push_back(
            {w.outputs(), w.inputs(), is_qkv ? w.width() : panel_width(w.outputs(), members, w.kept_in())});
    }
    std::vector<std::vector<float*>> panels = shared.lay_out(shapes, head.kept_in(), members);
    for (size_t i = 0; i < from.size(); i++)
        *to[i] = from[i]->with_width(shapes[i].width, std::move(panels[i]));
    return shared;
}
