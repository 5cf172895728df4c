"""The counts of CUDA kernels: bank conflicts, meetings of tiles, and figures of the walk."""

import itertools
import re
from pathlib import Path

import pytest
from support import naming

from shakespeare.attention_ext.cuda.kernels import EVERY
from shakespeare.attention_ext.cuda.launches import Compiled, Gpu
from shakespeare.attention_ext.cuda.tiles import Access
from shakespeare.lab.cuda.traffic import WAVEFRONT, counts, visits, wavefronts
from shakespeare.lab.formats import size_text
from shakespeare.lab.traffic import Case

H200 = Gpu("NVIDIA H200", (9, 0), 227 << 10, 132, 60 << 20)
WALK = Path(__file__).parents[3] / "docs" / "learn" / "gpu.md"


def count(name, N=4096, d=32, heads=100, causal=False):
    row = EVERY[name]
    dtype = row.dtypes[0]
    tile = row.tile(d, dtype, H200)
    kernel = Compiled(row, tile, row.padded(d), H200, None, dict.fromkeys(row.functions, 0))
    return counts(Case(N, N, d, heads, causal, dtype=dtype), kernel, resident=264)


def test_bank_conflicts():
    # measured on an H200, of one number, two and four a lane
    for rows, stride, vector, scattered, needed, fewest in (
        (32, 1, 1, False, 1, 1),
        (1, 0, 1, False, 1, 1),
        (32, 2, 1, False, 2, 1),
        (32, 32, 1, False, 32, 1),
        (32, 33, 1, False, 1, 1),
        (16, 32, 2, True, 32, 1),
        (32, 4, 4, False, 4, 4),
        (8, 36, 4, True, 4, 1),
        (8, 36, 4, False, 2, 1),
    ):
        access = Access("K", 1, rows, stride, vector, scattered)
        assert wavefronts(access) == (needed, fewest), access


@pytest.mark.parametrize("causal", [False, True])
def test_meetings_of_tiles(causal):
    for Nq, Nk, br, bc in [(64, 64, 16, 16), (100, 100, 32, 48), (7, 40, 3, 5), (1, 9, 64, 2)]:
        met = 0
        for i0 in range(0, Nq, br):
            last = min(i0 + br, Nq) - 1
            keys = last + 1 + Nk - Nq if causal else Nk
            met += -(-keys // bc)
        assert visits(Case(Nq, Nk, 8, causal=causal), br, bc) == met, (Nq, Nk, br, bc)


@pytest.mark.parametrize("name", EVERY)
def test_every_kernel_counts_at_least_what_it_must(name):
    for d, causal in itertools.product((8, 32, 80, 256), (False, True)):
        with naming(d, causal):
            found = count(name, N=300, d=d, heads=3, causal=causal)
            assert all(each.wavefronts >= each.fewest > 0 for each in found.shared)
            assert bool(found.shared) == (name[0] in "12345")
            tensors = 4 * 300 * 3 * d * EVERY[name].dtypes[0].bytes
            assert found.from_memory(1) >= found.from_memory(H200.l2) >= tensors
            assert found.exponentials >= 3 * 300 * (301 / 2 if causal else 300)
            assert found.blocks >= 3


def test_the_walk_has_these_figures():
    """docs/learn/gpu.md quotes the bytes of K and of all matrices, and the ratios to the fewest."""
    quoted = re.findall(r"--kernel (\S+) \|[^`]*\n  K +(.+)\n  all +(.+)\n", WALK.read_text())
    assert [name for name, *_ in quoted] == ["2", "2-unpadded"]
    for name, *lines in quoted:
        found = count(name)
        (key,) = (each for each in found.shared if each.name == "K")
        fewest = sum(each.fewest for each in found.shared)
        for line, needed, least in zip(lines, (key.wavefronts, found.wavefronts), (key.fewest, fewest)):
            assert line.split("  ")[0] == size_text(WAVEFRONT * needed), name
            assert f" {needed / least:.3g} x " in line, name
        for size in (found.from_memory(1), found.from_memory(H200.l2)):
            assert size_text(size) in lines[1], name
