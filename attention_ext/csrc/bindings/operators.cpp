// Argument checks and registration with PyTorch, through its stable C interface: these headers compile in
// seconds, and no C++ ABI is shared with libtorch. Only the files of this folder include torch headers.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bindings/boundary.h"
#include "bindings/pool.h"
#include "cpu/part4_amx.h"
#include "cpu/sizes.h"
#include "denormals.h"
#include "gradient.h"
#include "parts.h"
#include "simd/simd.h"
#include "tools/limits.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

std::string shape(const Tensor& t) {
    std::string text = "(";
    for (int64_t i = 0; i < t.dim(); i++) text += (i ? ", " : "") + std::to_string(t.size(i));
    return text + ")";
}

void checked(const Tensor& t, const char* name, ScalarType type, const char* what) {
    REQUIRE(t.is_cpu(), name, " is on another device; it must be on the CPU");
    REQUIRE(t.scalar_type() == type, name, " has another type; it must be ", what);
    REQUIRE(t.dim() == 4, name, " has shape ", shape(t), "; it must have four dimensions (B, H, N, d)");
    for (int64_t i = 0; i < 4; i++)
        REQUIRE(t.size(i) >= 1, name, " has shape ", shape(t), "; no dimension may be empty");
}

// t itself if its rows, or its columns, are contiguous, else a copy whose rows are.
Tensor with_contiguous_rows(const Tensor& t, bool or_columns = false) {
    const bool rows = t.stride(3) == 1 || t.size(3) == 1, columns = t.stride(2) == 1;
    return rows || (or_columns && columns) ? t : torch::stable::contiguous(t);
}

template <class Element>
MatricesOf<Element> matrices(const Tensor& t) {
    return {static_cast<const Element*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2),
            t.size(3) == 1 ? 1 : t.stride(3)};
}

template <class Element>
constexpr bool IS_BF16 = std::is_same_v<Element, Bf16>;

// An uninitialised contiguous tensor, through the C interface: torch::stable::empty looks up its operator by
// name, which takes a microsecond, and a call for one token takes only a few.
template <class Element, size_t n>
Tensor new_tensor(const int64_t (&size)[n]) {
    const int32_t type = IS_BF16<Element> ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
    int64_t stride[n];
    stride[n - 1] = 1;
    for (size_t i = n - 1; i > 0; i--) stride[i - 1] = stride[i] * size[i];
    AtenTensorHandle handle = nullptr;
    const AOTITorchError error =
        aoti_torch_empty_strided(n, size, stride, type, aoti_torch_device_type_cpu(), 0, &handle);
    REQUIRE(error == AOTI_TORCH_SUCCESS, "there is not enough memory for ", size[0] * stride[0], " numbers");
    return Tensor(handle);
}

// MOST_SCORES, given by the build: below this limit on Nq * Nk the size of the scratch fits 63 bits. An
// expanded tensor may have more rows than memory has bytes.
constexpr int64_t MOST_THREADS = 1024;

template <class Element>
std::tuple<Tensor, Tensor> run_in(const Part& part, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                  bool causal, double scale, bool return_lse, int64_t br, int64_t bc) {
    constexpr ScalarType type = IS_BF16<Element> ? ScalarType::BFloat16 : ScalarType::Float;
    const char* of_q = part.takes_bf16() ? "float32 or bfloat16" : "float32";
    const char* of_others = IS_BF16<Element> ? "bfloat16, as q is" : "float32";
    checked(q_, "q", type, of_q), checked(k_, "k", type, of_others), checked(v_, "v", type, of_others);
    const bool transposed = !IS_BF16<Element> && q_.size(2) <= part.few.queries;
    const Tensor q = with_contiguous_rows(q_), k = with_contiguous_rows(k_, transposed),
                 v = with_contiguous_rows(v_);
    const int64_t B = q.size(0), H = q.size(1), Nq = q.size(2), Nk = k.size(2), d = q.size(3);
    REQUIRE(k.size(0) == B && k.size(1) == H && k.size(3) == d, "k has shape ", shape(k),
            "; it must be (B, H, Nk, d) like q, which has shape ", shape(q));
    REQUIRE(v.size(0) == B && v.size(1) == H && v.size(2) == Nk && v.size(3) == d, "v has shape ", shape(v),
            "; it must have the shape of k, ", shape(k));
    REQUIRE(!causal || Nq <= Nk, "q has Nq=", Nq, "; with causal it must be at most Nk=", Nk);
    REQUIRE(Nq <= (MOST_SCORES - 1) / Nk, "q has Nq=", Nq, " and k has Nk=", Nk,
            "; their product must be below 2^50");
    REQUIRE(br >= 1, "br is ", br, "; it must be at least 1");
    REQUIRE(bc >= 1, "bc is ", bc, "; it must be at least 1");

    const Tensor out = new_tensor<Element>({B, H, Nq, d});
    const Tensor lse = return_lse ? new_tensor<float>({B, H, Nq}) : new_tensor<float>({0});
    AttentionOf<Element> a{};
    a.B = B, a.H = H, a.Nq = Nq, a.Nk = Nk, a.d = d;
    a.q = matrices<Element>(q), a.k = matrices<Element>(k), a.v = matrices<Element>(v);
    a.out = static_cast<Element*>(out.mutable_data_ptr());
    a.lse = return_lse ? static_cast<float*>(lse.mutable_data_ptr()) : nullptr;
    a.causal = causal, a.scale = static_cast<float>(scale);
    a.Br = std::min(br, Nq), a.Bc = std::min(bc, Nk);
    a.threads = static_cast<int>(std::min<int64_t>(torch::stable::get_num_threads(), MOST_THREADS));
    const Tensor buffer = new_tensor<float>({part.scratch(a)});
    const NoDenormals flushed;
    part.attention(a, static_cast<float*>(buffer.mutable_data_ptr()));
    return {out, lse};
}

std::tuple<Tensor, Tensor> run(const Part& part, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                               double scale, bool return_lse, int64_t br, int64_t bc) {
    const bool bf16 = q.scalar_type() == ScalarType::BFloat16 && part.takes_bf16();
    return (bf16 ? run_in<Bf16> : run_in<float>)(part, q, k, v, causal, scale, return_lse, br, bc);
}

template <size_t part>
std::tuple<Tensor, Tensor> untiled(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                                   bool return_lse) {
    return run(PARTS[part], q, k, v, causal, scale, return_lse, 1, 1);
}

template <size_t part>
std::tuple<Tensor, Tensor> tiled(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                                 bool return_lse, int64_t br, int64_t bc) {
    return run(PARTS[part], q, k, v, causal, scale, return_lse, br, bc);
}

const Part& named(const std::string& part) {
    const Part* found = find_part(part);
    REQUIRE(found, "part is ", part, "; it must be a part's operator");
    return *found;
}

// Part 4's forward pass with what its backward pass needs. It is a separate operator because PyTorch calls an
// operator with a gradient through Python, which takes longer than a token's attention.
std::tuple<Tensor, Tensor> with_gradient(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                         double scale, int64_t br, int64_t bc) {
    return run_in<float>(named("part4_flash"), q, k, v, causal, scale, true, br, bc);
}

void same_shape(const Tensor& t, const char* name, const Tensor& as, const char* of) {
    bool same = t.dim() == as.dim();
    for (int64_t i = 0; same && i < t.dim(); i++) same = t.size(i) == as.size(i);
    REQUIRE(same, name, " has shape ", shape(t), "; it must have the shape of ", of, ", ", shape(as));
}

// The data of a checked float32 CPU tensor with one number per query.
const float* of_rows(const Tensor& t, const char* name, const Tensor& q) {
    REQUIRE(t.is_cpu() && t.scalar_type() == ScalarType::Float, name, " must be float32 on the CPU");
    REQUIRE(t.dim() == 3 && t.size(0) == q.size(0) && t.size(1) == q.size(1) && t.size(2) == q.size(2), name,
            " has shape ", shape(t), "; it must be (B, H, Nq) as q has ", shape(q));
    return static_cast<const float*>(t.const_data_ptr());
}

// The gradients of q, k and v from those of out and lse; an empty dlse stands for no gradient.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dout_, const Tensor& dlse_, const Tensor& q_,
                                            const Tensor& k_, const Tensor& v_, const Tensor& out_,
                                            const Tensor& lse_, bool causal, double scale) {
    const std::pair<const char*, const Tensor*> tensors[] = {
        {"q", &q_}, {"k", &k_}, {"v", &v_}, {"out", &out_}, {"dout", &dout_}};
    for (const auto& [name, t] : tensors) checked(*t, name, ScalarType::Float, "float32");
    REQUIRE(k_.size(0) == q_.size(0) && k_.size(1) == q_.size(1) && k_.size(3) == q_.size(3), "k has shape ",
            shape(k_), "; it must be (B, H, Nk, d) like q, which has shape ", shape(q_));
    same_shape(v_, "v", k_, "k"), same_shape(out_, "out", q_, "q"), same_shape(dout_, "dout", q_, "q");
    const Tensor q = with_contiguous_rows(q_), k = with_contiguous_rows(k_), v = with_contiguous_rows(v_),
                 dout = with_contiguous_rows(dout_), out = torch::stable::contiguous(out_),
                 lse = torch::stable::contiguous(lse_), dlse = torch::stable::contiguous(dlse_);
    const int64_t B = q.size(0), H = q.size(1), Nq = q.size(2), Nk = k.size(2), d = q.size(3);
    REQUIRE(!causal || Nq <= Nk, "q has Nq=", Nq, "; with causal it must be at most Nk=", Nk);

    const Tensor dq = new_tensor<float>({B, H, Nq, d}), dk = new_tensor<float>({B, H, Nk, d}),
                 dv = new_tensor<float>({B, H, Nk, d});
    AttentionGradient a{};
    a.B = B, a.H = H, a.Nq = Nq, a.Nk = Nk, a.d = d;
    a.q = matrices<float>(q), a.k = matrices<float>(k), a.v = matrices<float>(v);
    a.dout = matrices<float>(dout);
    a.out = static_cast<const float*>(out.const_data_ptr());
    a.lse = of_rows(lse, "lse", q);
    a.dlse = dlse.numel() == 0 ? nullptr : of_rows(dlse, "dlse", q);
    a.dq = static_cast<float*>(dq.mutable_data_ptr()), a.dk = static_cast<float*>(dk.mutable_data_ptr()),
    a.dv = static_cast<float*>(dv.mutable_data_ptr());
    a.causal = causal, a.scale = static_cast<float>(scale);
    a.threads = static_cast<int>(std::min<int64_t>(torch::stable::get_num_threads(), MOST_THREADS));
    const Tensor buffer = new_tensor<float>({flash_backward_scratch(a)});
    flash_backward(a, static_cast<float*>(buffer.mutable_data_ptr()));
    return {dq, dk, dv};
}

template <class Element>
int64_t scratch_in(const Part& part, int64_t B, int64_t H, int64_t Nq, int64_t Nk, int64_t d, int64_t br,
                   int64_t bc, int64_t threads) {
    AttentionOf<Element> a{};
    a.B = B, a.H = H, a.Nq = Nq, a.Nk = Nk, a.d = d;
    a.Br = std::min(br, Nq), a.Bc = std::min(bc, Nk);
    a.threads = static_cast<int>(threads);
    return part.scratch(a);
}

// Floats of scratch that a part takes for a call of these sizes, in bfloat16 or in float32.
int64_t scratch(const std::string& part, bool bf16, int64_t B, int64_t H, int64_t Nq, int64_t Nk, int64_t d,
                int64_t br, int64_t bc, int64_t threads) {
    const Part& row = named(part);
    REQUIRE(!bf16 || row.takes_bf16(), "part is ", part, "; it must be one that takes bfloat16");
    return (bf16 ? scratch_in<Bf16> : scratch_in<float>)(row, B, H, Nq, Nk, d, br, bc, threads);
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

// t[i][j][k][l], read by the strides.
double read_4d(const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t l) {
    REQUIRE(t.is_cpu() && t.scalar_type() == ScalarType::Float && t.dim() == 4,
            "t must be a float32 CPU tensor with four dimensions");
    const int64_t index[4] = {i, j, k, l};
    int64_t offset = 0;
    for (int n = 0; n < 4; n++) {
        REQUIRE(index[n] >= 0 && index[n] < t.size(n), "index ", index[n], " of dimension ", n,
                " is outside 0 .. ", t.size(n) - 1);
        offset += index[n] * t.stride(n);
    }
    return static_cast<const float*>(t.const_data_ptr())[offset];
}

std::string simd_name() { return simd::name(); }

const std::string QKV = "(Tensor q, Tensor k, Tensor v, bool causal, float scale, bool return_lse";

template <size_t part>
void implement(torch::stable::detail::StableLibrary& m) {
    if constexpr (PARTS[part].tiled)
        m.impl(PARTS[part].name, BOX(&tiled<part>));
    else
        m.impl(PARTS[part].name, BOX(&untiled<part>));
}

template <size_t... part>
void implement_all(torch::stable::detail::StableLibrary& m, std::index_sequence<part...>) {
    (implement<part>(m), ...);
}

}  // namespace

// ATTENTION_EXT, given by the build, is the namespace in torch.ops: each SIMD implementation has its own,
// so that several can be loaded at once. The macros below expand it.
#define LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

LIBRARY(ATTENTION_EXT, m) {
    for (const Part& part : PARTS)
        m.def(
            (part.name + QKV + (part.tiled ? ", SymInt br, SymInt bc" : "") + ") -> (Tensor, Tensor)").c_str());
    m.def(
        "part4_with_gradient(Tensor q, Tensor k, Tensor v, bool causal, float scale, SymInt br, SymInt bc) -> "
        "(Tensor, Tensor)");
    m.def(
        "part4_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool "
        "causal, float scale) -> (Tensor, Tensor, Tensor)");
    m.def(
        "scratch(str part, bool bf16, int B, int H, int Nq, int Nk, int d, int br, int bc, int threads) -> "
        "int");
    m.def("size(str name) -> int");
    m.def("read_4d(Tensor t, SymInt i, SymInt j, SymInt k, SymInt l) -> float");
    m.def("simd_name() -> str");
    m.def("uses_amx(int Nq) -> bool");
    m.def("fma_peak(float seconds) -> float");
    m.def("amx_peak(float seconds) -> float");
    m.def("fma_latency(float seconds) -> float");
    m.def("read_bandwidth(SymInt bytes, float seconds) -> float");
}

LIBRARY_IMPL(ATTENTION_EXT, CPU, m) {
    implement_all(m, std::make_index_sequence<std::size(PARTS)>());
    m.impl("part4_with_gradient", BOX(&with_gradient));
    m.impl("part4_backward", BOX(&backward));
    m.impl("read_4d", BOX(&read_4d));
}

LIBRARY_IMPL(ATTENTION_EXT, CompositeExplicitAutograd, m) {
    m.impl("scratch", BOX(&scratch));
    m.impl("size", BOX(&size));
    m.impl("simd_name", BOX(&simd_name));
    m.impl("uses_amx", BOX(&uses_amx));
    m.impl("fma_peak", BOX(&fma_peak));
    m.impl("amx_peak", BOX(&amx_peak));
    m.impl("fma_latency", BOX(&fma_latency));
    m.impl("read_bandwidth", BOX(&read_bandwidth));
}
