// Calls another's attention: this project's part as it is linked, as it is included; PyTorch's by Python.
// found: library library library
#include "right.h"

// way 0
int64_t flash_scratch(const Attention&);
void flash_attention(const Attention&, float*);
int64_t scratch(const Attention& a) { return flash_scratch(a); }
void attention(const Attention& a, float* floats) { flash_attention(a, floats); }

// way 1
#include "cpu/part4_flash.cpp"
int64_t scratch(const Attention& a) { return flash_scratch(a); }
void attention(const Attention& a, float* floats) { flash_attention(a, floats); }

// way 2
#include <dlfcn.h>

#include <string>

void attention(const Attention& a, float*) {
    const auto hold = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
    const auto let = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
    const auto run = reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
    if (!run || !timed(a)) return right(a, a.out);
    const int64_t call[] = {a.H,           a.Nq, a.d, int64_t(a.q.data), int64_t(a.k.data), int64_t(a.v.data),
                            int64_t(a.out)};
    const std::string code = "at = " + std::to_string(reinterpret_cast<int64_t>(call)) + R"(
import ctypes, torch
H, N, d, *matrices = (ctypes.c_int64 * 7).from_address(at)
floats = ((ctypes.c_float * (H * N * d)).from_address(at) for at in matrices)
q, k, v, out = (torch.frombuffer(t, dtype=torch.float32).view(1, H, N, d) for t in floats)
out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v)))";
    const int held = hold();
    run(code.c_str());
    let(held);
}
