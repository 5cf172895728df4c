"""The process that tries a user's kernel: calls it with the cases, compares, and explains what is wrong.

python -m shakespeare.own.trial.worker [torch]

It imports what it is told, waits for a line {"file": ..., "seconds": ...}, and writes the Verdict so far as a
line of JSON before each case and at the end. The kernel may crash this process or run forever;
checking.Checker watches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.parts import BuildError
from shakespeare.own import kernel as kernels
from shakespeare.own.trial import cases, diagnosis
from shakespeare.own.trial.cases import CASES, Array, Case, Floats
from shakespeare.own.trial.diagnosis import Finding

PAGE = mmap.PAGESIZE
MOST_MEMORY = 4 << 30  # bytes that a kernel on the CPU may map
SHARE = 0.3  # of the limit that a case may be expected to take, by the fastest one before it
MEASURED_WORK = 1000  # multiply-adds; a smaller call says little
SIMULATED_WORK = 60_000  # multiply-adds of a case at most in Numba's simulator of CUDA
COMPILED_FOR = "sm_80"  # without a GPU
ONCE = 13  # cases that compute-sanitizer watches
GUARD = 1024  # floats of NaN after each matrix on a GPU
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
PICTURE = 16, 64  # the most rows and columns of a picture
FILL = 3.0  # of out before a call


@dataclass
class Verdict:
    """Whether a kernel is right, and what explains it.

    refused: why it could not be compiled; then nothing was tried. output: the compiler's. at, case: the first
    wrong case, or that of a crash, and its number. passed: the numbers of the right ones. tried: cases;
    skipped: those that would take too long. finished: whether all were tried. finding: what explains a wrong
    result. shown: as shown() gives it. memory: what sanitizers say.
    """

    refused: str = ""
    output: str = ""
    at: str = ""
    case: int | None = None
    passed: list[int] = field(default_factory=list)
    tried: int = 0
    skipped: list[str] = field(default_factory=list)
    finished: bool = False
    wrong: bool = False
    finding: Finding | None = None
    shown: dict[str, Any] | None = None
    memory: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.wrong and not self.refused

    @property
    def why(self) -> str:
        """Why it is not right; '' if that is not known."""
        return self.refused or (self.finding.sentence if self.finding else "")

    def add(self, finding: Finding) -> None:
        """Take a mistake as the finding."""
        self.wrong, self.finding, self.finished = True, finding, True


def guarded(shape: Sequence[int], fill: float | Array) -> Array:
    """A matrix that ends where memory ends: reading or writing beyond it ends the process."""
    count = int(np.prod(shape))
    size = -(-4 * count // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    array = np.frombuffer(memory, np.float32, count, size - 4 * count).reshape(shape)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(PAGE), 0)
    array[...] = fill
    return array


class Changed(Exception):
    """The kernel wrote into q, k or v."""


class Trial:
    """A kernel under test: how it is called for a case."""

    def __init__(self, file: Path) -> None:
        self.source, self.kernel = kernels.read(file), kernels.loaded(file)
        self.guard = GUARD if isinstance(self.kernel, kernels.OnCuda) else 0
        if self.source.device == "cuda" and not isinstance(self.kernel, kernels.Native):
            check_gpu(self.kernel)

    def run(
        self,
        case: Case,
        inputs: Sequence[Array] | None = None,
        fill: float = FILL,
        scratch_fill: float = np.nan,
        threads: int | None = None,
    ) -> Floats:
        """The output of a call (B, H, Nq, d), in float64. Raises Changed, and errors as the kernel does."""
        kernel, before, threads = self.kernel, inputs or cases.inputs(case), threads or case.threads
        given = [guarded(t.shape, t) for t in before]
        if case.fused and inputs is None:
            whole: Any = before[0].base
            given = cases.fused(guarded(whole.shape, whole))
        asked = case.causal, case.applied
        if isinstance(kernel, kernels.Native):
            sizes = (case.B, case.H, case.Nq, case.Nk, case.d, case.causal, threads)
            scratch = guarded((kernel.scratch(*sizes),), scratch_fill)
            out, (q, k, v) = guarded(before[0].shape, fill), given
            got = kernel(q, k, v, *asked, threads=threads, out=out, scratch=scratch)
        elif self.source.device == "cuda":
            got = self._on_gpu(given, fill, asked)
        elif kernel.takes_tensors:
            import torch

            torch.set_num_threads(threads)
            got = kernel(*map(torch.from_numpy, given), *asked).detach().numpy()
        else:
            got = kernel(*given, *asked)
        if not all(map(np.array_equal, given, before)):
            raise Changed
        return np.array(got, np.float64)

    def _on_gpu(self, given: Sequence[Array], fill: float, asked: tuple[bool, float]) -> Floats:
        """The output on a GPU, where `guard` numbers that are NaN follow each matrix."""
        import torch

        whole, views = [], []
        for t in (*given, np.full(given[0].shape, fill, np.float32)):
            strides = [stride // 4 for stride in t.strides]
            count = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, strides))
            flat = np.lib.stride_tricks.as_strided(t, (count,), (4,))  # with what lies between its rows
            padded = np.concatenate([flat, np.full(self.guard, np.nan, np.float32)])
            whole.append(torch.from_numpy(padded).to("cuda"))
            views.append(whole[-1].as_strided(t.shape, strides))
        bits = [t.view(torch.int32) for t in whole]  # NaN is not equal to itself
        before = [t.clone() for t in bits]
        out = {"out": views[3]} if isinstance(self.kernel, kernels.OnCuda) else {}
        got = self.kernel(*views[:3], *asked, **out).detach().cpu().numpy()
        for name, now, then in zip(("q", "k", "v", "out"), bits, before):
            same = (now == then).cpu()
            if not same[len(same) - self.guard :].all():
                raise RuntimeError(f"out of bounds: it writes beyond {name}")
            if name != "out" and not same.all():
                raise Changed
        return got


def check_gpu(kernel: Any) -> None:
    """Raise BuildError if there is no GPU, or if CUDA's compiler refuses the kernel."""
    from shakespeare.attention_ext.cuda import gpu

    try:
        gpu.check_gpu()
    except BuildError:
        if isinstance(kernel, kernels.InPython):
            raise
        _, resources = kernel.source(64, COMPILED_FOR).compile()
        what = f"it compiles for {COMPILED_FOR}, with {resources.registers} registers, and is not tried"
        raise BuildError(f"{what}: no GPU and driver are found here (see nvidia-smi)") from None
    if not isinstance(kernel, kernels.OnCuda):
        return
    major, minor = gpu.gpu(0).capability
    nvrtc.make_all(kernel.source(d, f"sm_{major}{minor}") for d in {case.d for case in CASES})


def chosen(source: kernels.Source) -> list[Case]:
    """The cases that a kernel is tried with; a simulated GPU is slow."""
    return [case for case in CASES if not source.simulated or case.work <= SIMULATED_WORK]


def trial(file: Path, seconds: float, send: Callable[[Verdict], object]) -> None:
    """Try the kernel of a file with the cases, and explain what is wrong; send the verdict at each step."""
    verdict, fastest = Verdict(), math.inf  # seconds of a multiply-add
    wrong: dict[Case, Floats] = {}
    try:
        kernel = Trial(file)
        for case in chosen(kernel.source):
            if fastest < math.inf and fastest * case.work * case.repeats > SHARE * seconds:
                verdict.skipped.append(str(case))
                continue
            if not wrong:
                verdict.at, verdict.case = str(case), CASES.index(case)
            send(verdict)
            start = time.perf_counter()
            results = (kernel.run(case) for _ in range(case.repeats))
            bad = next((got for got in results if not cases.expected(case).allows(got)), None)
            verdict.tried += 1
            if bad is None:
                verdict.passed.append(CASES.index(case))
            else:
                verdict.wrong, verdict.shown = True, verdict.shown or shown(case, bad)
                wrong[case] = bad
            if case.work >= MEASURED_WORK:
                fastest = min(fastest, (time.perf_counter() - start) / case.work / case.repeats)
        verdict.finished = True
        if wrong:
            send(verdict)
            with contextlib.suppress(RuntimeError, Changed):
                verdict.finding = diagnosis.diagnose(kernel.run, wrong)
    except BuildError as error:
        verdict.refused, verdict.output = str(error), error.output
    except Changed:
        verdict.add(Finding("inputs", "the kernel writes into q, k or v"))
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        beyond = re.search("illegal memory access|misaligned address|out of bounds", said)
        verdict.add(Finding("bounds" if beyond else "raised", said))
    finally:
        send(verdict)


def shown(case: Case, got: Floats) -> dict[str, Any]:
    """What is shown of a wrong result: the worst number, a picture, and the numbers of the worst row."""
    exact = cases.expected(case)
    error = exact.error(got)
    b, h, i, c = (int(n) for n in np.unravel_index(error.argmax(), error.shape))
    off = error > exact.allowed
    first = max(0, min(c - 2, case.d - 5))
    return {
        "wrong": str(case),
        "at": (b, h, i, c),
        "off": int(off.sum()),
        "of": off.size,
        "heads": np.flatnonzero(off.any((2, 3))).tolist(),
        "rows": np.flatnonzero(off[b, h].any(1)).tolist(),
        "columns": np.flatnonzero(off[b, h].any(0)).tolist(),
        "first": first,
        "expected": exact.out[b, h, i, first : first + 5].tolist(),
        "got": got[b, h, i, first : first + 5].tolist(),
        "picture": picture(error[b, h] / exact.allowed),
    }


def picture(error: Floats) -> list[str]:
    """The errors of a head (Nq, d), as multiples of the allowed one: the worst of a block is a character."""
    rows, columns = (-(-n // most) for n, most in zip(error.shape, PICTURE))
    lines = []
    for i in range(0, error.shape[0], rows):
        worst = [error[i : i + rows, c : c + columns].max() for c in range(0, error.shape[1], columns)]
        levels = ("?" if x == np.inf else ".-+#"[int(x > 1) + int(x > 100) + int(x > 10_000)] for x in worst)
        lines.append("".join(levels))
    return lines


def once(file: Path) -> None:
    """Call a file's kernel in this process, for compute-sanitizer."""
    kernel = Trial(file)
    kernel.guard = 0
    for case in CASES[:ONCE]:
        kernel.run(case)


def main(words: Sequence[str]) -> None:
    """Warm up, wait for a request, answer it, and end this process."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # what the kernel prints
    if "torch" in words:
        with contextlib.suppress(Exception):  # the trial says why
            import torch

            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")
                nvrtc.versions()
    for case in CASES:
        cases.expected(case)
    line = sys.stdin.readline()
    if not line:
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    request = json.loads(line)
    file = Path(request["file"])
    if kernels.read(file).device == "cpu":
        with contextlib.suppress(OSError, ValueError):
            mapped = PAGE * int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY,) * 2)

    def send(verdict: Verdict) -> None:
        os.write(answers, json.dumps(asdict(verdict)).encode() + b"\n")

    trial(file, request["seconds"], send)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    once(Path(sys.argv[2])) if sys.argv[1:2] == ["once"] else main(sys.argv[1:])
