"""Attention over processes: exact in every method, with the bytes and steps of the formula."""

from __future__ import annotations

import multiprocessing

import oracle
import parallel_ranks
import pytest
import torch
from parallel_ranks import RANKS

from attention_ext import PARTS, parallel
from attention_ext.parallel import METHODS

DEFAULTS = {
    "B": 1,
    "H": 2,
    "d": 16,
    "seed": 0,
    "part": "part4",
    "causal": False,
    "scale": None,
    "dtype": "float32",
    "inference": False,
    "known": False,
    "wrong_rank": None,
    "wrong": None,
}


def case(method: str, keys, queries=None, **settings) -> dict:
    keys = list(keys)
    queries = list(keys if queries is None else queries)
    if method == "zigzag":
        queries, keys = (
            [parallel.length(rows) for rows in parallel.zigzag_rows(sum(n), len(keys))]
            for n in (queries, keys)
        )
    return DEFAULTS | {"method": method, "keys": keys, "queries": queries} | settings


def all_cases() -> list[dict]:
    """Every method over 1 to 4 ranks at awkward lengths, with and without a mask, and every part."""
    found = []
    for method in METHODS:
        for P in range(1, RANKS + 1):
            for N in (1, 2, 63, 130):
                for causal in (False, True):
                    found.append(case(method, parallel.shares(N, P), causal=causal, seed=N))
        for part in PARTS:
            found.append(case(method, [50, 50, 50], part=part, causal=True, B=2, H=3))
        for lengths in ([0, 70, 0], [40, 0, 1], [1, 2, 60, 0]):
            found += [case(method, lengths, causal=causal) for causal in (False, True)]
        # fewer queries than keys, some ranks without; another scale, scores of 1e3, bfloat16, inference_mode
        few = [5] if method == "split" else [0, 2, 3]
        found += [case(method, [30, 31, 32], few, causal=causal) for causal in (False, True)]
        found.append(case(method, [30, 31, 32], scale=0.5, d=24))
        found.append(case(method, [30, 31, 32], scale=100.0, causal=True, part="part0"))
        found.append(case(method, [40, 41], dtype="bfloat16", causal=True))
        found.append(case(method, [40, 41], inference=True))
        equal = [40, 40, 40] if method == "split" else [40, 41, 39]
        found.append(case(method, equal, known=True, causal=method != "split"))
        for wrong in ("dtype", "shape"):
            found.append(case(method, [30, 30, 30], wrong_rank=1, wrong=wrong))
    return found


CASES = all_cases()


def name(case: dict) -> str:
    changed = [f"{key}={value}" for key, value in case.items() if value != DEFAULTS.get(key)]
    return " ".join(changed[:1] + [c.replace(" ", "") for c in changed[1:]])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, extension) -> list[list]:
    """The results of all cases on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel_ranks"])
    processes = [
        context.Process(target=parallel_ranks.run, args=(r, str(folder), CASES)) for r in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(80)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * RANKS
    return [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(RANKS)]


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(name, CASES))
def test_it_is_exact_and_sends_what_the_formula_says(index, ranks):
    case, results = CASES[index], [found[index] for found in ranks]
    P = len(case["keys"])
    assert results[P:] == [None] * (RANKS - P)
    if case["wrong"]:
        assert len(set(results[:P])) == 1  # every rank says the same
        assert "rank 1 has q" in results[0] and "the others have" in results[0]
        return
    q, k, v = parallel_ranks.tensors(case)
    scale = case["scale"] or case["d"] ** -0.5
    queries, keys = parallel_ranks.layout(case)
    expected, _ = oracle.attention(q, k, v, case["causal"], scale)
    peers, _ = oracle.torch_float32_in_orders(q.float(), k.float(), v.float(), case["causal"], scale)
    floor = 1e-6 + 2 * oracle.score_rounding(q, k, scale)
    for rank in range(P):
        out, sent, steps, waited = results[rank]
        assert str(out.dtype) == f"torch.{case['dtype']}"
        width = out.element_size()
        H = case["B"] * case["H"]
        assert (sent, steps) == parallel.expected(case["method"], queries, keys, rank, H, case["d"], width)
        assert waited >= 0
        if not out.numel():
            assert not parallel.length(queries[rank])
        elif out.dtype == torch.float32:
            mine, peer = (
                torch.cat([t[..., c.start : c.stop, :] for c in queries[rank]], dim=-2)
                for t in (expected, peers)
            )
            oracle.assert_close(out, mine, peer, floor)
        else:
            torch.testing.assert_close(
                out.double(), parallel.take(expected, queries[rank]), rtol=1 / 64, atol=1e-2
            )
        if case["method"] == "split":
            assert torch.equal(out, results[0][0])


def test_the_formula_of_the_issue():
    """Ring and gather send 8 N d (P - 1) / P bytes for each head in fp32; split's bytes do not know N."""
    for P in (1, 2, 3, 4, 16):
        N, d = 48 * P, 32
        for method in ("gather", "ring", "zigzag"):
            rows = parallel.rows(method, N, P)
            for rank in range(P):
                sent, _ = parallel.expected(method, rows, rows, rank, 1, d)
                assert sent == 8 * N * d * (P - 1) // P
        one = ((range(1),),) * P
        assert (
            len({parallel.expected("split", one, parallel.rows("split", N, P), 0, 4, d) for N in (64, 4096)})
            == 1
        )


@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("N", [0, 1, 5, 63, 64, 130])
def test_the_rows_of_the_ranks_are_all_rows_once(P, N):
    for method in METHODS:
        rows = parallel.rows(method, N, P)
        assert sorted(i for chunks in rows for chunk in chunks for i in chunk) == list(range(N))
        assert max(map(parallel.length, rows)) - min(map(parallel.length, rows)) <= 2


@pytest.mark.parametrize("hidden", [0, 1, 7])
def test_the_mask_of_two_chunks_is_that_of_the_sequence(hidden):
    for start in range(6):
        for stop in range(start, 9):
            for first in range(6):
                for last in range(first, 9):
                    queries, keys = range(start, stop), range(first, last)
                    seen = []
                    for i, j, causal in parallel.visible(queries, keys, hidden):
                        assert len(i) and len(j) and (not causal or len(i) <= len(j))
                        for a, b in ((a, b) for a in range(len(i)) for b in range(len(j))):
                            if not causal or b <= a + len(j) - len(i):
                                seen.append((queries[i[a]], keys[j[b]]))
                    wanted = [(i, j) for i in queries for j in keys if j <= i + hidden]
                    assert sorted(seen) == wanted
                    assert parallel.pairs([queries], [keys], True, hidden) == len(wanted)


def test_zigzag_shares_the_causal_work():
    """A ring's last rank has almost twice the mean work; zigzag's ranks have the mean."""
    for method, worst in (("ring", 1.75), ("zigzag", 1.0)):
        rows = parallel.rows(method, 4096, 4)
        everything = [range(4096)]
        work = [parallel.pairs(mine, everything, True, 0) for mine in rows]
        assert max(work) / (sum(work) / 4) == pytest.approx(worst, rel=1e-3)


def test_a_wrong_method_is_named():
    with pytest.raises(ValueError, match="method is 'rings'; it must be one of split, gather"):
        parallel.rows("rings", 10, 2)
