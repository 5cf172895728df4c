"""Bytes that one call of a part brings into the caches, counted by the processor or by a simulator.

Both run a program of the kernels alone, one part on one thread without Python; attention_ext/build/recipes.py
compiles it. It runs twice, with more calls in the second run. The difference divided by the additional calls
is one call's count; all other work of the program cancels.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attention_ext import PARTS, BuildError, processor
from attention_ext.build import recipes
from attention_ext.processor import Cache
from lab import costs
from lab.machine import available_memory

MOST_SIZE = 2**20  # largest N, d and number of heads in alone.cpp
MOST_TILE_SIDE = 2**31
SWEPT_BYTES = 256 << 20  # bytes written before each cold call under perf, to empty all caches
WARM_CALLS = 20  # calls under perf, whose counts vary
# Valgrind does not support AVX-512. Every supported compiler has the name 'haswell' for x86-64-v3.
SIMULATED = {"x86_64": "haswell", "aarch64": "armv8-a"}.get(platform.machine(), "native")
# Missed reads and missed writes of the first level, and of the last.
EVENTS = {
    "perf": (
        ("L1-dcache-load-misses", "L1-dcache-store-misses"),
        ("LLC-load-misses", "LLC-store-misses"),
    ),
    "cachegrind": (("D1mr", "D1mw"), ("DLmr", "DLmw")),
}


@dataclass(frozen=True)
class Misses:
    """Bytes that one call brings into the first level and into the last, by missed reads and writes.

    source: 'perf' or 'cachegrind'. l1, last: None if not counted. note: the missing counts and the reason, ''
    if none is missing. Lines that are written back are not counted.
    """

    source: str
    l1: float | None
    last: float | None
    note: str = ""


class Refused(Exception):
    """perf may not count here; the message is the reason."""


@dataclass(frozen=True)
class Call:
    """One call of a part that is a kernel, on (1, heads, N, d).

    br, bc: the tile of a tiled part. simd: 'auto', 'portable' or 'off'.
    state: 'cold' is a call after all caches were emptied. Each byte that must come in is then counted, as in
    lab.costs. 'warm' is a call after another one on the same matrices; data that fits the cache costs
    nothing.
    """

    part: str
    N: int
    d: int
    heads: int = 1
    br: int = 1
    bc: int = 1
    causal: bool = False
    simd: str = "auto"
    state: str = "cold"

    def check(self) -> None:
        """Raise ValueError naming the wrong field."""
        counted = [name for name, row in PARTS.items() if row.operator]
        if self.part not in counted:
            raise ValueError(f"part is {self.part!r}; it must be one of {', '.join(counted)}")
        for name in ("N", "d", "heads", "br", "bc"):
            size, most = getattr(self, name), MOST_TILE_SIDE if name in ("br", "bc") else MOST_SIZE
            if not 1 <= size <= most:
                raise ValueError(f"{name} is {size}; it must be from 1 to {most}")
        if self.state not in ("cold", "warm"):
            raise ValueError(f"state is {self.state!r}; it must be cold or warm")

    def check_memory(self, swept: int) -> None:
        """Raise ValueError if the program would not fit this machine's memory.

        swept: bytes that it sweeps.
        """
        case = costs.Case(self.N, self.N, self.d, heads=self.heads, br=self.br, bc=self.bc)
        scratch = costs.scratch(self.part, case, self.simd)
        need = 4 * 4 * self.heads * self.N * self.d + scratch + swept
        available = available_memory()
        if available is not None and need > available:
            raise ValueError(
                f"N is {self.N}; counting would need {need / 2**30:.1f} GiB and {available / 2**30:.1f} GiB "
                "are free, so it must be smaller"
            )

    def arguments(self, repeats: int, swept: int) -> list[str]:
        """The arguments of tools/alone.cpp for `repeats` calls, each after a sweep of `swept` bytes."""
        sizes = [self.N, self.d, self.br, self.bc, int(self.causal), self.heads, repeats, swept]
        return [str(PARTS[self.part].operator), *map(str, sizes)]


def misses(call: Call, caches: tuple[Cache, Cache] | None = None, timeout: float = 120) -> Misses:
    """The bytes that one call brings into the caches.

    caches: None lets the processor count, through perf. Its last level is that of its LLC events, and it
    counts some of the prefetched lines. With a pair cachegrind simulates the first level and one other level,
    both with least recently used lines replaced; it is fifty times slower than the call. On x86 the part is
    then compiled for AVX2.
    timeout: seconds that one run may take.
    Raises ValueError for wrong arguments and for calls that take too long or too much memory, BuildError if
    the program cannot be compiled or does not run.
    """
    call.check()
    for cache in caches or ():
        check_cache(cache)
    source, name = ("perf", "perf") if caches is None else ("cachegrind", "valgrind")
    tool = shutil.which(name)
    if tool is None:
        return Misses(source, None, None, f"{name} was not found on PATH")
    emptying = SWEPT_BYTES if caches is None else 2 * max(c.size for c in caches)
    swept = emptying if call.state == "cold" else 0
    call.check_memory(swept)
    program = recipes.program(call.simd, "native" if caches is None else SIMULATED).make()

    first = 1 if call.state == "warm" else 0
    more = WARM_CALLS if caches is None and call.state == "warm" else 1  # cachegrind's counts do not vary
    counts = []
    for repeats in (first, first + more):
        command = [str(program), *call.arguments(repeats, swept)]
        try:
            counts.append(
                _by_perf(tool, command, timeout)
                if caches is None
                else _by_cachegrind(tool, command, caches, timeout)
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"N is {call.N}; {source} takes more than {timeout:g} s for it, so it must be smaller"
            ) from None
        except Refused as error:
            return Misses(source, None, None, str(error))

    lines = [cache.line for cache in caches or (processor.caches()[0],) * 2]
    counted = [event for event in counts[0] if event in counts[1]]
    l1, last = (
        # perf's counts vary: the difference for a short call may be below 0
        line * max(0.0, sum(counts[1][e] - counts[0][e] for e in events if e in counted) / more)
        if events[0] in counted
        else None
        for line, events in zip(lines, EVENTS[source])
    )
    missing = [event for events in EVENTS[source] for event in events if event not in counted]
    which = ", ".join(missing) if counted else "cache misses"
    return Misses(source, l1, last, f"{source} does not count {which} here" if missing else "")


def simulated_block(block: costs.Block) -> costs.Block:
    """The sizes of a kernel compiled for AVX2 if the simulator supports no wider vectors."""
    return replace(block, lanes=8, panel=24, rows=4)


def check_cache(cache: Cache) -> None:
    """Raise ValueError for a cache that cachegrind cannot simulate."""
    sets, rest = divmod(cache.size, cache.ways * cache.line)
    if rest or not _power_of_two(sets) or not _power_of_two(cache.line) or cache.line < 16:
        raise ValueError(
            f"caches' level {cache.level} is {cache.size} B in {cache.ways} ways of {cache.line} B "
            "lines; for cachegrind lines, of 16 B or more, and the number of sets must be powers of two"
        )


def _power_of_two(n: int) -> bool:
    return n >= 1 and n & (n - 1) == 0


def _by_perf(perf: str, command: Sequence[str], timeout: float) -> dict[str, float]:
    """Counts by event, the mean of five runs. Raises Refused."""
    events = ",".join(f"{event}:u" for pair in EVENTS["perf"] for event in pair)
    code, output = _run([perf, "stat", "-x,", "-r5", "-e", events, "--", *command], timeout)
    if code != 0:
        complaints = (line for line in output.splitlines() if line.strip() not in ("", "Error:"))
        raise Refused(f"perf stat failed: {next(complaints, f'it ended with {code}').strip()}")
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
    valgrind: str, command: Sequence[str], caches: tuple[Cache, Cache], timeout: float
) -> dict[str, float]:
    """Counts by event. Raises BuildError if valgrind fails."""
    D1, LL = (f"{cache.size},{cache.ways},{cache.line}" for cache in caches)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        # Instructions go through the last level too: a fixed I1 gives the same counts on all machines.
        options = ["--tool=cachegrind", "--cache-sim=yes", f"--D1={D1}", "--I1=32768,8,64", f"--LL={LL}"]
        options.append(f"--cachegrind-out-file={out}")
        code, output = _run([valgrind, *options, *command], timeout)
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


def _run(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """The exit code and standard error of a command, killed with its children after `timeout` seconds."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LC_ALL": "C"},
        start_new_session=True,
    )
    with process:
        try:
            _, output = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output
