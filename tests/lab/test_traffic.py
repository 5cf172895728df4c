"""The algorithms' counts of work and traffic, against simple sums and a cache simulator."""

import pytest

from shakespeare.attention_ext import PARTS, attention
from shakespeare.attention_ext.processor import Cache
from shakespeare.lab import correctness, counters
from shakespeare.lab.scratch import block_of, scratch
from shakespeare.lab.traffic import COUNTS, Case, streams, traffic

SMALL, LARGE = 32 << 10, 1 << 40


@pytest.fixture(scope="module")
def block(extension):
    return block_of("auto")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("Nq, Nk", [(7, 7), (3, 9), (1, 9)])
def test_flops_are_two_products_of_what_the_mask_lets_through(Nq, Nk, causal):
    pairs = sum(min(Nk, i + 1 + Nk - Nq) if causal else Nk for i in range(Nq))
    assert Case(Nq, Nk, 5, heads=2, causal=causal).flops == 2 * 2 * 2 * 5 * pairs


@pytest.mark.parametrize("part", PARTS)
def test_a_smaller_cache_takes_in_no_less(part, block):
    """An endless one takes in each matrix once."""
    counted = streams(part, Case(700, 700, 64, heads=2, br=192, bc=256), block)
    sizes = [traffic(counted, 2**n) for n in range(10, 30)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    by_name = {stream.name: stream.traffic(LARGE) for stream in counted}
    assert {by_name[name] for name in "QKVO"} == {2 * 700 * 64 * 4}


def test_the_scratch_is_what_is_allocated(part, extension, threads):
    """By three threads; tests/app/cli/test_part.py has one."""
    threads(3)
    q, k, v = correctness.synthetic_qkv(300)
    out, memory = correctness.allocated(lambda: attention(part, q, k, v, br=96, bc=64))
    counted = scratch(part, Case(300, 300, 32, heads=4, br=96, bc=64, threads=3))
    assert memory - out.numel() * 4 == counted


@pytest.mark.full
@pytest.mark.parametrize(
    "N, d, causal", [(100, 24, False), (128, 64, False), (256, 32, False), (300, 40, False), (512, 32, True)]
)
def test_the_count_is_what_a_simulated_cache_takes_in(block, N, d, causal):
    """Within a factor of two, for each part and for the ratio of parts 1 and 2. Cases and caches are small.

    The count knows no sets and ways: where a matrix just fits a cache, it can be further off.
    """
    caches = Cache(1, SMALL, 8, 64), Cache(2, 256 << 10, 8, 64)
    if counters.SIMULATED == "haswell":
        block = counters.simulated_block(block)
    found = {}
    for part in (name for name in COUNTS if PARTS[name].operator):
        case = Case(N, N, d, br=192, bc=256, causal=causal)
        missed = counters.misses(part, case, "auto", caches, timeout=1200)
        if missed.l1 is None:
            pytest.skip(missed.note)
        counted = streams(part, case, block)
        for cache, bytes_ in zip(caches, (missed.l1, missed.last)):
            assert 0.5 < traffic(counted, cache.size) / bytes_ < 2, (part, cache)
        found[part] = missed.l1, traffic(counted, SMALL)
    simulated, count = (found["part1"][i] / found["part2"][i] for i in (0, 1))
    assert 0.5 < count / simulated < 2
