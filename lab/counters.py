"""Bytes that one call of a part brings into the caches, counted by the processor or by a simulator.

Both run a program of one part on one thread twice, without a call and with one: the difference is the call's.
"""

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shakespeare.attention_ext import BuildError, processor
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import check_part
from shakespeare.attention_ext.processor import Cache
from shakespeare.lab.command import run
from shakespeare.lab.costs import scratch
from shakespeare.lab.machine import check_memory
from shakespeare.lab.traffic import FLOAT_BYTES, Block, Case

SWEPT_BYTES = 256 << 20  # bytes written before each call under perf, to empty all caches
# Valgrind does not support AVX-512. Every supported compiler has the name 'haswell' for x86-64-v3.
SIMULATED = {"x86_64": "haswell", "aarch64": "armv8-a"}.get(platform.machine(), "native")
# Missed reads and missed writes of the first level, and of the last.
EVENTS = {
    "perf": (("L1-dcache-load-misses", "L1-dcache-store-misses"), ("LLC-load-misses", "LLC-store-misses")),
    "cachegrind": (("D1mr", "D1mw"), ("DLmr", "DLmw")),
}


@dataclass(frozen=True)
class Misses:
    """Bytes of missed reads and writes of one call into the first and last level, without write-backs.

    l1, last: None if not counted. note: the missing counts and the reason, '' if none is missing.
    """

    l1: float | None
    last: float | None
    note: str = ""


def misses(part: str, case: Case, simd: str, caches: tuple[Cache, Cache] | None, timeout: float) -> Misses:
    """The bytes that one call of a part that is a kernel, on one thread, brings into the empty caches.

    part: also a C++ or ISPC file. case: queries as many as keys. simd: 'auto', 'portable' or 'off'. caches:
    None for perf, whose LLC events count some prefetched lines; a pair is simulated by cachegrind (LRU), 50
    times slower, on x86 compiled for AVX2. timeout: seconds of one run. Raises ValueError for a call that
    takes too long or too much memory, BuildError if the program or cachegrind fails.
    """
    source, name = ("perf", "perf") if caches is None else ("cachegrind", "valgrind")
    if (tool := shutil.which(name)) is None:
        return Misses(None, None, f"{name} was not found on PATH")
    swept = SWEPT_BYTES if caches is None else 2 * max(cache.size for cache in caches)
    need = 4 * FLOAT_BYTES * case.heads * case.K + scratch(part, case, simd) + swept
    check_memory(f"N is {case.Nk}; the matrices that are counted", need)
    march, row = "native" if caches is None else SIMULATED, check_part(part)
    recipe = recipes.own(row.file, "simulated", march) if row.file else recipes.program(simd, march)

    asked = (recipe.make(), row.operator, case.Nk, case.d, case.br, case.bc, int(case.causal), case.heads)
    commands = [[str(word) for word in (*asked, repeats, swept)] for repeats in (0, 1)]
    count = partial(_by_cachegrind, caches=caches) if caches else _by_perf
    try:
        counts = [count(tool, command, timeout=timeout) for command in commands]
    except subprocess.TimeoutExpired:
        takes = f"{source} takes more than {timeout:g} s for it"
        raise ValueError(f"N is {case.Nk}; {takes}, so it must be smaller") from None
    except BuildError as error:
        if caches:
            raise
        return Misses(None, None, str(error))

    known = counts[0].keys() & counts[1].keys()
    missing = [event for events in EVENTS[source] for event in events if event not in known]
    sums: list[float | None] = []
    for cache, events in zip(caches or (processor.caches()[0],) * 2, EVENTS[source]):
        lines = sum(counts[1][event] - counts[0][event] for event in events if event in known)
        # perf's counts vary: the difference for a short call may be below 0
        sums.append(cache.line * max(0.0, lines) if events[0] in known else None)
    uncounted = ", ".join(missing) if known else "cache misses"
    l1, last = sums
    return Misses(l1, last, f"{source} does not count {uncounted} here" if missing else "")


def simulated_block(block: Block) -> Block:
    """The sizes of a kernel compiled for AVX2 if the simulator supports no wider vectors."""
    return replace(block, lanes=8, panel=24, rows=4)


def _by_perf(perf: str, command: Sequence[str], timeout: float) -> dict[str, float]:
    """Counts by event, the mean of five runs. Raises BuildError if perf may not count."""
    events = ",".join(f"{event}:u" for pair in EVENTS["perf"] for event in pair)
    code, _, output = run([perf, "stat", "-x,", "-r5", "-e", events, "--", *command], timeout, LC_ALL="C")
    if code != 0:
        complaints = (line for line in output.splitlines() if line.strip() not in ("", "Error:"))
        raise BuildError(f"perf stat failed: {next(complaints, f'it ended with {code}').strip()}")
    return parse_perf(output)


def parse_perf(output: str) -> dict[str, float]:
    """Counts by event from the output of `perf stat -x,`, without <not supported> and <not counted> ones.

    A processor with two kinds of cores has a line for each kind, such as cpu_core/EVENT/u; they are added.
    """
    counts: dict[str, float] = {}
    for line in output.splitlines():
        fields = line.split(",")
        if len(fields) < 3 or fields[0].startswith("<"):
            continue
        name = next((e for pair in EVENTS["perf"] for e in pair if e in fields[2]), None)
        if name:
            counts[name] = counts.get(name, 0) + float(fields[0])
    return counts


def _by_cachegrind(
    valgrind: str, command: Sequence[str], timeout: float, caches: tuple[Cache, Cache]
) -> dict[str, float]:
    """Counts by event. Raises BuildError if valgrind fails."""
    D1, LL = (f"{cache.size},{cache.ways},{cache.line}" for cache in caches)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        # Instructions go through the last level too: a fixed I1 gives the same counts on all machines.
        options = ["--tool=cachegrind", "--cache-sim=yes", f"--D1={D1}", "--I1=32768,8,64", f"--LL={LL}"]
        options.append(f"--cachegrind-out-file={out}")
        code, _, output = run([valgrind, *options, *command], timeout, LC_ALL="C")
        if code != 0 or not out.exists():
            complaints = (line for line in output.splitlines() if line and not line.startswith(("==", "--")))
            raise BuildError(f"valgrind cannot run {command[0]}: {next(complaints, f'it ended with {code}')}")
        return parse_cachegrind(out.read_text())


def parse_cachegrind(text: str) -> dict[str, float]:
    """Counts by event of the whole program, from cachegrind's file."""
    rows = dict(line.split(": ", 1) for line in text.splitlines() if line.startswith(("events:", "summary:")))
    counts = dict(zip(rows.get("events", "").split(), map(float, rows.get("summary", "").split())))
    if missing := [event for pair in EVENTS["cachegrind"] for event in pair if event not in counts]:
        raise BuildError(f"cachegrind's file has no {', '.join(missing)}")
    return counts
