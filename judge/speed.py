"""How fast a user's kernel is, beside the parts and PyTorch, and what to do next."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge.diagnosis import Finding
from shakespeare.judge.player import signalled
from shakespeare.lab.command import environment, run
from shakespeare.lab.formats import size_text

Stop = Callable[[], bool] | None
SECONDS = 600  # that a measurement, or compiling Triton's tiles, may take
UNTIMED = "untimed"  # the kind of a finding that says nothing against a kernel
UNMEASURED = (UNTIMED, "threads", "faster")  # the kinds that do not make a result wrong
LADDER = {"cpu": ("part1", "part2", "part3", "part4"), "cuda": ("kernel1", "kernel2", "kernel3", "kernel4")}
LADDER_IN_16_BITS = ("kernel3", "kernel5", "kernel6")
SMALLER = 16  # N is so many times smaller in the call that fits the first caches
WIDER = 2  # d is so many times larger in the call that tells the softmax's time from the products'
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


@dataclass(frozen=True)
class Size:
    """The timed call, of gradients if backward. cachegrind: count its bytes. alone: without the ladder.

    dtype: of its inputs, a Dtype.
    """

    N: int = 1024
    d: int = 32
    heads: int = 4
    causal: bool = False
    threads: int = 1
    cachegrind: bool = False
    alone: bool = False
    backward: bool = False
    dtype: str = Dtype.FP32.value


@dataclass
class Figures:
    """What was measured.

    ms: medians of a call: 'own', the ladder's parts, sdpa. small_ms: at N / SMALLER; wide_ms: at WIDER * d.
    flops: of a call. peak: multiply-adds', in 16 bits a large product's. latency: seconds of a dependent
    multiply-add. lanes: of a vector. scratch, l2: bytes. moved: bytes of one head into each of two simulated
    caches; least: the fewest possible.
    handing_ms: that handing a call over took more. library: as Verdict's.
    """

    ms: dict[str, float]
    flops: float
    peak: float
    l2: int
    cpu: str
    device: str
    small_ms: float | None = None
    wide_ms: float | None = None
    latency: float = 0.0
    lanes: int = 1
    scratch: int | None = None
    busy: str | None = None
    handing_ms: float = 0.0
    library: str = ""
    moved: dict[str, float] | None = None
    least: float = 0.0

    @property
    def share(self) -> float:
        """The share of the peak that the kernel reaches."""
        return self.flops / (1e-3 * self.ms["own"]) / self.peak

    @property
    def ladder(self) -> list[str]:
        """The ladder's parts that were timed, in its order."""
        return [name for name in self.ms if name not in ("own", "sdpa")]

    @property
    def softmax(self) -> float:
        """Share of the time that does not grow with d: the softmax's, and 0 where it is not known."""
        if self.wide_ms is None:
            return 0.0
        return min(1.0, max(0.0, (WIDER - self.wide_ms / self.ms["own"]) / (WIDER - 1)))

    @property
    def products(self) -> float:
        """Operations a second of the matrix products, without the softmax's time."""
        return self.flops / (1e-3 * self.ms["own"] * max(0.01, 1 - self.softmax))

    @property
    def grown(self) -> float:
        """How many times as much a score costs as at N / SMALLER; 1 where it is not known."""
        return self.ms["own"] / self.small_ms / SMALLER**2 if self.small_ms else 1.0


def measure(file: Path, size: Size, stop: Stop = None) -> Figures | Finding:
    """The figures of a right kernel, or why there are none. Raises Stopped if stop()."""
    why = user_kernel.read(file).untimed
    if why:
        return Finding(UNTIMED, why)
    answer = from_process("shakespeare.judge.measuring", file, size, stop, "it was not timed")
    return answer if isinstance(answer, Finding) else Figures(**answer)


def from_process(
    module: str, file: Path, size: Size, stop: Stop, failed: str, *asked: str, **settings: str
) -> Any:
    """What a module's process prints of a file, as JSON; a Finding if it is one, or if the process failed."""
    program = (sys.executable, "-m", module)
    command = [*program, str(file.resolve()), json.dumps(asdict(size)), *asked]
    try:
        code, out, err = run(command, SECONDS, stop, **environment() | settings)
    except subprocess.TimeoutExpired:
        return Finding(UNTIMED, f"{failed}: it takes too long at N = {size.N}")
    if code or not out:
        why = signalled(code) if code < 0 else (err.splitlines() or ["no reason given"])[-1]
        return Finding(UNTIMED, f"{failed}: {why}")
    answer = json.loads(out.splitlines()[-1])
    return Finding(**answer) if "kind" in answer else answer


def place(figures: Figures) -> str:
    """Where it stands on the ladder: 'between part2 and part3'; the slowest part first."""
    mine = figures.ms["own"]
    names = sorted(figures.ladder, key=lambda n: -figures.ms[n])
    slower = [name for name in names if figures.ms[name] > mine]
    faster = [name for name in names if figures.ms[name] <= mine]
    if slower and faster:
        return f"between {slower[-1]} and {faster[0]}"
    return f"faster than {slower[-1]}" if slower else f"slower than {faster[0]}"


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
