"""How fast a user's kernel is, beside the parts and PyTorch."""

import json
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
from shakespeare.lab.subprocesses import environment, run

Stop = Callable[[], bool] | None
SECONDS = 600  # that a measurement, or compiling Triton's tiles, may take
UNTIMED = "untimed"  # the kind of a finding that says nothing against a kernel
UNMEASURED = (UNTIMED, "threads", "faster")  # the kinds that do not make a result wrong
LADDER = {"cpu": ("part1", "part2", "part3", "part4"), "cuda": ("kernel1", "kernel2", "kernel3", "kernel4")}
LADDER_IN_16_BITS = ("kernel3", "kernel5", "kernel6")
SMALLER = 16  # N is so many times smaller in the call that fits the first caches
WIDER = 2  # d is so many times larger in the call that tells the softmax's time from the products'


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
    flops: operations of a call. peak: multiply-adds', in 16 bits a large product's. latency: seconds of a
    dependent multiply-add. lanes: of a vector. scratch, l2: bytes. moved: bytes of one head into each of two
    simulated caches; least: the fewest possible. handing_ms: that handing a call over took more. library: as
    Verdict's.
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
    answer = from_process("shakespeare.judge.speed_process", file, size, stop, "it was not timed")
    return answer if isinstance(answer, Finding) else Figures(**answer)


def from_process(
    module: str, file: Path, size: Size, stop: Stop, failed: str, *arguments: str, **settings: str
) -> Any:
    """What a module's process prints of a file, as JSON; a Finding if it is one, or if the process failed."""
    program = (sys.executable, "-m", module)
    command = [*program, str(file.resolve()), json.dumps(asdict(size)), *arguments]
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
