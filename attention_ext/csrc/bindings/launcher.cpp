// Part 4 on CUDA as PyTorch's operators attention_ext_cuda::flash, _with_lse, _ruled and _backward.
//
// Python chooses and compiles a Plan for new sizes, which is kept. Nothing waits for the GPU, and all memory
// comes from PyTorch's allocator, so a CUDA graph can capture a call. The first call opens the driver and
// PyTorch's CUDA functions.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/boundary.h"
#include "cuda/arguments.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device that the operator is registered for; a test has none but the CPU.
#ifndef LAUNCHER_DEVICE
#define LAUNCHER_DEVICE CUDA
#endif

namespace {

// Of cuda.h
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};
struct LaunchAttribute {
    int id;
    alignas(8) int value;
    char others[60];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned attribute_count;
};
constexpr int FLOAT16 = 6, BFLOAT16 = 9;              // CU_TENSOR_MAP_DATA_TYPE_
constexpr int SWIZZLE_64B = 2, SWIZZLE_128B = 3;      // CU_TENSOR_MAP_SWIZZLE_
constexpr int L2_256B = 3;                            // CU_TENSOR_MAP_L2_PROMOTION_
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;  // CU_LAUNCH_ATTRIBUTE_

// A function of a library, found when it is converted to its type.
struct Found {
    void* address;

    Found(void* library, const char* name) : address(dlsym(library, name)) {
        REQUIRE(address, name, " is missing: ", dlerror());
    }
    template <class Function> operator Function*() const { return reinterpret_cast<Function*>(address); }
};

void* opened(const char* name) {
    void* library = dlopen(name, RTLD_LAZY);
    REQUIRE(library, name, " cannot be loaded: ", dlerror());
    return library;
}

// The functions of the libraries that are opened.
struct Libraries {
    void* const driver = opened("libcuda.so.1");
    int (*error_string)(int, const char**) = Found(driver, "cuGetErrorString");
    int (*device)(int*, int index) = Found(driver, "cuDeviceGet");
    int (*retain_context)(void**, int device) = Found(driver, "cuDevicePrimaryCtxRetain");
    int (*current_context)(void**) = Found(driver, "cuCtxGetCurrent");
    int (*set_context)(void*) = Found(driver, "cuCtxSetCurrent");
    int (*encode)(TensorMap*, int type, uint32_t rank, const void* address, const uint64_t* size,
                  const uint64_t* stride, const uint32_t* box, const uint32_t* step, int interleave,
                  int swizzle, int l2, int fill) = Found(driver, "cuTensorMapEncodeTiled");
    int (*launch)(const LaunchConfig*, void* function, void** parameters,
                  void** extra) = Found(driver, "cuLaunchKernelEx");
    int (*fill)(void* at, unsigned value, size_t count, void* stream) = Found(driver, "cuMemsetD32Async");

    void* const pytorch = opened("libtorch_cuda.so");
    int32_t (*current_stream)(int32_t index, void**) = Found(pytorch, "aoti_torch_get_current_cuda_stream");
    int32_t (*create_guard)(int32_t index, void**) = Found(pytorch, "aoti_torch_create_cuda_guard");
    int32_t (*delete_guard)(void*) = Found(pytorch, "aoti_torch_delete_cuda_guard");

    void check(int error) const {
        if (error == 0) return;
        const char* text = nullptr;
        error_string(error, &text);
        REQUIRE(false, "the CUDA driver failed: ", text ? text : "unknown error");
    }
};

const Libraries& libraries() {
    static const Libraries libraries;
    return libraries;
}

// Makes a device PyTorch's current one, and its context this thread's, until the end of the scope.
class OnDevice {
  public:
    explicit OnDevice(int32_t index) {
        const Libraries& cuda = libraries();
        REQUIRE(cuda.create_guard(index, &guard_) == 0, "device ", index, " cannot be used");
        void* context = nullptr;
        cuda.check(cuda.current_context(&context));
        if (context) return;
        int device = 0;  // a new thread has no context before PyTorch launches something there
        cuda.check(cuda.device(&device, index));
        cuda.check(cuda.retain_context(&context, device));
        cuda.check(cuda.set_context(context));
    }
    ~OnDevice() {
        if (guard_) libraries().delete_guard(guard_);
    }
    OnDevice(const OnDevice&) = delete;

  private:
    void* guard_ = nullptr;
};

// How a call is launched. Its Python side is in attention_ext/cuda/launches.py.
struct Launch {
    void* function;  // the driver's
    uint64_t blocks;
    uint32_t x, y, shared;  // threads of a block, bytes of its shared memory
    int32_t early;          // once the launch before allows it (programmatic dependent launch)
};
struct Plan {
    Launch launches[3];
    int32_t count, repeats;  // launches; how often all of them are repeated
    int32_t number, step;    // an argument, and what it grows by in a repetition
    int64_t scratch;         // floats; with tensor maps they are cleared
    int32_t width, vectors;  // numbers of a row with its padding; whether rows begin at multiples of 16 bytes
    int32_t br, bc, box;     // box: columns that the copy engine takes at once; 0: no tensor maps
};

constexpr char GRADIENT[] = "backward", DOCUMENT_KERNEL[] = "documents";  // of cuda/kernels.py

struct Sizes {
    int device, format;              // FORMAT of cuda/call.h
    int64_t B, H, Nq, Nk, d, group;  // group: heads of q for one of k and v
    std::string kernel;
    int causal = 0, rules = 0;  // RULES of cuda/arguments.h
    int64_t seen = 0;           // keys that a head's queries may see
    int64_t score_mod = 0;      // the address of a user's change of scores, for rules.py's ScoreMod.known

    auto all() const {
        return std::tie(Nq, Nk, d, B, H, format, device, kernel, group, causal, rules, seen, score_mod);
    }
    bool operator<(const Sizes& other) const { return all() < other.all(); }
};

// What failed in this thread's last call; attention_ext/cuda/operators.py reads the numbers here.
enum Failure : int64_t { NONE = 0, PLANNING = 1, MEMORY = 2 };
thread_local Failure failure = NONE;

int64_t last_failure() { return std::exchange(failure, NONE); }

// Fills in the plan and returns true, or writes why there is none.
constexpr size_t MOST_TEXT = 1024;
using Planner = bool(const char* kernel, int format, int device, int causal, int rules, int64_t heads,
                     int64_t group, int64_t Nq, int64_t Nk, int64_t seen, int64_t d, int64_t score_mod, Plan*,
                     char* why);
Planner* planner = nullptr;

// Returns the size of a Plan, which Python compares.
int64_t plan_by(int64_t function) {
    planner = reinterpret_cast<Planner*>(function);
    return sizeof(Plan);
}

Plan plan_for(const Sizes& sizes) {
    constexpr size_t MOST_PLANS = 1 << 14;
    static std::map<Sizes, Plan> known;
    static std::mutex mutex;
    {
        const std::lock_guard<std::mutex> held(mutex);
        if (const auto found = known.find(sizes); found != known.end()) return found->second;
    }
    // Without the lock: whoever waits for it may hold Python's.
    REQUIRE(planner, "attention_ext.cuda.operators must be loaded first");
    Plan plan{};
    char why[MOST_TEXT] = "";
    const char* kernel = sizes.kernel.empty() ? nullptr : sizes.kernel.c_str();
    failure = PLANNING;
    REQUIRE(planner(kernel, sizes.format, sizes.device, sizes.causal, sizes.rules, sizes.B * sizes.H,
                    sizes.group, sizes.Nq, sizes.Nk, sizes.seen, sizes.d, sizes.score_mod, &plan, why),
            why);
    failure = NONE;
    const std::lock_guard<std::mutex> held(mutex);
    if (known.size() >= MOST_PLANS) known.clear();
    known.emplace(sizes, plan);
    return plan;
}

// new_tensor() beside another.
template <size_t n> Tensor on_device(const int64_t (&size)[n], ScalarType type, const Tensor& beside) {
    failure = MEMORY;
    const Tensor made = new_tensor(size, type, &beside);
    failure = NONE;
    return made;
}

// A tensor (B, H, N, d) as a kernel reads it.
struct Matrices {
    Tensor tensor;
    const void* data;
    Strides strides;
};

// The tensor itself, or a copy whose rows are padded and aligned.
Matrices laid_out(const Tensor& t, const Plan& plan) {
    constexpr uintptr_t ALIGNMENT = 16;  // bytes of a vector load
    const int bytes = t.scalar_type() == ScalarType::Float ? 4 : 2;
    const auto size = t.sizes(), stride = t.strides();
    const void* data = t.const_data_ptr();
    bool fits = size[3] == plan.width && (stride[3] == 1 || size[3] == 1);
    if (plan.vectors) {
        fits = fits && reinterpret_cast<uintptr_t>(data) % ALIGNMENT == 0;
        for (int i = 0; i < 3; i++) fits = fits && (size[i] == 1 || stride[i] * bytes % ALIGNMENT == 0);
        fits = fits && (stride[2] > 0 || size[2] == 1);  // a tensor map cannot repeat a row
    }
    if (fits) return {t, data, {stride[0], stride[1], stride[2]}};
    const long long N = size[2], width = plan.width;
    Tensor copy = on_device({size[0], size[1], N, width}, t.scalar_type(), t);
    if (width > size[3]) torch::stable::zero_(copy);
    Tensor without_padding = torch::stable::narrow(copy, 3, 0, size[3]);
    torch::stable::copy_(without_padding, t);
    return {copy, copy.const_data_ptr(), {size[1] * N * width, N * width, width}};
}

// The tensor map of 16-bit matrices whose rows are contiguous, disjoint and aligned.
void encode(TensorMap* map, const Matrices& m, int32_t rows, const Plan& plan) {
    const int type = m.tensor.scalar_type() == ScalarType::BFloat16 ? BFLOAT16 : FLOAT16;
    const auto size = m.tensor.sizes();
    const Strides& s = m.strides;
    // A dimension of stride 0 has one entry. The stride of such a dimension is not used, but must be valid.
    const auto entries = [](int64_t n, long long stride) { return stride ? static_cast<uint64_t>(n) : 1; };
    const auto bytes = [](int64_t n, long long stride) {
        return n > 1 && stride ? 2 * static_cast<uint64_t>(stride) : 16;
    };
    const uint64_t sizes[] = {static_cast<uint64_t>(plan.width), static_cast<uint64_t>(size[2]),
                              entries(size[1], s.head), entries(size[0], s.batch)};
    const uint64_t strides[] = {bytes(size[2], s.row), bytes(size[1], s.head), bytes(size[0], s.batch)};
    const uint32_t box[] = {static_cast<uint32_t>(plan.box), static_cast<uint32_t>(rows), 1, 1};
    const uint32_t steps[] = {1, 1, 1, 1};
    const int swizzle = plan.box == 64 ? SWIZZLE_128B : SWIZZLE_64B;
    const Libraries& cuda = libraries();
    cuda.check(cuda.encode(map, type, 4, m.data, sizes, strides, box, steps, 0, swizzle, L2_256B, 0));
}

void launch(const Launch& of, void** parameters, void* stream) {
    static const LaunchAttribute early{PROGRAMMATIC_STREAM_SERIALIZATION, 1, {}};
    REQUIRE(of.blocks <= INT_MAX, "the call takes ", of.blocks, " blocks; a launch has at most 2^31 - 1");
    LaunchConfig config{
        {static_cast<unsigned>(of.blocks), 1, 1}, {of.x, of.y, 1}, of.shared, stream, nullptr, 0};
    if (of.early) config.attributes = &early, config.attribute_count = 1;
    libraries().check(libraries().launch(&config, of.function, parameters, nullptr));
}

void* stream_of(const Sizes& s) {
    void* stream = nullptr;
    REQUIRE(libraries().current_stream(s.device, &stream) == 0, "PyTorch has no current stream");
    return stream;
}

// The rules of a call as attention_ext/rules.py lists them, which gives the build RULE_FIELDS and RULE_TYPES.
struct Given {
    RULE_FIELDS
    std::optional<Tensor> found = {};  // the memory of extents that are not given

    // A tensor's address; throws unless it has this type and shape, and is contiguous on q's device.
    template <class Number>
    static const Number* data(const std::optional<Tensor>& t, const Tensor& q, const char* name,
                              ScalarType type, std::initializer_list<int64_t> shape) {
        if (!t) return nullptr;
        REQUIRE(t->is_cuda() == q.is_cuda() && t->get_device_index() == q.get_device_index() &&
                    t->scalar_type() == type && t->is_contiguous() && has_shape(*t, shape),
                name, " has another device, type, shape or strides than it must have");
        return static_cast<const Number*>(t->const_data_ptr());
    }

    // The rules, with extents of documents that are found by a launch, unless they are given.
    Rules of(const Tensor& q, const Sizes& s) {
        constexpr double LOG2E = 1.44269504088896340736;
        REQUIRE(left >= 0 && right >= 0, "a window's sides must be at least 0");
        REQUIRE(!documents || s.Nq <= s.Nk, "documents need as many keys as queries");
        const auto* const numbers = data<long long>(documents, q, "documents", ScalarType::Long, {s.B, s.Nk});
        const int64_t rows = extents && extents->dim() == 3 ? extents->size(1) : 1 + s.Nk;
        REQUIRE(!documents || (rows > s.Nq && rows <= 1 + s.Nk), "extents have ", rows, " rows");
        Rules rules{data<float>(alibi_slopes, q, "alibi_slopes", ScalarType::Float, {s.B, s.H}),
                    data<float>(sinks, q, "sinks", ScalarType::Float, {s.H}), numbers,
                    data<int2>(extents, q, "extents", ScalarType::Int, {s.B, rows, 2})};
        if (documents && !extents) rules.extents = find_extents(numbers, s);
        rules.extent_rows = documents ? static_cast<int>(rows) : 0;
        // No limit is as far as any key: NVRTC makes the kernels' comparison a difference, which must not
        // overflow.
        rules.left = static_cast<int>(std::min(left, s.Nk));
        rules.right = s.causal ? 0 : static_cast<int>(std::min(right, s.Nq));
        rules.group = static_cast<int>(s.group);
        rules.softcap = static_cast<float>(softcap * LOG2E);
        rules.softcap_below = static_cast<float>(1 / (softcap * LOG2E));
        if (!bias) return rules;
        const auto of = bias->sizes(), stride = bias->strides();
        const auto wide = [](int64_t n, int64_t all) { return n == 1 || n == all; };
        REQUIRE(of.size() == 4 && wide(of[0], s.B) && wide(of[1], s.H) && of[2] == s.Nq && of[3] == s.Nk &&
                    (stride[3] == 1 || s.Nk == 1) && bias->get_device_index() == s.device,
                "bias must be (B or 1, H or 1, Nq, Nk) on q's device, its rows contiguous");
        rules.bias = bias->const_data_ptr();
        rules.bias_strides = {of[0] == 1 ? 0 : stride[0], of[1] == 1 ? 0 : stride[1], stride[2]};
        return rules;
    }

  private:
    const int2* find_extents(const long long* numbers, const Sizes& s) {
        const Plan plan = plan_for({s.device, 0, s.B, 1, s.Nk, s.Nk, 1, 1, DOCUMENT_KERNEL, 0, 0, s.Nk});
        found = on_device({plan.scratch}, ScalarType::Float, *documents);
        void *extents = found->mutable_data_ptr(), *const stream = stream_of(s);
        libraries().check(libraries().fill(extents, 0, plan.scratch, stream));
        int Nk = static_cast<int>(s.Nk);
        void* parameters[] = {&numbers, &extents, &Nk};
        launch(plan.launches[0], parameters, stream);
        return static_cast<const int2*>(extents);
    }
};

// Throws unless the tensors fit each other. The planner checks the sizes.
Sizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, const Given* given) {
    failure = NONE;
    const ScalarType type = q.scalar_type();
    REQUIRE(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
            "q must be float32, bfloat16 or float16");
    const int device = q.get_device_index();
    for (const Tensor* t : {&q, &k, &v}) {
        REQUIRE(t->is_cuda() == q.is_cuda() && t->get_device_index() == device && t->scalar_type() == type,
                "q, k and v must have one dtype and be on one device");
        REQUIRE(t->dim() == 4, "q, k and v must be (B, H, N, d)");
        for (const int64_t n : t->sizes()) REQUIRE(n >= 1, "q, k and v must have no empty dimension");
    }
    const auto s = q.sizes(), of_k = k.sizes();
    const int64_t Hk = given ? of_k[1] : s[1];
    for (const Tensor* t : {&k, &v})
        REQUIRE(s[1] % Hk == 0 && has_shape(*t, {s[0], Hk, of_k[2], s[3]}),
                "k and v must be (B, H, Nk, d), as q is");
    REQUIRE(!causal || s[2] <= of_k[2], "q has more rows than k; with causal it must not");
    const int format = type == ScalarType::Float ? 0 : type == ScalarType::BFloat16 ? 1 : 2;
    Sizes sizes{device, format, s[0], s[1], s[2], of_k[2], s[3], s[1] / Hk};
    sizes.seen = sizes.Nk;
    sizes.causal = causal;
    if (given) {
        sizes.rules = RULED + SOFTCAP * (given->softcap != 0) + ALIBI * given->alibi_slopes.has_value() +
                      DOCUMENTS * given->documents.has_value() + MODIFIED * given->score_mod.has_value();
        if (given->bias) {
            const bool hides = given->bias->scalar_type() == ScalarType::Bool;
            REQUIRE(hides || given->bias->scalar_type() == ScalarType::Float, "bias must be float32 or bool");
            sizes.rules += hides ? BIAS_HIDES : BIAS_ADDS;
        }
        sizes.score_mod = given->score_mod.value_or(0);
        sizes.seen = std::min(sizes.Nk, given->left + sizes.Nq + (causal ? 0 : given->right));
    }
    return sizes;
}

Call call_of(const Sizes& s, const Matrices& q, const Matrices& k, const Matrices& v, const Matrices& out,
             std::optional<double> scale, Given* given) {
    constexpr double LN2 = 0.693147180559945309417;
    const double factor = scale ? *scale : 1 / std::sqrt(static_cast<double>(s.d));
    Call call{};
    call.q = q.data;
    call.k = k.data;
    call.v = v.data;
    call.out = const_cast<void*>(out.data);
    call.q_strides = q.strides;
    call.k_strides = k.strides;
    call.v_strides = v.strides;
    call.out_strides = out.strides;
    call.batches = static_cast<int>(s.B);
    call.heads = static_cast<int>(s.H);
    call.Nq = static_cast<int>(s.Nq);
    call.Nk = static_cast<int>(s.Nk);
    call.causal = s.causal;
    call.scale = static_cast<float>(factor / LN2);
    if (given) {
        call.rules = given->of(q.tensor, s);
        call.causal = call.rules.right < s.Nq && call.rules.left >= s.Nk;  // later queries see more
    }
    return call;
}

// Whether q lies as (B, Nq, H, d), as models and flash-attn have it. attention_ext/cuda/operators.py says it
// too.
bool heads_beside(const Tensor& q) {
    int64_t dense = 1;
    for (const int i : {3, 1, 2, 0}) {
        if (q.size(i) != 1 && q.stride(i) != dense) return false;
        dense *= q.size(i);
    }
    return !q.is_contiguous();
}

// (B, H, Nq, width); contiguous as (B, Nq, H, width) if `beside`.
Tensor new_out(const Sizes& s, int64_t width, bool beside, const Tensor& q) {
    if (!beside) return on_device({s.B, s.H, s.Nq, width}, q.scalar_type(), q);
    return torch::stable::transpose(on_device({s.B, s.Nq, s.H, width}, q.scalar_type(), q), 1, 2);
}

// Without the padding of its rows.
Tensor narrowed(Tensor t, const Sizes& s) {
    return t.size(3) == s.d ? t : torch::stable::contiguous(torch::stable::narrow(t, 3, 0, s.d));
}

// out (B, H, Nq, d), contiguous; with lse also (B, H, Nq). No kernel: the fastest, and q with its heads beside
// each other gives such an out. No scale: 1 / sqrt(d).
Tensor attend(const Tensor& q_, const Tensor& k_, const Tensor& v_, bool causal, std::optional<double> scale,
              const std::optional<std::string>& kernel, std::optional<Tensor>* lse = nullptr,
              Given* given = nullptr) {
    Sizes s = sizes_of(q_, k_, v_, causal, given);
    REQUIRE(!kernel || !kernel->empty(), "kernel must be a name");
    if (kernel && kernel->rfind(GRADIENT, 0) != 0) s.kernel = *kernel;  // or the backward pass's
    const OnDevice current(s.device);
    const Plan plan = plan_for(s);
    const Matrices q = laid_out(q_, plan), k = laid_out(k_, plan), v = laid_out(v_, plan);
    const bool beside = !kernel && heads_beside(q_);
    Tensor out = new_out(s, plan.width, beside && plan.box, q_);
    if (lse) *lse = on_device({s.B, s.H, s.Nq}, ScalarType::Float, q_);
    std::optional<Tensor> held;
    if (plan.scratch) held = on_device({plan.scratch}, ScalarType::Float, q_);

    const Matrices made{out, out.mutable_data_ptr(), {out.stride(0), out.stride(1), out.stride(2)}};
    Call call = call_of(s, q, k, v, made, scale, given);
    call.lse = lse ? static_cast<float*>((*lse)->mutable_data_ptr()) : nullptr;
    void* scratch = held ? held->mutable_data_ptr() : nullptr;
    int number = plan.number;
    const Matrices* const inputs[] = {&q, &k, &v};
    TensorMap maps[3];
    void *with_maps[] = {&maps[0], &maps[1], &maps[2], &call, &scratch},
         *without[] = {&call, &scratch, &number};
    for (int i = 0; plan.box && i < 3; i++) encode(&maps[i], *inputs[i], i == 0 ? plan.br : plan.bc, plan);
    void* const stream = stream_of(s);
    if (plan.box && plan.scratch) libraries().check(libraries().fill(scratch, 0, plan.scratch, stream));
    for (int i = 0; i < plan.repeats; i++, number += plan.step)
        for (int j = 0; j < plan.count; j++) launch(plan.launches[j], plan.box ? with_maps : without, stream);
    if (beside && (!plan.box || plan.width != s.d)) {
        Tensor turned = new_out(s, s.d, true, q_);
        torch::stable::copy_(turned, torch::stable::narrow(out, 3, 0, s.d));
        return turned;
    }
    return narrowed(out, s);
}

Tensor flash(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::optional<double> scale,
             std::optional<std::string> kernel) {
    return attend(q, k, v, causal, scale, kernel);
}

std::tuple<Tensor, Tensor> flash_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                          std::optional<double> scale, std::optional<std::string> kernel) {
    std::optional<Tensor> lse;
    const Tensor out = attend(q, k, v, causal, scale, kernel, &lse);
    return {out, *lse};
}

// With rules, and perhaps fewer heads of k and v.
template <class... Rule>
std::tuple<Tensor, Tensor> flash_ruled(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                                       std::optional<double> scale, std::optional<std::string> kernel,
                                       Rule... rules) {
    Given given{rules...};
    std::optional<Tensor> lse;
    const Tensor out = attend(q, k, v, causal, scale, kernel, &lse, &given);
    return {out, *lse};
}

// The gradients of q, k, v and, if of_bias, of a bias for all batches and heads. out, lse: what the forward
// pass gave; left: of a window, -1 without rules.
template <class... Rule>
std::tuple<Tensor, Tensor, Tensor, Tensor> flash_backward(const Tensor& dout_, std::optional<Tensor> dlse,
                                                          const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                                          const Tensor& out_, const Tensor& lse, bool causal,
                                                          std::optional<double> scale,
                                                          std::optional<std::string> kernel, bool of_bias,
                                                          Rule... rules) {
    Given all{rules...};
    all.extents.reset();  // they may be those of the queries alone
    Given* const given = all.left < 0 ? nullptr : &all;
    Sizes s = sizes_of(q_, k_, v_, causal, given);
    for (const Tensor* t : {&dout_, &out_})
        REQUIRE(sizes_of(*t, k_, v_, causal, given).all() == s.all(), "dout and out must be as q is");
    s.seen = s.Nk;
    s.kernel = kernel.value_or(GRADIENT);
    REQUIRE(!of_bias || s.rules & BIAS_ADDS, "of_bias is given; bias must be float32");
    if (of_bias) s.rules += BIAS_GRADIENT;
    if (dlse) dlse = torch::stable::contiguous(*dlse);
    const OnDevice current(s.device);
    const Plan plan = plan_for(s);
    const Matrices q = laid_out(q_, plan), k = laid_out(k_, plan), v = laid_out(v_, plan),
                   dout = laid_out(dout_, plan), out = laid_out(out_, plan);
    const auto like = [&](const Matrices& m) {
        return on_device({s.B, m.tensor.size(1), m.tensor.size(2), plan.width}, q_.scalar_type(), q_);
    };
    Tensor dq = like(q), dk = like(k), dv = like(v), rows = on_device({plan.scratch}, ScalarType::Float, q_);
    Tensor dbias = of_bias ? on_device({s.B, s.H, s.Nq, s.Nk}, ScalarType::Float, q_)
                           : on_device({0}, ScalarType::Float, q_);
    if (of_bias) torch::stable::zero_(dbias);

    Call call = call_of(s, q, k, v, out, scale, given);
    const auto data = [&](const std::optional<Tensor>& t, const char* name) {
        return Given::data<float>(t, q_, name, ScalarType::Float, {s.B, s.H, s.Nq});
    };
    call.lse = const_cast<float*>(data(lse, "lse"));
    Gradients to{dout.data,
                 dout.strides,
                 data(dlse, "dlse"),
                 static_cast<float2*>(rows.mutable_data_ptr()),
                 dq.mutable_data_ptr(),
                 dk.mutable_data_ptr(),
                 dv.mutable_data_ptr(),
                 of_bias ? static_cast<float*>(dbias.mutable_data_ptr()) : nullptr};
    const Matrices* const inputs[] = {&q, &k, &v, &dout};
    TensorMap maps[4];
    void *parameters[] = {&call, &to, &maps[0], &maps[1], &maps[2], &maps[3]}, *const stream = stream_of(s);
    for (int i = 0; plan.box && i < 4; i++) encode(&maps[i], *inputs[i], plan.br, plan);
    for (int i = 0; i < plan.count; i++) launch(plan.launches[i], parameters, stream);
    return {narrowed(dq, s), narrowed(dk, s), narrowed(dv, s), dbias};
}

}  // namespace

STABLE_TORCH_LIBRARY(attention_ext_cuda, m) {
    // torch.compile's code has arguments `kernel` of its own
    const std::string arguments = "(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str? name";
    const std::string rules = ", " RULE_SCHEMA ")";
    m.def(("flash" + arguments + "=None) -> Tensor").c_str());
    for (const char* name : {"flash_with_lse", "flash_with_gradient"})
        m.def((name + arguments + "=None) -> (Tensor, Tensor)").c_str());
    for (const char* name : {"flash_ruled", "flash_ruled_with_gradient"})
        m.def((name + arguments + rules + " -> (Tensor, Tensor)").c_str());
    m.def(("flash_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
           "bool causal, float? scale, str? name, bool of_bias" +
           rules + " -> (Tensor, Tensor, Tensor, Tensor)")
              .c_str());
    m.def("plan_by(int function) -> int");
    m.def("last_failure() -> int");
}

#define LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
LIBRARY_IMPL(attention_ext_cuda, LAUNCHER_DEVICE, m) {
    m.impl("flash", BOX(&flash));
    m.impl("flash_with_lse", BOX(&flash_with_lse));
    m.impl("flash_with_gradient", BOX(&flash_with_lse));
    m.impl("flash_ruled", BOX((&flash_ruled<RULE_TYPES>)));
    m.impl("flash_ruled_with_gradient", BOX((&flash_ruled<RULE_TYPES>)));
    m.impl("flash_backward", BOX((&flash_backward<RULE_TYPES>)));
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext_cuda, CompositeExplicitAutograd, m) {
    m.impl("plan_by", BOX(&plan_by));
    m.impl("last_failure", BOX(&last_failure));
}
