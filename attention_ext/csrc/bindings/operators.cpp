// Argument checks and registration with PyTorch, by its stable C interface: no shared C++ ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/boundary.h"
#include "cpu/part4.h"
#include "tools/limits.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <class Element> constexpr bool IS_BF16 = std::is_same_v<Element, Bf16>;

template <class Element>
constexpr ScalarType TYPE = IS_BF16<Element> ? ScalarType::BFloat16 : ScalarType::Float;

template <class Sizes> std::string text_of_shape(const Sizes& sizes) {
    std::string text;
    for (const int64_t n : sizes) text += (text.empty() ? "" : ", ") + (n == ANY ? "any" : std::to_string(n));
    return "(" + text + ")";
}

// Throws unless t is on the CPU and has this type and shape.
template <class Element> void check(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
    REQUIRE(t.is_cpu() && t.scalar_type() == TYPE<Element>, name, " must be ",
            IS_BF16<Element> ? "bfloat16" : "float32", " on the CPU");
    REQUIRE(has_shape(t, shape), name, " has shape ", text_of_shape(t.sizes()), "; it must be ",
            text_of_shape(shape));
}

// Queries from which a copy of q, k and v costs less than rows that lie far apart, in few sets of the L1 cache.
constexpr int64_t MANY = 128;

// t itself if its rows, or its columns, are contiguous and, for many queries, beside each other; else a copy.
Tensor with_contiguous_rows(const Tensor& t, int64_t queries, bool or_columns = false) {
    const bool rows = t.stride(3) == 1 || t.size(3) == 1, columns = t.stride(2) == 1;
    const bool apart = queries >= MANY && t.stride(2) != t.size(3);
    return (rows && !apart) || (or_columns && columns) ? t : torch::stable::contiguous(t);
}

template <class Number> Number* data(const Tensor& t) {
    if constexpr (std::is_const_v<Number>)
        return static_cast<Number*>(t.const_data_ptr());
    else
        return static_cast<Number*>(t.mutable_data_ptr());
}

template <class Element> MatricesOf<Element> matrices(const Tensor& t) {
    return {data<const Element>(t), t.stride(0), t.stride(1), t.stride(2), t.size(3) == 1 ? 1 : t.stride(3)};
}

template <class Element, class Call>
void set_inputs(Call& a, const Tensor& q, const Tensor& k, const Tensor& v) {
    a.q = matrices<Element>(q);
    a.k = matrices<Element>(k);
    a.v = matrices<Element>(v);
    a.k.group = a.v.group = a.H / k.size(1);
}

template <size_t n> Tensor floats(const int64_t (&size)[n]) { return new_tensor(size, ScalarType::Float); }

// The sizes of a call. Nq * Nk is below the build's MOST_SCORES, so that scratch fits 63 bits.
template <class Element>
AttentionSizes sizes(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, float scale, int64_t br,
                     int64_t bc) {
    check<Element>(q, "q", {ANY, ANY, ANY, ANY});
    const int64_t B = q.size(0), H = q.size(1), Nq = q.size(2), d = q.size(3);
    check<Element>(k, "k", {B, ANY, ANY, d});
    const int64_t Hk = k.size(1), Nk = k.size(2);
    REQUIRE(H % Hk == 0, "q has H=", H, " heads; it must be a multiple of k's ", Hk);
    check<Element>(v, "v", {B, Hk, Nk, d});
    REQUIRE(!causal || Nq <= Nk, "q has Nq=", Nq, "; with causal it must be at most Nk=", Nk);
    REQUIRE(Nq <= (MOST_SCORES - 1) / Nk, "q has Nq=", Nq, " and k has Nk=", Nk,
            "; their product must be below 2^50");
    REQUIRE(br >= 1 && bc >= 1, "the tile is ", br, " x ", bc, "; its sides must be at least 1");
    const int threads = static_cast<int>(std::min<uint32_t>(torch::stable::get_num_threads(), MOST_THREADS));
    AttentionSizes sizes{B, H, Nq, Nk, d, causal, scale, std::min(br, Nq), std::min(bc, Nk), threads};
    sizes.pool = on_pytorch_threads;
    return sizes;
}

// The rules of a call as attention_ext/rules.py lists them, which gives the build RULE_FIELDS and RULE_TYPES.
struct Arguments {
    RULE_FIELDS
};

// The rules of a call, of which Python has checked the numbers.
class Given : public Rules {
  public:
    Given(const AttentionSizes& a, const Arguments& r)
        : Rules{r.left, a.causal ? std::min<int64_t>(r.right, 0) : r.right, static_cast<float>(r.softcap)} {
        mod = reinterpret_cast<decltype(mod)>(r.score_mod.value_or(0));
        if (r.alibi_slopes) slopes = of<float>(*r.alibi_slopes, "alibi_slopes", {a.B, a.H});
        if (r.sinks) sinks = of<float>(*r.sinks, "sinks", {a.H});
        if (r.bias) {
            const int64_t B = r.bias->size(0) == 1 ? 1 : a.B, H = r.bias->size(1) == 1 ? 1 : a.H;
            if (r.bias->scalar_type() == ScalarType::Bool)
                mask = of<bool>(*r.bias, "bias", {B, H, a.Nq, a.Nk});
            else
                bias = of<float>(*r.bias, "bias", {B, H, a.Nq, a.Nk});
            bias_row = a.Nk;
            bias_head = H == 1 ? 0 : a.Nq * a.Nk;
            bias_batch = B == 1 ? 0 : H * a.Nq * a.Nk;
        }
        if (!r.documents) return;
        REQUIRE(a.Nq <= a.Nk, "q has Nq=", a.Nq, "; with documents it must be at most Nk=", a.Nk);
        documents = of<int64_t>(*r.documents, "documents", {a.B, a.Nk});
        apart = true;
        for (int64_t b = 0; b < a.B; b++) extend(documents + b * a.Nk, a.Nk);
        extents = found.data();
    }

  private:
    // The tensor's numbers, contiguous.
    template <class Number>
    const Number* of(const Tensor& t, const char* name, std::initializer_list<int64_t> must) {
        const ScalarType type = std::is_same_v<Number, float>  ? ScalarType::Float
                                : std::is_same_v<Number, bool> ? ScalarType::Bool
                                                               : ScalarType::Long;
        REQUIRE(t.is_cpu() && t.scalar_type() == type && has_shape(t, must), name,
                " has another type or shape than the call's");
        held.push_back(torch::stable::contiguous(t));
        return data<const Number>(held.back());
    }

    // Adds the extents of a text's documents.
    void extend(const int64_t* document, int64_t Nk) {
        std::unordered_map<int64_t, Range> known;
        for (int64_t j = 0; j < Nk; j++) {
            const auto [at, fresh] = known.try_emplace(document[j], Range{j, j});
            apart = apart && (fresh || at->second.end == j);
            at->second.end = j + 1;
        }
        for (int64_t j = 0; j < Nk; j++) found.push_back(known[document[j]]);
    }

    std::vector<Tensor> held;
    std::vector<Range> found;
};

const Part& named(const std::string& part) {
    const Part* found = find_part(part);
    REQUIRE(found, "part is ", part, "; it must be a part's operator");
    return *found;
}

// Operators whose last arguments, of types Rule, are those of Given; without rules there are none.
template <class... Rule> struct Operators {
    static constexpr bool RULED = sizeof...(Rule) > 0;

    template <class Element>
    static std::tuple<Tensor, Tensor> run(const Part& part, const Tensor& q_, const Tensor& k_,
                                          const Tensor& v_, bool causal, double scale, bool return_lse,
                                          int64_t br, int64_t bc, Rule... rules) {
        AttentionOf<Element> a{sizes<Element>(q_, k_, v_, causal, static_cast<float>(scale), br, bc)};
        std::optional<Given> given;
        if constexpr (RULED) a.rules = &given.emplace(a, Arguments{rules...});
        // With rules transposed keys are a decoder's, for whose kernel every query sees a key and none a sink.
        const bool transposed = !RULED && !IS_BF16<Element> && a.Nq <= part.few.queries;
        const Tensor q = with_contiguous_rows(q_, a.Nq), k = with_contiguous_rows(k_, a.Nq, transposed),
                     v = with_contiguous_rows(v_, a.Nq);
        const Tensor out = new_tensor({a.B, a.H, a.Nq, a.d}, TYPE<Element>);
        const Tensor lse = return_lse ? floats({a.B, a.H, a.Nq}) : floats({0});
        set_inputs<Element>(a, q, k, v);
        a.out = data<Element>(out);
        a.lse = return_lse ? data<float>(lse) : nullptr;
        const Tensor scratch = floats({part.scratch(a)});
        const NoDenormals flushed;
        part.attention(a, data<float>(scratch));
        return {out, lse};
    }

    template <size_t part>
    static std::tuple<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                             double scale, bool return_lse, int64_t br, int64_t bc,
                                             Rule... rules) {
        const bool bf16 = !RULED && q.scalar_type() == ScalarType::BFloat16 && PARTS[part].takes_bf16();
        return (bf16 ? run<Bf16> : run<float>)(PARTS[part], q, k, v, causal, scale, return_lse, br, bc,
                                               rules...);
    }

    // Part 4's forward pass with lse, its own operator: PyTorch calls one with a gradient through Python.
    static std::tuple<Tensor, Tensor> with_gradient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    bool causal, double scale, int64_t br, int64_t bc,
                                                    Rule... rules) {
        return run<float>(named("part4_flash"), q, k, v, causal, scale, true, br, bc, rules...);
    }

    // The gradients of q, k and v, of the last two for each of q's heads, and of bias, from those of out and
    // lse; an empty dlse stands for no gradient.
    static std::tuple<Tensor, Tensor, Tensor, Tensor> gradients(const Tensor& dout_, const Tensor& dlse_,
                                                                const Tensor& q_, const Tensor& k_,
                                                                const Tensor& v_, const Tensor& out_,
                                                                const Tensor& lse_, bool causal, double scale,
                                                                bool of_bias, Rule... rules) {
        AttentionGradient a{sizes<float>(q_, k_, v_, causal, static_cast<float>(scale), 1, 1)};
        std::optional<Given> given;
        if constexpr (RULED) a.rules = &given.emplace(a, Arguments{rules...});
        check<float>(out_, "out", {a.B, a.H, a.Nq, a.d});
        check<float>(dout_, "dout", {a.B, a.H, a.Nq, a.d});
        check<float>(lse_, "lse", {a.B, a.H, a.Nq});
        if (dlse_.numel() > 0) check<float>(dlse_, "dlse", {a.B, a.H, a.Nq});
        const Tensor q = with_contiguous_rows(q_, a.Nq), k = with_contiguous_rows(k_, a.Nq),
                     v = with_contiguous_rows(v_, a.Nq), dout = with_contiguous_rows(dout_, a.Nq),
                     out = torch::stable::contiguous(out_), lse = torch::stable::contiguous(lse_),
                     dlse = torch::stable::contiguous(dlse_);
        const Tensor dq = floats({a.B, a.H, a.Nq, a.d}), dk = floats({a.B, a.H, a.Nk, a.d}),
                     dv = floats({a.B, a.H, a.Nk, a.d});
        set_inputs<float>(a, q, k, v);
        a.dout = matrices<float>(dout);
        a.out = data<const float>(out);
        a.lse = data<const float>(lse);
        a.dlse = dlse.numel() > 0 ? data<const float>(dlse) : nullptr;
        a.dq = data<float>(dq);
        a.dk = data<float>(dk);
        a.dv = data<float>(dv);
        const Tensor dbias = of_bias ? floats({a.B, a.H, a.Nq, a.Nk}) : floats({0});
        if (of_bias) a.dbias = std::fill_n(data<float>(dbias), dbias.numel(), 0.0f) - dbias.numel();
        const Tensor scratch = floats({flash_backward_scratch(a)});
        flash_backward(a, data<float>(scratch));
        return {dq, dk, dv, dbias};
    }
};
using Plain = Operators<>;
using Ruled = Operators<RULE_TYPES>;

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dout, const Tensor& dlse, const Tensor& q,
                                            const Tensor& k, const Tensor& v, const Tensor& out,
                                            const Tensor& lse, bool causal, double scale) {
    const auto [dq, dk, dv, none] = Plain::gradients(dout, dlse, q, k, v, out, lse, causal, scale, false);
    return {dq, dk, dv};
}

// Floats of scratch that a part takes for a call of these sizes, in bfloat16 or in float32.
int64_t scratch(const std::string& part, bool bf16, int64_t B, int64_t H, int64_t Nq, int64_t Nk, int64_t d,
                int64_t br, int64_t bc, int64_t threads) {
    const Part& row = named(part);
    REQUIRE(!bf16 || row.takes_bf16(), "part is ", part, "; it must be one that takes bfloat16");
    const AttentionSizes sizes{
        B, H, Nq, Nk, d, false, 0, std::min(br, Nq), std::min(bc, Nk), static_cast<int>(threads)};
    return bf16 ? row.scratch(AttentionOf<Bf16>{sizes}) : row.scratch(Attention{sizes});
}

// Whether part 4 uses AMX for this many bfloat16 queries on this machine.
bool uses_amx(int64_t Nq) {
    AttentionOf<Bf16> a{};
    a.Nq = Nq;
    return amx::takes(a);
}

// A size that the kernels or the SIMD helpers are compiled with.
int64_t size(const std::string& name) {
    const std::pair<const char*, int64_t> sizes[] = {
        {"lanes", simd::lanes()},    {"panel", simd::panel()},
        {"rows", simd::rows()},      {"softmax", simd::softmax_instructions()},
        {"part2.T", part2::T},       {"part2.DEPTH", part2::DEPTH},
        {"part4.STEP", part4::STEP}, {"amx.BLOCK", amx::BLOCK},
    };
    for (const auto& [known, value] : sizes)
        if (name == known) return value;
    REQUIRE(false, "name is ", name, "; it must be the name of a size");
}

// t[i][j][k][l] of a float32 CPU tensor, read by the strides. Python has checked it.
double read_4d(const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t l) {
    return data<const float>(t)[i * t.stride(0) + j * t.stride(1) + k * t.stride(2) + l * t.stride(3)];
}

std::string simd_name() { return simd::name(); }

template <size_t... part>
void implement_all(torch::stable::detail::StableLibrary& m, std::index_sequence<part...>) {
    (m.impl(PARTS[part].name, BOX(&Plain::attend<part>)), ...);
    (m.impl((PARTS[part].name + std::string("_ruled")).c_str(), BOX(&Ruled::attend<part>)), ...);
}

}  // namespace

// The build gives each SIMD implementation its namespace ATTENTION_EXT; these macros expand it.
#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

// The functions of tools/limits.h and above that take no tensor: name, arguments and result.
#define EACH_FUNCTION(F)                                                                                \
    F(scratch,                                                                                          \
      "(str part, bool bf16, int B, int H, int Nq, int Nk, int d, int br, int bc, int threads) -> int") \
    F(size, "(str name) -> int")                                                                        \
    F(simd_name, "() -> str")                                                                           \
    F(uses_amx, "(int Nq) -> bool")                                                                     \
    F(fma_peak, "(float seconds) -> float")                                                             \
    F(amx_peak, "(float seconds) -> float")                                                             \
    F(fma_latency, "(float seconds) -> float")                                                          \
    F(nops, "() -> float")                                                                              \
    F(read_bandwidth, "(SymInt bytes, float seconds) -> float")

LIBRARY(ATTENTION_EXT, m) {
    const std::string call = "(Tensor q, Tensor k, Tensor v, bool causal, float scale, ";
    const std::string rules = RULE_SCHEMA;
    const std::string of_both = ") -> (Tensor, Tensor)";
    for (const Part& part : PARTS) {
        const std::string name = part.name;
        m.def((name + call + "bool return_lse, SymInt br=1, SymInt bc=1" + of_both).c_str());
        m.def((name + "_ruled" + call + "bool return_lse, SymInt br, SymInt bc, " + rules + of_both).c_str());
    }
    m.def(("part4_with_gradient" + call + "SymInt br, SymInt bc" + of_both).c_str());
    m.def(("part4_with_gradient_ruled" + call + "SymInt br, SymInt bc, " + rules + of_both).c_str());
    const std::string gradients =
        "(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float "
        "scale";
    m.def(("part4_backward" + gradients + ") -> (Tensor, Tensor, Tensor)").c_str());
    m.def(("part4_backward_ruled" + gradients + ", bool of_bias, " + rules +
           ") -> (Tensor, Tensor, Tensor, Tensor)")
              .c_str());
    m.def("read_4d(Tensor t, SymInt i, SymInt j, SymInt k, SymInt l) -> float");
#define DEFINE(name, signature) m.def(#name signature);
    EACH_FUNCTION(DEFINE)
}

LIBRARY_IMPL(ATTENTION_EXT, CPU, m) {
    implement_all(m, std::make_index_sequence<std::size(PARTS)>());
    m.impl("part4_with_gradient", BOX(&Plain::with_gradient));
    m.impl("part4_with_gradient_ruled", BOX(&Ruled::with_gradient));
    m.impl("part4_backward", BOX(&backward));
    m.impl("part4_backward_ruled", BOX(&Ruled::gradients));
    m.impl("read_4d", BOX(&read_4d));
}

LIBRARY_IMPL(ATTENTION_EXT, CompositeExplicitAutograd, m) {
#define IMPLEMENT(name, signature) m.impl(#name, BOX(&name));
    EACH_FUNCTION(IMPLEMENT)
}
