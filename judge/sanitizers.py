"""Accesses out of bounds and races of a user's kernel, by builds with sanitizers, which name lines."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import BuildError
from shakespeare.judge.cases import CASES, WINDOWED, Case
from shakespeare.judge.diagnosis import Finding
from shakespeare.judge.speed import Stop
from shakespeare.lab.subprocesses import environment, run

SECONDS = 60  # that a program under a sanitizer may take
# Calls under AddressSanitizer: sizes that tiles do not divide.
MEMORY = (
    Case(1, 1, 1, 1, 4),
    Case(1, 1, 3, 7, 8, causal=True),
    Case(1, 1, 63, 63, 32),
    Case(1, 2, 63, 63, 24, causal=True),
    Case(1, 2, 7, 40, 33, causal=True),
    Case(1, 1, 123, 123, 80),
    Case(1, 1, 130, 257, 16, threads=3),
)
RACES = Case(1, 4, 200, 200, 16, causal=True, threads=4), Case(1, 1, 257, 257, 32, threads=3)
THREADS = re.compile(r"\b(threads?|for_each_item|on_threads|async|future|atomic|parallel)\b")
ERRORS = {"SEGV": "it reads or writes where no memory is", "FPE": "it divides a whole number by 0"}
Reports = Iterator[tuple[str, Finding | None]]  # what a sanitizer says, and what it has found


def search(file: Path, backward: bool, crashed: int | None, dtype: str, stop: Stop = None) -> Reports:
    """Yield what each sanitizer says until one finds something. Raises Stopped if stop().

    crashed: the number of the first case that is wrong or ends the process, if there is one.
    """
    cases = MEMORY if crashed is None else ((CASES + WINDOWED)[crashed], *MEMORY)
    searches = []
    if file.suffix == ".cpp":
        searches = [partial(_address, file, backward, cases, stop)]
        if THREADS.search(user_kernel.joined(user_kernel.sources(file))):
            searches.append(partial(_races, file, backward, stop))
    elif file.suffix == ".cu":
        searches = [partial(_cuda, file, dtype, stop)]
    for each in searches:
        finding = None
        try:
            message, finding = each()
        except BuildError as error:
            message = f"not searched: {error}"
        except subprocess.TimeoutExpired:
            message = f"not searched: a sanitizer took more than {SECONDS} s"
        yield message, finding
        if finding:
            return


def _address(file: Path, backward: bool, cases: Sequence[Case], stop: Stop) -> tuple[str, Finding | None]:
    for case in cases:
        if finding := parse_address_sanitizer(_report(file, "address", case, backward, stop), *names(file)):
            return f"AddressSanitizer: {finding.sentence}", finding
    return f"no access out of bounds in {len(MEMORY)} calls under AddressSanitizer", None


def _races(file: Path, backward: bool, stop: Stop) -> tuple[str, Finding | None]:
    if re.search(r"\bomp\b", user_kernel.joined(user_kernel.sources(file))):
        return "races were not searched: ThreadSanitizer does not know OpenMP's threads", None
    for case in RACES:
        report = _report(file, "thread", case, backward, stop)
        if "FATAL: ThreadSanitizer" in report:
            return "races were not searched: ThreadSanitizer does not run here", None
        if finding := parse_thread_sanitizer(report, *names(file)):
            return f"ThreadSanitizer: {finding.sentence}", finding
    return f"no race in {len(RACES)} calls under ThreadSanitizer", None


def _report(file: Path, sanitizer: str, case: Case, backward: bool, stop: Stop) -> str:
    """What a sanitizer writes about a call."""
    # As tools/alone.cpp takes them
    sizes = case.Nk, case.d, 64, 64, int(case.causal), case.B * case.H, 1, 0, case.Nq, case.threads
    program = str(recipes.user_kernel(file.resolve(), sanitizer).make())
    command = [program, "backward" if backward else "forward", *map(str, sizes)]
    if os.geteuid() == 0:  # root's program could read the judge's memory
        command = [sys.executable, "-m", "shakespeare.judge.player_process", "run", *command]
    return run(command, SECONDS, stop, ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1")[2]


def _cuda(file: Path, dtype: str, stop: Stop) -> tuple[str, Finding | None]:
    tool = shutil.which("compute-sanitizer")
    if not tool:
        return "not searched: compute-sanitizer was not found on PATH", None
    env = environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each matrix has bounds
    words = [sys.executable, "-m", "shakespeare.judge.player_process", "once", str(file.resolve()), dtype]
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--print-limit", "3", *words]
        report = "\n".join(run(command, SECONDS, stop, **env)[1:])
        if finding := parse_compute_sanitizer(report, *names(file)):
            return f"compute-sanitizer: {finding.sentence}", finding
    return "no access out of bounds and no race by compute-sanitizer", None


def names(file: Path) -> list[str]:
    """The names of the user's files that a file is compiled from."""
    return [path.name for path in user_kernel.sources(file)]


def lines_in(report: str, *names: str) -> list[str]:
    """Where a report names a user's file: ' at mine.cpp:28'."""
    either = "|".join(map(re.escape, names))
    return [f" at {place}" for place in re.findall(rf"(?:{either}):\d+", report)]


def parse_address_sanitizer(report: str, *names: str) -> Finding | None:
    """The access that AddressSanitizer found, with its line in a user's file; else None."""
    error = re.search(r"ERROR: AddressSanitizer: ([\w-]+)", report)
    if not error:
        return None
    error_name = error[1]
    where = "".join(lines_in(report, *names)[:1])
    access = re.search(r"(READ|WRITE) of size (\d+)", report)
    if error_name in ERRORS or not access:
        return Finding(
            "bounds" if error_name == "SEGV" else "crash", f"{ERRORS.get(error_name, error_name)}{where}"
        )
    place = f"out of bounds ({error_name.replace('-', ' ')})"
    if region := re.search(r"located \d+ bytes (.*?)\[(0x[0-9a-f]+)", report):
        side = "before" if re.search("left|before", region[1]) else "beyond"
        matrices = {int(at, 16): matrix for matrix, at in re.findall(r"([a-z]\w*) at (0x[0-9a-f]+)", report)}
        place = f"{side} {matrices.get(int(region[2], 16), 'a matrix')}"
    return Finding("bounds", f"{access[1].lower()} of {access[2]} bytes {place}{where}")


def parse_thread_sanitizer(report: str, *names: str) -> Finding | None:
    """The race that ThreadSanitizer found in a user's file; else None."""
    for race in report.split("WARNING: ThreadSanitizer: data race")[1:]:
        stacks = re.split(r"\n\s+(?:Previous )?(?:[Ww]rite|[Rr]ead|Atomic) ", race)[1:3]
        at = [line for stack in stacks for line in lines_in(stack, *names)[:1]]
        if at:
            also = f" and line {at[1].rpartition(':')[2]}" if len(set(at)) > 1 else ""
            return Finding("race", f"threads use the same memory, and one writes,{at[0]}{also}")
    return None


def parse_compute_sanitizer(report: str, *names: str) -> Finding | None:
    """The access or the race that compute-sanitizer found; else None."""
    where = "".join(lines_in(report, *names)[:1])
    if access := re.search(r"Invalid (\S+) (read|write|atomic) of size (\d+)", report):
        memory = access[1].strip("_")
        return Finding("bounds", f"{access[2]} of {access[3]} bytes out of bounds of {memory} memory{where}")
    if re.search(r"Race reported|Potential \S+ hazard|hazard detected", report):
        what = f"threads of a block race for shared memory{where}: is a __syncthreads() missing?"
        return Finding("race", what)
    return None
