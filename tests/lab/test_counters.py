"""Counting cache misses: the tools' output, the difference of two runs, and a comparison of parts."""

import os

import pytest
from support import found_program, script

from shakespeare.attention_ext import BuildError
from shakespeare.attention_ext.processor import Cache
from shakespeare.lab import counters, machine
from shakespeare.lab.traffic import Case

L1, L2 = Cache(1, 32 << 10, 8, 64), Cache(2, 1 << 20, 8, 64)

PERF = """\
12345,,LLC-store-misses:u,0.67%,448616,100.00,1.52,of all L1-dcache accesses
<not supported>,,L1-dcache-store-misses:u,0.00%,0,100.00,,
<not counted>,,cpu_atom/L1-dcache-load-misses/u,0,0.00,,
900,,cpu_core/L1-dcache-load-misses/u,448616,100.00,,
30,,cpu_atom/LLC-load-misses/u,448616,100.00,,
4,,cpu_core/LLC-load-misses/u,448616,100.00,,
"""

# A perf that runs its command and reports 1000 + 10 * REPEATS of each event. It does not support store misses
# in the last level.
FAKE_PERF = """\
while [ "$1" != -- ]; do shift; done
"$2" "$3" "$4" "$5" "$6" "$7" "$8" "$9" "${10}" "${11}" || exit
n=$((1000 + 10 * ${10}))
echo "$n,,L1-dcache-load-misses:u,0.67%,448616,100.00,," >&2
echo "$n,,L1-dcache-store-misses:u,0.67%,448616,100.00,," >&2
echo "$n,,LLC-load-misses:u,0.67%,448616,100.00,," >&2
echo "<not supported>,,LLC-store-misses:u,0.00%,0,100.00,," >&2
"""


@pytest.fixture
def cachegrind(extension):
    found_program("valgrind")


def count(part="part4", N=64, d=16, caches=None, timeout=1200):
    return counters.misses(part, Case(N, N, d, br=32, bc=32), "off", caches, timeout)


def test_what_perf_prints():
    """On a processor with two kinds of cores, too."""
    expected = {"LLC-store-misses": 12345, "L1-dcache-load-misses": 900, "LLC-load-misses": 34}
    assert counters.parse(PERF) == expected


@pytest.mark.full
def test_perf_counts_what_one_call_adds(extension, tmp_path, monkeypatch):
    script(tmp_path / "perf", FAKE_PERF)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(counters, "SWEPT_BYTES", 1 << 20)
    monkeypatch.setattr(counters.processor, "caches", lambda: (L1, L2))
    note = "perf does not count LLC-store-misses here"
    assert count() == counters.Misses(l1=64 * (10 + 10), last=64 * 10, note=note)


def test_a_missing_tool_is_reported(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    for tool, caches in (("perf", None), ("valgrind", (L1, L2))):
        counted = count(caches=caches)
        assert (counted.l1, counted.last, counted.note) == (None, None, f"{tool} was not found on PATH")


@pytest.mark.full
def test_what_cannot_be_counted_is_named(cachegrind, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 2**34)
    with pytest.raises(ValueError, match="N is 1048576; the matrices that are counted need 409. GiB, and 16"):
        count("part1", N=2**20, caches=(L1, L2))
    with pytest.raises(BuildError, match="valgrind cannot run .*Cache set count is not a power of two"):
        count(caches=(L1, Cache(2, 3 << 20, 16, 64)))
