"""The counts of CUDA kernels: bank conflicts, meetings of tiles, and totals that can be reckoned by hand."""

import itertools

import pytest
from support import naming

from shakespeare.attention_ext.cuda.kernels import EVERY
from shakespeare.lab.cuda.architectures import SHEETS
from shakespeare.lab.cuda.costs import LANES, SAME, Launch, banked, counted
from shakespeare.lab.traffic import Case

L2 = 50 << 20
GPU = SHEETS["sm_90"]


def count(name, N=4096, d=32, heads=100, causal=False, dtype=None):
    kernel = EVERY[name]
    dtype = dtype or kernel.dtypes[0]
    tile = kernel.tile(d, dtype, GPU)
    case = Case(N, N, d, heads, causal, tile.br, tile.bc, 1, dtype)
    return counted(Launch(case, kernel, tile, resident=264))


def test_bank_conflicts():
    # measured on an H200, of one number, two and four a lane
    for addresses, width, wavefronts, fewest in (
        (range(32), 1, 1, 1),
        (SAME, 1, 1, 1),
        (range(0, 64, 2), 1, 2, 1),
        (range(0, 32 * 32, 32), 1, 32, 1),
        (range(0, 33 * 32, 33), 1, 1, 1),
        ([lane % 16 * 32 for lane in LANES], 2, 32, 1),
        (range(0, 128, 4), 4, 4, 4),
        ([lane % 8 * 36 for lane in LANES], 4, 4, 1),
        ([lane // 2 % 8 * 36 for lane in LANES], 4, 2, 1),
    ):
        assert banked(tuple(addresses), width) == (wavefronts, fewest), (addresses, width)


@pytest.mark.parametrize("causal", [False, True])
def test_meetings_of_tiles(causal):
    for Nq, Nk, br, bc in [(64, 64, 16, 16), (100, 100, 32, 48), (7, 40, 3, 5), (1, 9, 64, 2)]:
        met = 0
        for i0 in range(0, Nq, br):
            last = min(i0 + br, Nq) - 1
            keys = last + 1 + Nk - Nq if causal else Nk
            met += -(-keys // bc)
        case, kernel = Case(Nq, Nk, 8, causal=causal), EVERY["1"]
        launch = Launch(case, kernel, kernel.tile(8, case.dtype, GPU), 1)
        assert launch.visits(br, bc) == met, (Nq, Nk, br, bc)


@pytest.mark.parametrize("name", EVERY)
def test_every_kernel_counts_at_least_what_it_must(name):
    for d, causal in itertools.product((8, 32, 80, 128 if name == "backward4" else 256), (False, True)):
        with naming(d, causal):
            found = count(name, N=300, d=d, heads=3, causal=causal)
            assert all(each.wavefronts >= each.fewest > 0 for each in found.shared)
            tensors = 4 * 300 * 3 * d * EVERY[name].dtypes[0].bytes
            assert found.asked >= found.from_memory(L2) >= tensors
            assert found.exponentials >= 3 * 300 * (301 / 2 if causal else 300)
            assert found.blocks >= 3
