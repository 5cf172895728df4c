"""The algorithms' own counts: against simple sums, and against what a cache simulator sees."""

from __future__ import annotations

import pytest

from attention_ext import PARTS, attention
from lab import correctness, counters
from lab.costs import AVX2, Block, costs, flops
from lab.machine import Cache

SMALL, LARGE = 32 << 10, 1 << 40


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("Nq, Nk", [(7, 7), (3, 9), (1, 9)])
def test_flops_are_two_products_of_what_the_mask_lets_through(Nq, Nk, causal):
    pairs = sum(min(Nk, i + 1 + Nk - Nq) if causal else Nk for i in range(Nq))
    assert flops(Nq, Nk, 5, 2, causal) == 2 * 2 * 2 * 5 * pairs


@pytest.mark.parametrize("part", PARTS)
def test_an_endless_cache_takes_in_each_matrix_once(part):
    counted = costs(part, 100, 100, 16, heads=3)
    by_name = {stream.name: stream.traffic(LARGE) for stream in counted.streams}
    for name in "QKVO":
        assert by_name[name] == 3 * 100 * 16 * 4


@pytest.mark.parametrize("part", PARTS)
def test_a_smaller_cache_takes_in_no_less(part):
    counted = costs(part, 700, 700, 64, heads=2, br=192, bc=256)
    sizes = [counted.traffic(2**n) for n in range(10, 30)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@pytest.mark.parametrize("threads_used", [1, 3])
def test_the_scratch_is_what_is_allocated(kernel, threads, threads_used):
    """A kernel's own sum; part 4's strip depends on the processor's vectors."""
    from lab.explain import block

    threads(threads_used)
    q, k, v = correctness.synthetic_qkv(300)
    out, memory = correctness.allocated(lambda: attention(kernel, q, k, v, br=96, bc=64))
    counted = costs(kernel, 300, 300, 32, heads=4, br=96, bc=64, threads=threads_used, block=block("auto"))
    assert memory - out.numel() * 4 == counted.scratch


@pytest.mark.parametrize(
    "N, d, causal",
    [(128, 64, False), (256, 32, False), (300, 40, False), (120, 24, False), (512, 32, True)],
)
def test_the_count_is_what_a_simulated_cache_takes_in(extension, N, d, causal):
    """Within a factor of two, each part and part 2 against part 1; the caches are as small as the cases.

    Close to where a matrix just fits a cache, a count without sets and ways can be further off.
    """
    caches = Cache(1, SMALL, 8, 64), Cache(2, 256 << 10, 8, 64)
    block = AVX2 if counters.SIMULATED == "haswell" else Block(4, 12, 4)
    found = {}
    for part in ("part1", "part2", "part3", "part4"):
        missed = counters.misses(part, N, d, br=192, bc=256, caches=caches, causal=causal)
        if missed.l1 is None:
            pytest.skip(missed.note)
        counted = costs(part, N, N, d, br=192, bc=256, block=block, causal=causal)
        for cache, bytes_ in zip(caches, (missed.l1, missed.last)):
            assert 0.5 < counted.traffic(cache.size) / bytes_ < 2, (part, cache)
        found[part] = missed.l1, counted.traffic(SMALL)
    simulated, count = (found["part1"][i] / found["part2"][i] for i in (0, 1))
    assert 0.5 < count / simulated < 2


def test_wrong_arguments():
    with pytest.raises(ValueError, match="part is 'part9'; it must be one of part0"):
        costs("part9", 1, 1, 1)
