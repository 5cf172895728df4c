"""The process that runs a user's kernel: it knows the expected results, and forks a child for each trial.

python -m shakespeare.own.trial.worker [torch] [cuda]

Each line on standard input is a Request as JSON; the answers are lines of JSON, the last one {"end": ...}. A
child may crash or run forever: the worker ends it and says so. The child of the next request waits: with
`torch` it has imported it, with `cuda` it has the GPU's context.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import mmap
import os
import re
import resource
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.parts import BuildError
from shakespeare.own import kernel as own
from shakespeare.own.trial import cases, diagnosis
from shakespeare.own.trial.cases import CASES, Case, Floats

PAGE = mmap.PAGESIZE
MOST_MEMORY = 4 << 30  # bytes that a child without CUDA may map beyond what it has at first
DIAGNOSIS_SECONDS = 10.0
JIT_SECONDS = 60.0  # more for the first call of Numba and Triton, which compile at it
SHARE = 0.3  # of the limit that a case may be expected to take, by the fastest one before it
MEASURED_WORK = 1000  # multiply-adds; a smaller call says little
COMPILED_FOR = "sm_80"  # without a GPU
ONCE = 13  # cases that compute-sanitizer watches
GUARD = 1024  # floats of NaN after each matrix on a GPU
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
PICTURE = 16, 64  # the most rows and columns of a picture
FILL = 3.0  # of out before a call

Send = Callable[..., None]


def guarded(shape: Sequence[int], fill: float) -> NDArray[np.float32]:
    """A matrix that ends where memory ends: reading or writing beyond it ends the process."""
    count = int(np.prod(shape))
    size = -(-4 * count // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    array = np.frombuffer(memory, np.float32, count, size - 4 * count).reshape(shape)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(PAGE), 0)
    array[...] = fill
    return array


def guarded_inputs(case: Case) -> list[NDArray[np.float32]]:
    """The inputs of a case, each before memory that may not be touched."""
    given = cases.inputs(case)
    if case.fused:
        return list(given)
    made = []
    for t in given:
        made.append(guarded(t.shape, 0))
        made[-1][...] = t
    return made


class Trial:
    """A kernel under test: how it is called for a case."""

    def __init__(self, file: Path) -> None:
        self.kernel = own.loaded(file)
        self.device = own.device(file)
        self.guard = GUARD
        if self.device == "cuda" and not isinstance(self.kernel, own.Native):
            check_gpu(self.kernel)

    def run(
        self,
        case: Case,
        inputs: Sequence[NDArray[np.float32]] | None = None,
        fill: float = FILL,
        scratch_fill: float = np.nan,
        threads: int | None = None,
    ) -> Floats:
        """The output of a call (B, H, Nq, d), in float64."""
        given, kernel = list(inputs or guarded_inputs(case)), self.kernel
        q, k, v = given
        shape = (case.B, case.H, case.Nq, case.d)
        out: Any
        if isinstance(kernel, own.Native):
            count = threads or case.threads
            sizes = (case.B, case.H, case.Nq, case.Nk, case.d, case.causal, count)
            scratch = guarded((kernel.scratch(*sizes),), scratch_fill)
            out = guarded(shape, fill)
            kernel(q, k, v, case.causal, case.applied, threads=count, out=out, scratch=scratch)
        elif isinstance(kernel, own.OnCuda):
            out = self._on_gpu(given, case, fill)
        elif kernel.takes_tensors:
            out = self._by_torch(given, case, fill)
        else:
            out = kernel(q, k, v, case.causal, case.applied)
        return np.array(out, np.float64)

    def _on_gpu(self, given: list[NDArray[np.float32]], case: Case, fill: float) -> Floats:
        """Without PyTorch, whose start takes seconds. A matrix ends where NaN begins."""
        from shakespeare.attention_ext.cuda import gpu

        shape = (case.B, case.H, case.Nq, case.d)
        sent, held = [], []
        strides = [tuple(s // 4 for s in t.strides[:3]) for t in given]
        for t in (*given, np.full(shape, fill, np.float32)):
            count = 1 + sum((n - 1) * stride // 4 for n, stride in zip(t.shape, t.strides))
            flat = np.lib.stride_tricks.as_strided(t, (count,), (4,))  # with what lies between its rows
            sent.append(np.concatenate([flat, np.full(self.guard, np.nan, np.float32)]))
            held.append(gpu.Memory.of(sent[-1]))
        sizes = (*shape, case.Nk)
        self.kernel.launch([m.address for m in held], strides, sizes, case.causal, case.applied)
        try:
            gpu.synchronize()
        except BuildError as error:
            raise RuntimeError(str(error)) from None
        for name, memory, before in zip(("q", "k", "v", "out"), held, sent):
            after = memory.read(np.empty_like(before))
            bits = before.view(np.uint32) == after.view(np.uint32)  # NaN is not equal to itself
            end = len(bits) - self.guard
            if not bits[end:].all():
                raise RuntimeError(f"out of bounds: it writes beyond {name}")
            if name != "out" and not bits.all():
                raise Changed
        return after[:end].reshape(shape)

    def _by_torch(self, given: list[NDArray[np.float32]], case: Case, fill: float) -> Floats:
        import torch

        tensors = [torch.from_numpy(t).to(self.device) for t in given]
        if self.device == "cpu":
            torch.set_num_threads(case.threads)
        elif case.fused:  # the copies are contiguous
            whole = torch.stack([t.transpose(1, 2) for t in tensors], 2)  # (B, N, 3, H, d)
            tensors = [whole[:, :, i].transpose(1, 2) for i in range(3)]
        kernel: Any = self.kernel
        out = torch.full((case.B, case.H, case.Nq, case.d), fill, device=self.device)
        result = kernel(*tensors, case.causal, case.applied, out=out)
        if any(not torch.equal(t.cpu(), torch.from_numpy(g)) for t, g in zip(tensors, given)):
            raise Changed
        return result.detach().cpu().numpy()


def check_gpu(kernel: own.OnCuda | own.OnLadder | own.InPython) -> None:
    """Raise BuildError if there is no GPU, or if CUDA's compiler refuses the kernel."""
    from shakespeare.attention_ext.cuda import gpu

    if isinstance(kernel, own.InPython):
        return gpu.check_gpu()
    try:
        major, minor = gpu.gpu().capability
    except BuildError:
        _, resources = kernel.source(64, COMPILED_FOR).compile()
        what = f"it compiles for {COMPILED_FOR}, with {resources.registers} registers, and is not tried"
        raise BuildError(f"{what}: no GPU and driver are found here (see nvidia-smi)") from None
    if isinstance(kernel, own.OnLadder):
        return
    for d in dict.fromkeys(case.d for case in CASES):
        source = kernel.source(d, f"sm_{major}{minor}")
        if not source.path().exists() and os.fork() == 0:  # NVRTC compiles one at a time in a process
            os.closerange(3, 1024)  # the worker waits for the end of the child's pipe
            with contextlib.suppress(BuildError):
                source.make()
            os._exit(0)


class Changed(Exception):
    """The kernel wrote into q, k or v."""


def chosen(request: dict[str, Any], device: str) -> list[Case]:
    """The cases of a request; a simulated GPU is slow."""
    slow = request.get("simulated", False)
    return [case for case in CASES if not slow or case.work <= 60_000]


def trial(request: dict[str, Any], send: Send) -> None:
    """Try the kernel with all cases, and explain what is wrong."""
    try:
        kernel = Trial(Path(request["file"]))
    except BuildError as error:
        return send(refused=str(error), output=error.output)
    limit, per_work = request["seconds"], math.inf
    wrong: dict[Case, Floats] = {}
    right: list[Case] = []
    skipped: list[Case] = []
    for case in chosen(request, kernel.device):
        if math.isfinite(per_work) and per_work * case.work * case.repeats > SHARE * limit:
            skipped.append(case)
            continue
        send(begin=str(case), at=CASES.index(case))
        given = guarded_inputs(case)
        copies = [t.copy() for t in given]
        start = time.perf_counter()
        finding = None
        exact = cases.expected(case)
        for _ in range(case.repeats):
            try:
                got = kernel.run(case, given)
            except Changed:
                finding = ("inputs", "the kernel writes into q, k or v")
                break
            except BuildError as error:
                return send(refused=str(error))
            except RuntimeError as error:
                said = str(error).splitlines()[0]
                bounds = re.search("illegal memory access|misaligned address|out of bounds", said)
                finding = ("bounds" if bounds else "raised", said)
                break
            if not np.abs(got - exact.out).max() <= exact.allowed:
                wrong.setdefault(case, got)
                break
        else:
            right.append(case)
            send(passed=CASES.index(case))
        if case.work >= MEASURED_WORK:
            per_work = min(per_work, (time.perf_counter() - start) / case.work / case.repeats)
        if any(not np.array_equal(t, copy) for t, copy in zip(given, copies)):
            finding = ("inputs", "the kernel writes into q, k or v")
        if finding:
            send(wrong=str(case), finding=finding)
            break
        if case in wrong and len(wrong) == 1:
            send(**shown(case, wrong[case]))
    send(tried=len(right) + len(wrong), right=len(right), skipped=[str(case) for case in skipped])
    if wrong and not finding:
        send(begin="", explaining=True)
        with contextlib.suppress(RuntimeError, Changed):
            if found := diagnosis.diagnose(kernel.run, wrong, right):
                send(finding=(found.kind, found.sentence))


def shown(case: Case, got: Floats) -> dict[str, Any]:
    """What is shown of a wrong result: the worst number, a picture, and the numbers of the worst row."""
    exact = cases.expected(case)
    error = np.nan_to_num(np.abs(got - exact.out), nan=np.inf, posinf=np.inf)
    b, h, i, c = (int(n) for n in np.unravel_index(error.argmax(), error.shape))
    off = error > exact.allowed
    first = max(0, min(c - 2, case.d - 5))
    rows, columns = np.flatnonzero(off[b, h].any(1)), np.flatnonzero(off[b, h].any(0))
    return {
        "wrong": str(case),
        "at": (b, h, i, c),
        "off": int(off.sum()),
        "of": off.size,
        "heads": [int(n) for n in np.flatnonzero(off.any((2, 3)).ravel())],
        "rows": [int(n) for n in rows],
        "columns": [int(n) for n in columns],
        "first": first,
        "expected": exact.out[b, h, i, first : first + 5].tolist(),
        "got": [float(x) for x in got[b, h, i, first : first + 5]],
        "picture": picture(error[b, h] / exact.allowed),
    }


def picture(error: Floats) -> list[str]:
    """The errors of a head (Nq, d), as multiples of the allowed one: the worst of a block is a character."""
    rows, columns = (-(-n // most) for n, most in zip(error.shape, PICTURE))
    lines = []
    for i in range(0, error.shape[0], rows):
        line = ""
        for c in range(0, error.shape[1], columns):
            worst = error[i : i + rows, c : c + columns].max()
            line += "?" if not np.isfinite(worst) else ".-+#"[int((worst > np.array([1, 100, 10_000])).sum())]
        lines.append(line)
    return lines


def once(file: Path) -> None:
    """Call a file's kernel in this process, for compute-sanitizer."""
    kernel = Trial(file)
    kernel.guard = 0
    for case in CASES[:ONCE]:
        kernel.run(case)


def serve() -> None:
    """Answer requests until standard input ends."""
    if "torch" in sys.argv:
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    if "cuda" not in sys.argv:
        _expect()
    child = Child()  # with a GPU at once: its context takes as long as the expected results
    _expect()
    for line in sys.stdin:
        for answer in child.answers(line):
            print(json.dumps(answer), flush=True)
        child = Child()


class Child:
    """The process of the next trial, which waits for its request."""

    def __init__(self) -> None:
        asked, self._ask = os.pipe()
        self._read, write = os.pipe()
        self._said = tempfile.TemporaryFile()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._ask)
            os.close(self._read)
            _child(asked, write, self._said.fileno())
        os.close(asked)
        os.close(write)

    def answers(self, asked: str) -> Iterator[dict[str, Any]]:
        """What it sends, and how it ended: 'done', 'endless', or the name of a signal."""
        request, child, read = json.loads(asked), self._pid, self._read
        with os.fdopen(self._ask, "w") as ask:
            ask.write(asked)
        held, deadline, end, explaining = b"", time.monotonic() + request["build_seconds"], "done", False
        while True:
            ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                end = "done" if explaining else "endless"
                os.kill(child, signal.SIGKILL)
                break
            data = os.read(read, 1 << 16)
            if not data:
                break
            held += data
            *lines, held = held.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                explaining = explaining or "explaining" in answer
                seconds = request["seconds"] + (
                    JIT_SECONDS if request.get("jit") and answer.get("at") == 0 else 0
                )
                deadline = time.monotonic() + (max(DIAGNOSIS_SECONDS, seconds) if explaining else seconds)
                yield answer
        os.close(read)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and end == "done" and not explaining:
            end = signal.Signals(os.WTERMSIG(status)).name
        elif os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
            end = f"exit {os.WEXITSTATUS(status)}"
        with self._said as said:
            said.seek(0)
            yield {"end": end, "said": said.read().decode(errors="replace")[-20_000:]}


def _child(asked: int, write: int, said: int) -> None:
    """Wait for the request, run the trial, and end this process."""
    code = 70  # unless the trial returns: a kernel may call exit()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(said, stream)
    _silent(_warm)
    with os.fdopen(asked) as line:
        text = line.read()
    if not text:
        os._exit(0)
    request = json.loads(text)
    faulthandler.enable()
    if not request.get("cuda"):
        mapped = 1024 * int(Path("/proc/self/statm").read_text().split()[0]) * PAGE // 1024
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def send(**answer: Any) -> None:
        os.write(write, json.dumps(answer).encode() + b"\n")

    try:
        trial(request, send)
        code = 0
    except SystemExit as error:
        send(wrong="", finding=("raised", f"the kernel ended the program: exit code {error.code}"))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _warm() -> None:
    """Make the GPU's context, which a child cannot have from its parent, and load the compiler."""
    if "cuda" not in sys.argv:
        return
    if "torch" in sys.argv:
        import torch

        torch.zeros(1, device="cuda")
        return _expect()
    from shakespeare.attention_ext.build import nvrtc
    from shakespeare.attention_ext.cuda import gpu

    made = threading.Thread(target=_silent, args=(gpu.activate,))
    made.start()
    _silent(nvrtc.versions)
    _expect()
    made.join()
    _silent(gpu.activate)


def _silent(call: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # the trial says why
        call()


def _expect() -> None:
    for case in CASES:
        cases.expected(case)


if __name__ == "__main__":
    once(Path(sys.argv[2])) if "once" in sys.argv else serve()
