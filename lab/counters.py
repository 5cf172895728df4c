"""Bytes that one call of a part brings into the caches, counted by the processor or by a simulator.

Both run a program of one part on one thread twice, without a call and with one: the difference is the call's.
"""

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from shakespeare.attention_ext import BuildError, processor
from shakespeare.attention_ext.build import recipes
from shakespeare.attention_ext.parts import check_part
from shakespeare.attention_ext.processor import Cache
from shakespeare.lab.machine import check_memory
from shakespeare.lab.scratch import scratch
from shakespeare.lab.subprocesses import run
from shakespeare.lab.traffic import FLOAT_BYTES, Block, Case

SWEPT_BYTES = 256 << 20  # bytes written before each call under perf, to empty all caches
# Valgrind does not support AVX-512. Every supported compiler has the name 'haswell' for x86-64-v3.
SIMULATED = {"x86_64": "haswell", "aarch64": "armv8-a"}.get(platform.machine(), "native")
# Missed reads and missed writes of the first level, and of the last; cachegrind's are sums.
EVENTS = {
    "perf": (("L1-dcache-load-misses", "L1-dcache-store-misses"), ("LLC-load-misses", "LLC-store-misses")),
    "cachegrind": (("D1",), ("LLd",)),
}
COUNTED = re.compile(
    r"^(?P<count>[\d.]+),.*\b(?P<event>(?:L1-dcache|LLC)-\w+-misses)\b"
    r"|(?P<simulated>D1|LLd) +misses: +(?P<misses>[\d,]+)",
    re.M,
)
COMPLAINT = re.compile(r"(?!==|--|\s*Error:\s*$)\s*\S")  # a line in which a tool says what is wrong


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
    tool = shutil.which(name)
    if tool is None:
        return Misses(None, None, f"{name} was not found on PATH")
    swept = SWEPT_BYTES if caches is None else 2 * max(cache.size for cache in caches)
    need = 4 * FLOAT_BYTES * case.heads * case.K + scratch(part, case, simd) + swept
    check_memory(f"N is {case.Nk}; the matrices that are counted", need)
    march = "native" if caches is None else SIMULATED
    row = check_part(part)
    recipe = recipes.user_kernel(row.file, "simulated", march) if row.file else recipes.program(simd, march)
    program = recipe.make()

    case_words = (row.operator, case.Nk, case.d, case.br, case.bc, int(case.causal), case.heads)
    counts = []
    for repeats in (0, 1):
        command = [*options(caches), program, *case_words, repeats, swept]
        try:
            code, _, output = run([tool, *map(str, command)], timeout, LC_ALL="C")
        except subprocess.TimeoutExpired:
            takes = f"{source} takes more than {timeout:g} s for it"
            raise ValueError(f"N is {case.Nk}; {takes}, so it must be smaller") from None
        counts.append(parse(output))
        if code != 0 or caches and not counts[-1]:
            why = next(filter(COMPLAINT.match, output.splitlines()), f"it ended with {code}").strip()
            if caches:
                raise BuildError(f"valgrind cannot run {program}: {why}")
            return Misses(None, None, f"perf stat failed: {why}")

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


def options(caches: tuple[Cache, Cache] | None) -> list[str]:
    """The arguments of perf, for the mean of five runs, or of valgrind, which simulates caches."""
    if caches is None:
        events = ",".join(f"{event}:u" for pair in EVENTS["perf"] for event in pair)
        return ["stat", "-x,", "-r5", "-e", events, "--"]
    first, last = (f"{cache.size},{cache.ways},{cache.line}" for cache in caches)
    # Instructions go through the last level too: a fixed I1 gives the same counts on all machines.
    simulated = [f"--D1={first}", "--I1=32768,8,64", f"--LL={last}"]
    return ["--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null", *simulated]


def parse(output: str) -> dict[str, float]:
    """Counts by event from what perf or cachegrind prints, without <not supported> and <not counted> ones.

    A processor with two kinds of cores has a line for each kind, such as cpu_core/EVENT/u; they are added.
    """
    counts: dict[str, float] = {}
    for line in COUNTED.finditer(output):
        event = line["event"] or line["simulated"]
        number = line["count"] or line["misses"].replace(",", "")
        counts[event] = counts.get(event, 0) + float(number)
    return counts
