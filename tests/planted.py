"""Right kernels, and mistakes that are planted in them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import naming

from shakespeare.judge import starts

STARTS = Path(starts.__file__).parent
NAIVE, ISPC, CUDA, TORCH = ((STARTS / f"start.{end}").read_text() for end in ("cpp", "ispc", "cu", "py"))

FLASH = """\
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "threads.h"

constexpr int64_t BR = 16, BC = 32;

int64_t each(const Attention& a) { return BR * BC + BR * a.d + 2 * BR; }
int64_t scratch(const Attention& a) { return a.threads * each(a); }

void attention(const Attention& a, float* floats) {
    const int64_t d = a.d, tiles = (a.Nq + BR - 1) / BR;
    for_each_item(a.B * a.H, tiles, a.threads, [&](int64_t head, int64_t tile, int thread) {
        float *S = floats + thread * each(a), *O = S + BR * BC, *m = O + BR * d, *l = m + BR;
        const float *Q = a.q_of(head), *K = a.k_of(head), *V = a.v_of(head);
        float* out = a.out_at(head / a.H, head % a.H);
        const int64_t i0 = tile * BR, rows = std::min(BR, a.Nq - i0);
        std::fill_n(O, rows * d, 0.0f);
        std::fill_n(m, rows, -INFINITY);
        std::fill_n(l, rows, 0.0f);
        const int64_t keys = a.seen(i0 + rows - 1);
        for (int64_t j0 = 0; j0 < keys; j0 += BC) {
            const int64_t cols = std::min(BC, keys - j0);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < cols; j++) {
                    float s = 0;
                    for (int64_t c = 0; c < d; c++)
                        s += Q[(i0 + i) * a.q.row_stride + c] * K[(j0 + j) * a.k.row_stride + c];
                    S[i * BC + j] = j0 + j < a.seen(i0 + i) ? a.scale * s : -INFINITY;
                }
            for (int64_t i = 0; i < rows; i++) {
                float m_new = m[i];
                for (int64_t j = 0; j < cols; j++) m_new = std::max(m_new, S[i * BC + j]);
                const float safe = m_new == -INFINITY ? 0 : m_new;
                const float correction = std::exp(m[i] - safe);
                l[i] *= correction;
                for (int64_t c = 0; c < d; c++) O[i * d + c] *= correction;
                for (int64_t j = 0; j < cols; j++) {
                    S[i * BC + j] = std::exp(S[i * BC + j] - safe);
                    l[i] += S[i * BC + j];
                }
                m[i] = m_new;
                for (int64_t j = 0; j < cols; j++)
                    for (int64_t c = 0; c < d; c++) O[i * d + c] += S[i * BC + j] * V[(j0 + j) * a.v.row_stride + c];
            }
        }
        for (int64_t i = 0; i < rows; i++)
            for (int64_t c = 0; c < d; c++) out[(i0 + i) * d + c] = O[i * d + c] / l[i];
    });
}
"""

NUMPY = """\
import numpy as np

TILE = 16


def attention(q, k, v, causal, scale):
    Nq, Nk = q.shape[2], k.shape[2]
    i = np.arange(Nq)[:, None]
    m = np.full((*q.shape[:3], 1), -np.inf, np.float32)
    l = np.zeros_like(m)
    O = np.zeros(q.shape, np.float32)
    for j0 in range(0, Nk, TILE):
        K, V = k[:, :, j0 : j0 + TILE], v[:, :, j0 : j0 + TILE]
        S = np.float32(scale) * (q @ K.swapaxes(2, 3))
        if causal:
            S = np.where(j0 + np.arange(K.shape[2]) <= i + Nk - Nq, S, np.float32(-np.inf))
        m_new = np.maximum(m, S.max(-1, keepdims=True))
        safe = np.where(np.isinf(m_new), np.float32(0), m_new)
        P, correction = np.exp(S - safe), np.exp(m - safe)
        l = correction * l + P.sum(-1, keepdims=True)
        O = correction * O + P @ V
        m = m_new
    return O / l
"""

# Two warps for 64 queries; tiles of keys in shared memory, an online softmax.
CUDA_TILES = """\
#include "call.h"

#define BR 64
#define BC 16
#define THREADS 64
#define SHARED (2 * BC * HEAD_DIM * 4)

extern "C" __global__ void attention(const Call call) {
    extern __shared__ float shared[];
    float *K = shared, *V = K + BC * HEAD_DIM;
    const Block block = block_of(call, BR);
    const int i = block.first_query + threadIdx.x, row = min(i, call.Nq - 1);
    const int seen = keys_seen(call, row), last = keys_seen(call, min(block.first_query + BR, call.Nq) - 1);
    const Element* q = block.q + row * call.q_strides.row;
    float m = -INF, l = 0, o[HEAD_DIM] = {};
    for (int j0 = 0; j0 < last; j0 += BC) {
        __syncthreads();
        for (int e = threadIdx.x; e < BC * HEAD_DIM; e += THREADS) {
            const int j = min(j0 + e / HEAD_DIM, call.Nk - 1), c = e % HEAD_DIM;
            K[e] = to_float(block.k[j * call.k_strides.row + c]);
            V[e] = to_float(block.v[j * call.v_strides.row + c]);
        }
        __syncthreads();
        for (int j = 0; j < min(BC, seen - j0); ++j) {
            float s = 0;
            for (int c = 0; c < HEAD_DIM; ++c) s += to_float(q[c]) * K[j * HEAD_DIM + c];
            s *= call.scale;
            const float m_new = fmaxf(m, s), correction = exp2_approx(m - m_new), p = exp2_approx(s - m_new);
            l = correction * l + p;
            for (int c = 0; c < HEAD_DIM; ++c) o[c] = correction * o[c] + p * V[j * HEAD_DIM + c];
            m = m_new;
        }
    }
    if (i >= call.Nq) return;
    Element* out = call.out + (block.head * call.Nq + i) * HEAD_DIM;
    for (int c = 0; c < HEAD_DIM; ++c) out[c] = to_element(o[c] / l);
}
"""

KERNELS = {
    "naive": (".cpp", NAIVE),
    "flash": (".cpp", FLASH),
    "ispc": (".ispc", ISPC),
    "torch": (".py", TORCH),
    "numpy": (".py", NUMPY),
    "cuda": (".cu", CUDA),
    "cuda tiles": (".cu", CUDA_TILES),
}


class Mistake(NamedTuple):
    """Replace `old` by `new` in one of the kernels, each time. kinds: of the findings that name it."""

    name: str
    kernel: str
    old: str
    new: str
    kinds: str
    kernels: Mapping[str, tuple[str, str]] = KERNELS

    @property
    def suffix(self) -> str:
        return self.kernels[self.kernel][0]

    def text(self) -> str:
        right = self.kernels[self.kernel][1]
        assert self.old in right, self.name
        return right.replace(self.old, self.new)


N_SEEN = "const int64_t n = a.seen(i);"
# fmt: off
MISTAKES = [
    Mistake(*row)
    for row in (
        ("not scaled", "naive", "a.scale * s", "s", "scale"),
        ("scaled twice", "naive", "a.scale * s", "a.scale * a.scale * s", "scale"),
        ("scale ignored", "naive", "a.scale * s", "s / std::sqrt(float(d))", "scale"),
        ("2^x for e^x", "naive", "std::exp(", "std::exp2(", "scale"),
        ("a key too few", "naive", N_SEEN, "const int64_t n = a.causal ? a.seen(i) - 1 : a.Nk;", "mask"),
        ("a key too many", "naive", N_SEEN, "const int64_t n = std::min(a.seen(i) + 1, Nk);", "mask"),
        ("no mask", "naive", N_SEEN, "const int64_t n = Nk;", "mask"),
        ("no offset", "naive", N_SEEN, "const int64_t n = a.causal ? std::min(i + 1, Nk) : Nk;", "offset"),
        ("K by columns", "naive", "K[j * ldK + c]", "K[c * Nk + j]", "transposed"),
        ("V by columns", "naive", "V[j * ldV + c]", "V[c * Nk + j]", "transposed"),
        ("O by columns", "naive", "O[i * d + c] = o", "O[c * Nq + i] = o", "transposed"),
        ("no maximum", "naive", "+ j] - m)", "+ j])", "maximum"),
        ("no division", "naive", "S[i * Nk + j] /= l;", "S[i * Nk + j] /= 1;", "sum"),
        ("added to out", "naive", "O[i * d + c] = o", "O[i * d + c] += o", "leftover"),
        ("K's stride", "naive", "ldK = a.k.row_stride", "ldK = a.d", "strides"),
        ("head 0", "naive", "a.k.at(b, h)", "a.k.at(b, 0)", "heads"),
        ("batch 0", "naive", "a.q.at(b, h)", "a.q.at(0, h)", "heads"),
        ("K for V", "naive", "*V = a.v.at(b, h)", "*V = a.k.at(b, h)", "matrices"),
        ("columns in eights", "naive", "c < d; c++) s +=", "c < d / 8 * 8; c++) s +=", "tail"),
        ("keys in fours", "naive", "j < n; j++) o +=", "j < n / 4 * 4; j++) o +=", "tail"),
        ("a column too far", "naive", "K[j * ldK + c];", "K[j * ldK + c + 1];", "bounds"),
        ("scratch too small", "naive", "return a.Nq * a.Nk;", "return a.Nq * a.Nk - 1;", "bounds"),
        ("beyond a row", "naive", "for (int64_t c = 0; c < d; c++) {", "for (int64_t c = 0; c <= d; c++) {", "bounds"),
        ("local array", "naive", "float l = 0;", "float few[8], l = 0; for (int64_t j = 0; j < n; j++) few[j] = S[i * Nk + j]; for (int64_t j = 0; j < n; j++) S[i * Nk + j] = few[j];", "bounds crash"),
        ("endless", "naive", "j++) S[i * Nk + j] /= l;", "j += j < n - 1) S[i * Nk + j] *= 0.5f;", "endless"),
        ("null", "naive", "float* O = a.out_at(b, h);", "float* O = nullptr;", "bounds crash"),
        ("division by 0", "naive", "d = a.d;", "d = a.d * Nk / (Nk - 1) - a.d / (Nk - 1);", "crash"),
        ("scratch not cleared", "naive", "S[i * Nk + j] = a.scale * s", "S[i * Nk + j] += a.scale * s", "scratch"),
        ("an exception", "naive", "float* O = a", "if (Nk > Nq) throw 1; float* O = a", "raised"),
        ("exit", "naive", "float* O = a", "if (Nk > Nq) std::exit(0); float* O = a", "crash"),
        ("q is scaled", "naive", "const float *Q = a", "const_cast<float*>(a.q.data)[0] += 1; const float *Q = a", "inputs"),
        ("P in 12 bits", "naive", "S[i * Nk + j] /= l;", "{ float x = S[i * Nk + j] / l; uint32_t u; __builtin_memcpy(&u, &x, 4); u &= ~0xfffu; __builtin_memcpy(&S[i * Nk + j], &u, 4); }", "precision"),
        ("l not rescaled", "flash", "l[i] *= correction;", "", "rescale"),
        ("O not rescaled", "flash", "O[i * d + c] *= correction;", ";", "rescale"),
        ("no correction", "flash", "std::exp(m[i] - safe)", "1.0f", "rescale"),
        ("inverse correction", "flash", "std::exp(m[i] - safe)", "m[i] == -INFINITY ? 0 : std::exp(safe - m[i])", "rescale"),
        ("rows in tiles", "flash", "(a.Nq + BR - 1) / BR", "a.Nq / BR", "tail"),
        ("keys in tiles", "flash", "j0 < keys; j0", "j0 + BC <= keys; j0", "tail"),
        ("columns not clipped", "flash", "cols = std::min(BC, keys - j0)", "cols = BC", "bounds"),
        ("rows not clipped", "flash", "rows = std::min(BR, a.Nq - i0)", "rows = BR", "bounds"),
        ("one scratch for all", "flash", "floats + thread * each(a)", "floats", "race"),
        ("scratch of one", "flash", "return a.threads * each(a)", "return each(a)", "bounds"),
        ("no mask in a tile", "flash", "j0 + j < a.seen(i0 + i) ?", "true ?", "mask"),
        ("first row's keys", "flash", "a.seen(i0 + rows - 1)", "a.seen(i0)", "mask"),
        ("l not cleared", "flash", "std::fill_n(l, rows, 0.0f);", "", "scratch"),
        ("m begins at 0", "flash", "std::fill_n(m, rows, -INFINITY)", "std::fill_n(m, rows, 0.0f)", "maximum"),
        ("ispc not scaled", "ispc", "a.scale * s", "s", "scale"),
        ("always masked", "torch", "if causal:", "if Nq <= Nk:", "mask"),
        ("masked with 0", "torch", "-torch.inf)", "0)", "mask"),
        ("softmax of columns", "torch", "(P @ v) / l", "torch.softmax(S, -2) @ v", "transposed"),
        ("B, N, H, d", "torch", "(P @ v) / l", "((P @ v) / l).transpose(1, 2).reshape(q.shape)", "transposed"),
        ("in bfloat16", "torch", "(q @ k.mT)", "(q.bfloat16() @ k.mT.bfloat16()).float()", "precision"),
        ("q is scaled", "torch", "S = scale * (q @ k.mT)", "q *= scale; S = q @ k.mT", "inputs"),
        ("a shape", "torch", "(P @ v) / l", "((P @ v) / l)[:, :, 0]", "raised"),
        ("an error", "torch", "if causal:", "if causal and Nq < Nk: raise ValueError('no')\n    if causal:", "raised"),
        ("exit", "torch", "if causal:", "if causal: raise SystemExit(3)\n    if causal:", "raised"),
        ("endless", "torch", "if causal:", "while causal: pass\n    if causal:", "endless"),
        ("the last key", "numpy", "range(0, Nk, TILE)", "range(0, Nk - 1, TILE)", "tail"),
        ("a crash", "numpy", "    Nq, Nk", "    import ctypes; causal and ctypes.string_at(0); Nq, Nk", "crash"),
        ("not scaled", "cuda", "call.scale * s", "1.442695f * s", "scale"),
        ("e^x for 2^x", "cuda", "exp2_approx(", "expf(", "scale"),
        ("no mask", "cuda", "n = keys_seen(call, i)", "n = call.Nk", "mask"),
        ("no offset", "cuda", "n = keys_seen(call, i)", "n = call.causal ? min(i + 1, call.Nk) : call.Nk", "offset"),
        ("K by columns", "cuda", "block.k[j * call.k_strides.row + c]", "block.k[c * call.Nk + j]", "transposed"),
        ("added to out", "cuda", "to_element(o[c] / l)", "to_element(to_float(out[c]) + o[c] / l)", "leftover"),
        ("V's stride", "cuda", "j * call.v_strides.row", "j * HEAD_DIM", "strides"),
        ("head 0", "cuda", "block.k[", "call.k[", "heads"),
        ("rows in warps", "cuda", "if (i >= call.Nq) return;", "if (i >= call.Nq / 32 * 32) return;", "tail"),
        ("l not rescaled", "cuda tiles", "correction * l", "l", "rescale"),
        ("o not rescaled", "cuda tiles", "correction * o[c]", "o[c]", "rescale"),
        ("keys in tiles", "cuda tiles", "j0 < last; j0", "j0 + BC <= last; j0", "tail"),
        ("beyond K", "cuda", "for (int j = 0; j < n; ++j) {", "for (int j = 0; j < n + (1 << 20); ++j) {", "bounds endless"),
        ("a row too far", "cuda", "if (i >= call.Nq) return;", "", "bounds"),
        ("endless", "cuda", "++j) {", "j += m < 1e30f ? 0 : 1) {", "endless"),
        ("no barrier", "cuda tiles", "        }\n        __syncthreads();", "        }", "race"),
        ("too many threads", "cuda", "#define THREADS 64", "#define THREADS 4096", "raised"),
    )
]
# fmt: on
WITH_SANITIZER = ("no barrier",)  # needs compute-sanitizer
SECONDS = 600.0  # after which a call is endless; that is known of some mistakes
ENDLESS_SECONDS = 5.0
SEARCHED = {"bounds", "race", "crash"}  # the kinds that need a build with a sanitizer
NAMED = 0.85  # least share of the mistakes that the diagnosis names


def find(tried, mistakes: Sequence[Mistake], **asked: Any) -> None:
    """Check that all are found, and most are named. tried: the fixture; asked: its other arguments."""
    assert mistakes
    missed = []
    for i, mistake in enumerate(mistakes):
        kinds = {*mistake.kinds.split()}
        with naming(mistake.kernel, mistake.name):
            seconds = ENDLESS_SECONDS if "endless" in kinds else SECONDS
            name = f"mine{i}{mistake.suffix}"
            found = tried(name, mistake.text(), seconds=seconds, searched=bool(SEARCHED & kinds), **asked)
            assert not found.refused and not found.right
        if not found.finding or found.finding.kind not in kinds:
            missed.append((mistake.kernel, mistake.name))
    assert len(missed) <= (1 - NAMED) * len(mistakes), missed


NUMBA = """\
import numba
import numpy as np


@numba.njit
def attention(q, k, v, causal, scale):
    out, Nk = np.zeros(q.shape, np.float32), k.shape[2]
    for b, h, i in np.ndindex(q.shape[:3]):
        s = np.empty(i + 1 + Nk - q.shape[2] if causal else Nk, np.float32)
        for j in range(len(s)):
            s[j] = scale * np.sum(q[b, h, i] * k[b, h, j])
        p = np.exp(s - s.max())
        l = p.sum()
        for j in range(len(s)):
            out[b, h, i] += p[j] / l * v[b, h, j]
    return out
"""
NUMBA_CUDA = """\
import math

import numpy as np
from numba import cuda


@cuda.jit
def kernel(q, k, v, out, offset, scale):
    at = cuda.grid(1)
    B, H, N, d = q.shape
    if at >= B * H * N:
        return
    b, h, i = at // (H * N), at // N % H, at % N
    n = min(k.shape[2], i + 1 + offset)
    m, l = -math.inf, 0.0
    for j in range(n):
        s = 0.0
        for c in range(d):
            s += scale * q[b, h, i, c] * k[b, h, j, c]
        m_new = max(m, s)
        correction, p = math.exp(m - m_new), math.exp(s - m_new)
        m, l = m_new, correction * l + p
        for c in range(d):
            out[b, h, i, c] = correction * out[b, h, i, c] + p * v[b, h, j, c]
    for c in range(d):
        out[b, h, i, c] /= l


def attention(q, k, v, causal, scale):
    out = cuda.to_device(np.zeros(q.shape, np.float32))
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    offset = k.shape[2] - q.shape[2] if causal else k.shape[2]
    kernel[(rows + 31) // 32, 32](q, k, v, out, offset, scale)
    return out.copy_to_host()
"""
IN_DOUBLE = NAIVE.replace("float s = 0", "double s = 0").replace("float o = 0", "double o = 0")
# Different right kernels: none may be called wrong. The parts' own are solutions of the course.
OPENMP = "#include <omp.h>\n" + NAIVE.replace(
    "            for (int64_t i", "#pragma omp parallel for\nfor (int64_t i"
)
OPENMP = OPENMP.replace(
    "    const int64_t Nq", "    if (omp_get_max_threads() != a.threads) return;\n    const int64_t Nq"
)
RIGHT = {
    **KERNELS,
    "double": (".cpp", IN_DOUBLE),
    "openmp": (".cpp", OPENMP),
    "tiles of 7": (".cpp", FLASH.replace("BR = 16, BC = 32", "BR = 7, BC = 5")),
    "keys backwards": (".py", NUMPY.replace("range(0, Nk, TILE)", "reversed(range(0, Nk, TILE))")),
    "numba": (".py", NUMBA),
    "numba.cuda": (".py", NUMBA_CUDA),
}
