"""Whether a user's kernel is right: the worker's cases, then builds with sanitizers, which name lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.parts import BuildError
from shakespeare.lab.command import IMPORTS, ROOT, run
from shakespeare.own import kernel as own
from shakespeare.own.trial.cases import CASES, Case
from shakespeare.own.trial.diagnosis import Finding

BUILD_SECONDS = 300  # that a compiler may take
SANITIZER_SECONDS = 60  # that a program under a sanitizer may take
# Calls under AddressSanitizer, (Nq, Nk, d, heads, causal, threads): sizes that tiles do not divide.
MEMORY = (
    *((1, 1, 4, 1, 0, 1), (3, 7, 8, 1, 1, 1), (63, 63, 32, 1, 0, 1), (63, 63, 24, 2, 1, 1)),
    *((7, 40, 33, 2, 1, 1), (123, 123, 80, 1, 0, 1), (130, 257, 16, 1, 0, 3)),
)
RACES = ((200, 200, 16, 4, 1, 4), (257, 257, 32, 1, 0, 3))  # the same under ThreadSanitizer
THREADS = re.compile(r"\b(threads?|for_each_item|on_threads|async|future|atomic|parallel)\b")
ACCESS = {
    "heap-buffer-overflow": "beyond",
    "stack-buffer-overflow": "beyond a local array",
    "stack-buffer-underflow": "before a local array",
    "global-buffer-overflow": "beyond a global array",
    "heap-use-after-free": "of freed memory",
    "stack-use-after-scope": "of a variable that is gone",
    "dynamic-stack-buffer-overflow": "beyond a local array",
}
SIGNALS = {
    "SIGSEGV": "segmentation fault: it reads or writes where no memory is",
    "SIGBUS": "bus error: it reads or writes where no memory is",
    "SIGFPE": "arithmetic error: it divides a whole number by 0",
    "SIGILL": "illegal instruction: this processor does not have it",
    "SIGABRT": "aborted: the C++ library found an error, or an exception left a thread",
    "SIGKILL": "killed, probably for its memory",
}


@dataclass
class Verdict:
    """Whether a kernel is right, and what was found.

    refused: why it could not be compiled; then nothing was tried. output: the compiler's. tried: cases;
    skipped: those that would take too long. at, case: the first wrong one, or that of a crash. finding: what
    explains it. shown: worker.shown() of the first wrong result. said: what the kernel printed. memory: what
    the sanitizers found, or why they did not run. finished: whether all cases were tried. passed: the numbers
    of the right ones.
    """

    refused: str = ""
    output: str = ""
    tried: int = 0
    skipped: Sequence[str] = ()
    at: str = ""
    finding: Finding | None = None
    wrong: bool = False
    shown: dict[str, Any] | None = None
    said: str = ""
    memory: list[str] = field(default_factory=list)
    case: Case | None = None
    finished: bool = False
    passed: list[int] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.wrong and not self.refused

    def add(self, finding: Finding, over: bool = True) -> None:
        """Take a mistake as the finding; over: also if there is one."""
        self.wrong = True
        if over or self.finding is None:
            self.finding = finding


class Checker:
    """The worker, started at the first check and kept for the next ones."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[str] | None = None
        self._has: set[str] = set()

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._worker:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None

    def warm(self, file: Path) -> None:
        """Start the worker that this file needs."""
        text, needs = file.read_text(errors="replace"), set()
        if own.device(file) == "cuda":
            alone = file.suffix == ".cu" and not own.of_ladder(text)
            needs = {"cuda"} if alone else {"cuda", "torch"}
        elif file.suffix == ".py" and re.search(r"^\s*(import|from)\s+(torch|triton)\b", text, re.M):
            needs = {"torch"}
        if self._worker and (not needs <= self._has or self._worker.poll() is not None):
            self.close()
        if self._worker is None:
            self._has = needs
            command = [sys.executable, "-m", "shakespeare.own.trial.worker", *sorted(needs)]
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
            )

    def check(self, file: Path, seconds: float) -> Verdict:
        """Try the kernel of a file with all cases. seconds: that a call may take before it is endless."""
        self.warm(file)
        assert self._worker and self._worker.stdin and self._worker.stdout
        text = file.read_text(errors="replace")
        on_gpu = own.device(file) == "cuda"
        request = {"file": str(file.resolve()), "seconds": seconds, "build_seconds": BUILD_SECONDS}
        request |= {"cuda": on_gpu, "simulated": own.uses_numba_cuda(text) and not on_gpu}
        request["jit"] = bool(re.search(r"\b(numba|triton)\b", text)) and file.suffix == ".py"
        self._worker.stdin.write(json.dumps(request) + "\n")
        self._worker.stdin.flush()
        found = Verdict()
        for line in self._worker.stdout:
            answer = json.loads(line)
            take(found, answer, seconds)
            if "end" in answer:
                return found
        self.close()
        raise BuildError("the worker that tries kernels ended; try again")


def environment() -> dict[str, str]:
    """That of a process of this package."""
    path = os.pathsep.join(filter(None, (str(IMPORTS), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def take(found: Verdict, answer: dict[str, Any], seconds: float) -> None:
    """Add an answer of the worker to a verdict."""
    found.refused, found.output = answer.get("refused", found.refused), answer.get("output", found.output)
    if "begin" in answer and answer["begin"]:
        if not found.wrong:
            found.at, found.case = answer["begin"], CASES[answer["at"]]
    if "passed" in answer:
        found.passed.append(answer["passed"])
    if "wrong" in answer:
        found.wrong, found.at = True, answer["wrong"] or found.at
        found.shown = answer if "picture" in answer else found.shown
    if "finding" in answer:
        found.add(Finding(*answer["finding"]))
    if "tried" in answer:
        found.tried, found.skipped, found.finished = answer["tried"], answer["skipped"], True
    if "end" in answer:
        found.said = answer["said"]
        if answer["end"] == "endless":
            found.add(
                Finding("endless", f"a call did not end within {seconds:g} s, and was ended"), over=False
            )
        elif answer["end"] in SIGNALS or answer["end"].startswith("SIG"):
            why = SIGNALS.get(answer["end"], answer["end"])
            found.add(Finding("crash", f"it crashed, {why}{python_line(found.said)}"), over=False)
        elif answer["end"] != "done":
            found.add(Finding("crash", f"it ended the program: {answer['end']}"), over=False)
        elif not (found.finished or found.wrong or found.refused):
            found.add(Finding("crash", "it ended the program with exit(0)"))


def python_line(said: str) -> str:
    """The line of a user's Python that was running at a crash."""
    for name, line in re.findall(r'File "([^"]+)", line (\d+)', said):
        if not name.startswith((str(ROOT), "<")) and "site-packages" not in name:
            return f", at {Path(name).name}:{line}"
    return ""


def sanitize(file: Path, found: Verdict, stop: Callable[[], bool] | None = None) -> None:
    """Look for accesses out of bounds and for races; add them to the verdict. Raises Stopped if stop()."""
    if found.refused or found.finding and found.finding.kind == "endless":
        return
    try:
        if file.suffix == ".cpp":
            _sanitize_cpp(file, found, stop)
        elif file.suffix == ".cu":
            _sanitize_cuda(file, found, stop)
    except BuildError as error:
        found.memory.append(f"not searched: {error}")
    except subprocess.TimeoutExpired:
        found.memory.append(f"not searched: a sanitizer took more than {SANITIZER_SECONDS} s")


def _sanitize_cpp(file: Path, found: Verdict, stop: Callable[[], bool] | None) -> None:
    program = str(own.make(file.resolve(), "address"))
    first = []
    if found.wrong and (case := found.case):  # the case that crashed
        first = [(case.Nq, case.Nk, case.d, case.B * case.H, int(case.causal), case.threads)]
    for sizes in (*first, *MEMORY):
        options = "detect_leaks=0:allocator_may_return_null=1"
        _, _, said = _run_program(program, sizes, stop, ASAN_OPTIONS=options)
        if finding := of_address_sanitizer(said, file.name):
            found.memory.append(f"AddressSanitizer: {finding.sentence}")
            return found.add(finding)
    found.memory.append(f"no access out of bounds in {len(MEMORY)} calls under AddressSanitizer")
    text = file.read_text(errors="replace")
    if not THREADS.search(text):
        return
    if re.search(r"\bomp\b", text):
        found.memory.append("races were not searched: ThreadSanitizer does not know OpenMP's threads")
        return
    program = str(own.make(file.resolve(), "thread"))
    for sizes in RACES:
        _, _, said = _run_program(program, sizes, stop)
        if "FATAL: ThreadSanitizer" in said:
            found.memory.append("races were not searched: ThreadSanitizer does not run here")
            return
        if finding := of_thread_sanitizer(said, file.name):
            found.memory.append(f"ThreadSanitizer: {finding.sentence}")
            return found.add(finding)
    found.memory.append(f"no race in {len(RACES)} calls under ThreadSanitizer")


def _run_program(
    program: str, sizes: Sequence[int], stop: Callable[[], bool] | None, **env: str
) -> tuple[int, str, str]:
    """Run tools/alone.cpp for a call."""
    Nq, Nk, d, heads, causal, threads = sizes
    words = ("own", Nk, d, 64, 64, causal, heads, 1, 0, Nq, threads)
    return run([program, *map(str, words)], SANITIZER_SECONDS, stop, **env)


def of_address_sanitizer(said: str, name: str) -> Finding | None:
    """The access that AddressSanitizer found, with its line in the user's file; else None."""
    error = re.search(r"ERROR: AddressSanitizer: (\S+)", said)
    if not error:
        return None
    line = re.search(rf"{re.escape(name)}:(\d+)", said)
    where = f" at {name}:{line[1]}" if line else ""
    kind = error[1].rstrip(":")
    access = re.search(r"(READ|WRITE) of size (\d+)", said)
    if kind not in ACCESS or not access:
        reason = {"SEGV": "it reads or writes where no memory is", "FPE": "it divides a whole number by 0"}
        return Finding("bounds" if kind == "SEGV" else "crash", f"{reason.get(kind, kind)}{where}")
    what = f"{access[1].lower()} of {access[2]} bytes {ACCESS[kind]}"
    if kind == "heap-buffer-overflow":
        region = re.search(r"located \d+ bytes (.*?)\[(0x[0-9a-f]+)", said)
        side = "before" if region and ("left" in region[1] or "before" in region[1]) else "beyond"
        start = int(region[2], 16) if region else 0
        named = (name for name, at in re.findall(r"(\w+) at (0x[0-9a-f]+)", said) if int(at, 16) == start)
        what = f"{access[1].lower()} of {access[2]} bytes {side} {next(named, 'a matrix')}"
    return Finding("bounds", f"{what}{where}")


def of_thread_sanitizer(said: str, name: str) -> Finding | None:
    """The race that ThreadSanitizer found in the user's file; else None."""
    for race in said.split("WARNING: ThreadSanitizer: data race")[1:]:
        stacks = re.split(r"\n\s+(?:Previous )?(?:[Ww]rite|[Rr]ead|Atomic) ", race)[1:3]
        at = [found[1] for stack in stacks if (found := re.search(rf"{re.escape(name)}:(\d+)", stack))]
        if at:
            also = f" and line {at[1]}" if len(set(at)) > 1 else ""
            return Finding("race", f"threads use the same memory, and one writes, at {name}:{at[0]}{also}")
    return None


def _sanitize_cuda(file: Path, found: Verdict, stop: Callable[[], bool] | None) -> None:
    tool = shutil.which("compute-sanitizer")
    if not tool:
        found.memory.append("not searched: compute-sanitizer was not found on PATH")
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--print-limit", "3", sys.executable]
        words = [*command, "-m", "shakespeare.own.trial.worker", "once", str(file.resolve())]
        env = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each matrix has bounds
        _, out, err = run(words, SANITIZER_SECONDS, stop, **env)
        if finding := of_compute_sanitizer(out + err, file.name):
            found.memory.append(f"compute-sanitizer: {finding.sentence}")
            return found.add(finding)
    found.memory.append("no access out of bounds and no race by compute-sanitizer")


def of_compute_sanitizer(said: str, name: str) -> Finding | None:
    """The access or the race that compute-sanitizer found; else None."""
    access = re.search(r"Invalid (\S+) (read|write|atomic) of size (\d+)", said)
    line = re.search(rf"{re.escape(name)}:(\d+)", said)
    where = f" at {name}:{line[1]}" if line else ""
    if access:
        memory = access[1].strip("_")
        return Finding("bounds", f"{access[2]} of {access[3]} bytes out of bounds of {memory} memory{where}")
    if re.search(r"(Race reported|Potential \S+ hazard|hazard detected)", said):
        return Finding(
            "race", f"threads of a block race for shared memory{where}: is a __syncthreads() missing?"
        )
    return None
