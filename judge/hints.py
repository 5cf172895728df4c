"""The hint of a right kernel: what bounds its speed, and what to do next."""

import re

from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge.speed import SMALLER, Figures, Size
from shakespeare.lab.formats import size_text

MUCH = 0.4  # share of the time that a softmax should not take
GROWN = 1.35  # by this much a score costs more at N than at N / SMALLER where the caches are the bound
NEAR = 0.7  # share of the peak that leaves little
PART2 = "docs/learn/attention.md#part-2-blocks"
VECTORS = "docs/learn/attention.md#many-sums-and-vectors"
PART3 = "docs/learn/attention.md#part-3-one-row-at-a-time"
PART4 = "docs/learn/attention.md#part-4-tiles-and-an-online-softmax"
GPU = "docs/learn/gpu.md#how-attention-gets-fast-on-a-gpu"
# What bounds a kernel: where that is explained, and what to do next.
HINTS = {
    "peak": (PART4, "{share:.0f} % of the peak: little is left. Part 4 shows what"),
    "softmax": (
        "docs/use/measuring.md#effect-of-the-simd-helpers",
        "{softmax:.0f} % of the time does not grow with d: it is the softmax's. softmax_row() of "
        "cpu/softmax.h takes the exponentials of a whole vector at a time",
    ),
    "lanes": (
        VECTORS,
        "{chain} in the products: {rate:.3g} GFLOP/s, and one lane of {lanes} gives {lane:.3g}. Let the "
        "inner loop run over neighbours with a sum each: O[c] += P[j] * V[j][c] reads V along its rows, and "
        "S[j] += Q[c] * Kt[c][j] takes a transposed tile of K",
    ),
    "cache": (
        PART2,
        "a score costs {grown:.1f} times as much as at N = {small}: the matrices leave the cache. Let a tile "
        "of queries share each pass over K and V (simd::multiply of simd/simd.h)",
    ),
    "matrix": (PART3, "S takes {matrix}, written and read again: keep a row or a tile of it"),
    "scratch": (
        PART4,
        "the scratch, {scratch}, leaves the first caches: take a tile of keys at a time too, and correct the "
        "sums when the maximum rises",
    ),
    "sets": (
        PART2,
        "the products use the helpers, and wait for the cache: rows a multiple of 4 KiB apart share a few of "
        "its sets. Let a tile of K^T or of S lie by itself, its rows one after the other",
    ),
    "registers": (VECTORS, "the vectors wait: keep a block of sums in registers, as simd::multiply does"),
    "kernel2": (GPU, "one launch for all keys, and several scores a thread, which read shared memory less"),
    "kernel3": (GPU, "the row's state in registers, and keys that a whole warp reads at once"),
    "kernel4": (GPU, "8 x 8 scores a thread, vector loads, and copies that run beside the arithmetic"),
    "kernel5": (GPU, "products by mma.sync, beside the exponentials of the chunk before"),
    "kernel6": (GPU, "copies by TMA, wgmma, and warpgroups that take turns"),
    "float32": (GPU, "as fast as float32 gets on these units: tensor cores are next"),
    "16 bits": (GPU, "as fast as the kernels here; bench has cuDNN and FlashAttention at your sizes"),
}


def hint(figures: Figures, size: Size, text: str) -> tuple[str, str]:
    """What bounds it and what to do next, and where that is explained. text: the kernel's source."""
    name = bound(figures, size, text)
    rate = figures.products
    page, sentence = HINTS[name]
    if name in figures.ms:
        return f"{name} takes {figures.ms[name]:.3g} ms: {sentence}", page
    waits = rate * figures.latency < 8 * size.threads
    advice = sentence.format(
        share=100 * figures.share,
        softmax=100 * figures.softmax,
        chain="one addition waits for the one before it" if waits else "one number at a time",
        rate=rate / 1e9,
        lane=figures.peak / figures.lanes / 1e9,
        lanes=figures.lanes,
        grown=figures.grown,
        small=size.N // SMALLER,
        matrix=size_text(4 * size.N * size.N),
        scratch=size_text(figures.scratch or 0),
    )
    return advice, page


def bound(figures: Figures, size: Size, text: str) -> str:
    """What bounds a kernel, one of HINTS."""
    ms = figures.ms
    rate = figures.products
    scratch = figures.scratch or 0
    if figures.device == "cuda":
        rest = "float32" if size.dtype == Dtype.FP32 else "16 bits"
        better = (name for name in figures.ladder if name in HINTS and ms[name] < 0.9 * ms["own"])
        return next(better, rest)
    if figures.share >= NEAR:
        return "peak"
    helped = re.search(r"softmax_row|exp_sum|online_softmax", text)
    if figures.softmax > MUCH and figures.share < 0.5 and not helped:
        return "softmax"
    if rate < 1.5 * figures.peak / figures.lanes:
        return "lanes"
    if figures.grown > GROWN:
        return "cache"
    if scratch >= 4 * size.N * size.N and rate > figures.peak / 4:
        return "matrix"
    if 4 * scratch > figures.l2 * size.threads and rate > figures.peak / 3:
        return "scratch"
    return "sets" if "simd::multiply" in text else "registers"
