"""Accesses out of bounds and races of a user's kernel, by builds with sanitizers, which name lines."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import BuildError
from shakespeare.lab.command import run
from shakespeare.own import kernel as kernels
from shakespeare.own.trial.cases import CASES, WINDOWED
from shakespeare.own.trial.diagnosis import Finding
from shakespeare.own.trial.judge import environment
from shakespeare.own.trial.speed import Stop
from shakespeare.own.trial.verdict import Verdict

SECONDS = 60  # that a program under a sanitizer may take
# Calls under AddressSanitizer, (Nq, Nk, d, heads, causal, threads): sizes that tiles do not divide.
MEMORY = (
    *((1, 1, 4, 1, 0, 1), (3, 7, 8, 1, 1, 1), (63, 63, 32, 1, 0, 1), (63, 63, 24, 2, 1, 1)),
    *((7, 40, 33, 2, 1, 1), (123, 123, 80, 1, 0, 1), (130, 257, 16, 1, 0, 3)),
)
RACES = ((200, 200, 16, 4, 1, 4), (257, 257, 32, 1, 0, 3))  # the same under ThreadSanitizer
THREADS = re.compile(r"\b(threads?|for_each_item|on_threads|async|future|atomic|parallel)\b")
ERRORS = {"SEGV": "it reads or writes where no memory is", "FPE": "it divides a whole number by 0"}


def sanitize(file: Path, verdict: Verdict, stop: Stop = None) -> None:
    """Look for accesses out of bounds and for races; add them to the verdict. Raises Stopped if stop()."""
    if verdict.refused or verdict.finding and verdict.finding.kind == "endless":
        return
    for search in {".cpp": (_address, _thread), ".cu": (_cuda,)}.get(file.suffix, ()):
        finding = None
        try:
            said, finding = search(file, verdict, stop)
        except BuildError as error:
            said = f"not searched: {error}"
        except subprocess.TimeoutExpired:
            said = f"not searched: a sanitizer took more than {SECONDS} s"
        if said:
            verdict.memory.append(said)
        if finding:
            return verdict.add(finding)


def _address(file: Path, verdict: Verdict, stop: Stop) -> tuple[str, Finding | None]:
    calls = [*MEMORY]
    if verdict.wrong and verdict.case is not None:  # the case that crashed
        case = (CASES + WINDOWED)[verdict.case]
        calls.insert(0, (case.Nq, case.Nk, case.d, case.B * case.H, int(case.causal), case.threads))
    for sizes in calls:
        said = _said(file, "address", sizes, verdict.backward, stop)
        if finding := of_address_sanitizer(said, *names(file)):
            return f"AddressSanitizer: {finding.sentence}", finding
    return f"no access out of bounds in {len(MEMORY)} calls under AddressSanitizer", None


def _thread(file: Path, verdict: Verdict, stop: Stop) -> tuple[str, Finding | None]:
    text = kernels.joined(kernels.sources(file))
    if not THREADS.search(text):
        return "", None
    if re.search(r"\bomp\b", text):
        return "races were not searched: ThreadSanitizer does not know OpenMP's threads", None
    for sizes in RACES:
        said = _said(file, "thread", sizes, verdict.backward, stop)
        if "FATAL: ThreadSanitizer" in said:
            return "races were not searched: ThreadSanitizer does not run here", None
        if finding := of_thread_sanitizer(said, *names(file)):
            return f"ThreadSanitizer: {finding.sentence}", finding
    return f"no race in {len(RACES)} calls under ThreadSanitizer", None


def _said(file: Path, sanitizer: str, sizes: Sequence[int], backward: bool, stop: Stop) -> str:
    """What a sanitizer writes about a call."""
    Nq, Nk, d, heads, causal, threads = sizes
    # As tools/alone.cpp takes them
    words = "backward" if backward else "own", Nk, d, 64, 64, causal, heads, 1, 0, Nq, threads
    command = [str(recipes.own(file.resolve(), sanitizer).make()), *map(str, words)]
    if os.geteuid() == 0:  # root's program could read the judge's memory
        command = [sys.executable, "-m", "shakespeare.own.trial.player", "run", *command]
    return run(command, SECONDS, stop, ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1")[2]


def _cuda(file: Path, verdict: Verdict, stop: Stop) -> tuple[str, Finding | None]:
    if not (tool := shutil.which("compute-sanitizer")):
        return "not searched: compute-sanitizer was not found on PATH", None
    env = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each matrix has bounds
    words = [sys.executable, "-m", "shakespeare.own.trial.player", "once", str(file.resolve())]
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--print-limit", "3", *words]
        said = "\n".join(run(command, SECONDS, stop, **env)[1:])
        if finding := of_compute_sanitizer(said, *names(file)):
            return f"compute-sanitizer: {finding.sentence}", finding
    return "no access out of bounds and no race by compute-sanitizer", None


def names(file: Path) -> list[str]:
    """The names of the user's files that a file is compiled from."""
    return [path.name for path in kernels.sources(file)]


def lines_in(said: str, *names: str) -> list[str]:
    """Where a report names a user's file: ' at mine.cpp:28'."""
    either = "|".join(map(re.escape, names))
    return [f" at {place}" for place in re.findall(rf"(?:{either}):\d+", said)]


def of_address_sanitizer(said: str, *names: str) -> Finding | None:
    """The access that AddressSanitizer found, with its line in a user's file; else None."""
    if not (error := re.search(r"ERROR: AddressSanitizer: ([\w-]+)", said)):
        return None
    kind, where = error[1], "".join(lines_in(said, *names)[:1])
    access = re.search(r"(READ|WRITE) of size (\d+)", said)
    if kind in ERRORS or not access:
        return Finding("bounds" if kind == "SEGV" else "crash", f"{ERRORS.get(kind, kind)}{where}")
    place = f"out of bounds ({kind.replace('-', ' ')})"
    if region := re.search(r"located \d+ bytes (.*?)\[(0x[0-9a-f]+)", said):
        side = "before" if re.search("left|before", region[1]) else "beyond"
        matrices = {int(at, 16): matrix for matrix, at in re.findall(r"([a-z]\w*) at (0x[0-9a-f]+)", said)}
        place = f"{side} {matrices.get(int(region[2], 16), 'a matrix')}"
    return Finding("bounds", f"{access[1].lower()} of {access[2]} bytes {place}{where}")


def of_thread_sanitizer(said: str, *names: str) -> Finding | None:
    """The race that ThreadSanitizer found in a user's file; else None."""
    for race in said.split("WARNING: ThreadSanitizer: data race")[1:]:
        stacks = re.split(r"\n\s+(?:Previous )?(?:[Ww]rite|[Rr]ead|Atomic) ", race)[1:3]
        at = [line for stack in stacks for line in lines_in(stack, *names)[:1]]
        if at:
            also = f" and line {at[1].rpartition(':')[2]}" if len(set(at)) > 1 else ""
            return Finding("race", f"threads use the same memory, and one writes,{at[0]}{also}")
    return None


def of_compute_sanitizer(said: str, *names: str) -> Finding | None:
    """The access or the race that compute-sanitizer found; else None."""
    where = "".join(lines_in(said, *names)[:1])
    if access := re.search(r"Invalid (\S+) (read|write|atomic) of size (\d+)", said):
        memory = access[1].strip("_")
        return Finding("bounds", f"{access[2]} of {access[3]} bytes out of bounds of {memory} memory{where}")
    if re.search(r"Race reported|Potential \S+ hazard|hazard detected", said):
        what = f"threads of a block race for shared memory{where}: is a __syncthreads() missing?"
        return Finding("race", what)
    return None
