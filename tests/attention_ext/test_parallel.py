"""Attention over processes: exact in every method, with the bytes and exchanges of the formula."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import oracle
import parallel_ranks
import pytest
import torch
import torch.distributed as dist
from parallel_ranks import RANKS
from support import ROOT, Done, naming

from shakespeare.attention_ext import PARTS, layout, parallel
from shakespeare.attention_ext.parallel import METHODS

DEFAULTS = dict(B=1, H=2, d=16, seed=0, part="part4", causal=False, scale=None, dtype="float32")
DEFAULTS |= dict(inference=False, known=False, wrong_rank=None, wrong=None)


def case(method: str, keys, queries=None, **settings) -> dict:
    keys = list(keys)
    queries = list(keys if queries is None else queries)
    if method == "zigzag":
        shared = (layout.zigzag_rows(sum(n), len(keys)) for n in (queries, keys))
        queries, keys = ([layout.length(rows) for rows in each] for each in shared)
    return DEFAULTS | {"method": method, "keys": keys, "queries": queries} | settings


def all_cases() -> list[dict]:
    """Every method over 1 to 4 ranks at awkward lengths, with and without a mask, and every part."""
    found = []
    for method in METHODS:
        for P in range(1, RANKS + 1):
            for N in (1, 2, 63, 130):
                for causal in (False, True):
                    found.append(case(method, layout.shares(N, P), causal=causal, seed=N))
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, extension) -> list[list]:
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel_ranks"])
    arguments = [(rank, str(folder), CASES) for rank in range(RANKS)]
    processes = [context.Process(target=parallel_ranks.run, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(1200)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * RANKS
    return [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(RANKS)]


@pytest.mark.parametrize("method", METHODS)
def test_it_is_exact_and_sends_what_the_formula_says(method, ranks):
    for case, *results in zip(CASES, *ranks):
        if case["method"] == method:
            with naming(case):
                check(case, results)


def check(case, results):
    P = len(case["keys"])
    assert results[P:] == [None] * (RANKS - P)
    if case["wrong"]:
        assert len(set(results[:P])) == 1  # every rank says the same
        assert "rank 1 has q" in results[0] and "; rank 0 has " in results[0]
        return
    q, k, v = parallel_ranks.tensors(case)
    scale = case["scale"] or case["d"] ** -0.5
    queries, keys = parallel_ranks.layout(case)
    expected, _ = oracle.attention(q, k, v, case["causal"], scale)
    peers, _ = oracle.torch_float32_in_orders(q.float(), k.float(), v.float(), case["causal"], scale)
    floor = 1e-6 + 2 * oracle.score_rounding(q, k, scale)
    for rank in range(P):
        out, sent, exchanges, waited = results[rank]
        assert str(out.dtype) == f"torch.{case['dtype']}"
        sizes = case["B"] * case["H"], case["d"], out.element_size()
        assert (sent, exchanges) == parallel.expected(case["method"], queries, keys, rank, *sizes)
        assert waited >= 0
        if not out.numel():
            assert not layout.length(queries[rank])
        elif out.dtype == torch.float32:
            mine, peer = (
                torch.cat([t[..., c.start : c.stop, :] for c in queries[rank]], dim=-2)
                for t in (expected, peers)
            )
            oracle.assert_close(out, mine, peer, floor)
        else:
            mine = layout.take(expected, queries[rank])
            torch.testing.assert_close(out.double(), mine, rtol=1 / 64, atol=1e-2)
        if case["method"] == "split":
            assert torch.equal(out, results[0][0])


def test_the_rows_of_the_ranks_are_all_rows_once_and_zigzag_shares_the_causal_work():
    for method, P, N in itertools.product(METHODS, (1, 2, 3, 4, 8), (0, 1, 5, 63, 64, 130)):
        rows = parallel.rows(method, N, P)
        with naming(method, P, N):
            assert sorted(i for chunks in rows for chunk in chunks for i in chunk) == list(range(N))
            assert max(map(layout.length, rows)) - min(map(layout.length, rows)) <= 2
    for method, worst in (("ring", 1.75), ("zigzag", 1.0)):  # times the mean work
        # row i sees i + 1 keys
        work = [sum(i + 1 for m in rows for i in m) for rows in parallel.rows(method, 4096, 4)]
        assert max(work) / (sum(work) / 4) == pytest.approx(worst, rel=1e-3)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrong_arguments_are_named(alone):
    q = torch.randn(1, 2, 6, 4)
    few = q[:, :, :0]
    for message, arguments, options in (
        ("method is 'rings'", ("rings", q, q, q), {}),
        ("part is 'part9'", ("ring", q, q, q), {"part": "part9"}),
        (r"rank 0: v has shape \(1, 2, 5, 4\); it must be k's", ("ring", q, q, q[:, :, :5]), {}),
        ("no empty dimension but N", ("ring", q[..., :0], q[..., :0], q[..., :0]), {}),
        ("k has no rows on any rank", ("ring", q, few, few), {}),
        ("Nq=6 rows; with causal=True", ("gather", q, q[:, :, :5], q[:, :, :5]), {"causal": True}),
        (r"lengths is \[5\]", ("ring", q, q, q), {"lengths": [5]}),
        (r"lengths is \[6, 6\]", ("ring", q, q, q), {"lengths": [6, 6]}),
    ):
        with pytest.raises(ValueError, match=message):
            parallel.attention(*arguments, **{"part": "part0"} | options)
    with pytest.raises(TypeError, match="rank 0: k is torch.float64; it must be torch.float32"):
        parallel.attention("ring", q, q.double(), q)
    assert parallel.attention("ring", few, q, q, part="part0").shape == few.shape


def torchrun(P: int, *arguments) -> subprocess.Popen:
    return start([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", P, *arguments])


def start(command: list) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*map(str, command)], **pipes, cwd=ROOT, env=env)


def finish(process: subprocess.Popen, seconds: float = 1200) -> Done:
    """Wait for its end. If it takes too long, kill it and its ranks, each the leader of a session."""
    try:
        out, err = process.communicate(timeout=seconds)
        return Done(process.returncode, out, err)
    finally:
        if process.poll() is None:
            for file in Path(f"/proc/{process.pid}/task").glob("*/children"):
                for child in file.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            process.kill()
            process.communicate()


FAULTS = {
    "killed": "rank 1 did not answer rank {rank}: killed or stalled",
    "stalls": "rank 1 did not answer rank {rank}: killed or stalled",
    "error": "rank 1 failed with OSError: the disk of rank 1 is full",
}


@pytest.mark.full
def test_every_other_rank_ends_and_names_the_faulty_one():
    """All run at once: most of the time is waiting."""
    runs = {fault: torchrun(3, ROOT / "tests" / "faulty_rank.py", fault) for fault in FAULTS}
    done = {fault: finish(run) for fault, run in runs.items()}
    for fault, message in FAULTS.items():
        said = {found["rank"]: found for found in map(json.loads, done[fault].stdout.splitlines())}
        # torchrun's SIGTERM may come first: then the sentence is on stderr
        told = re.findall("gpt.py: error: (.*)", done[fault].stderr)
        for rank in (0, 2):
            error = message.format(rank=rank)
            assert said[rank]["error"] == error if rank in said else error in told, (fault, done[fault])
        assert done[fault].returncode == 1


@pytest.mark.full
def test_the_command_compares_and_counts(extension):
    """A million keys in the first run; the second, over parts that share no row count, starts beside it."""
    options = ["-N", 1001, "--causal", "--queries", 500, "--part", "part1"]
    runs = [
        torchrun(2, "gpt.py", "parallel", "split", "-N", 1_000_003, "--heads", 1, "-d", 16),
        torchrun(3, "gpt.py", "parallel", "zigzag", *options),
    ]
    split, zigzag = map(finish, runs)
    assert (split.returncode, zigzag.returncode) == (0, 0), split.stderr + zigzag.stderr
    assert re.search(r"^ +1 +1 +500,001 +68 +68 +1 +1 +\d+%$", split.stdout, re.M)
    for done in (split, zigzag):
        assert re.search(r"^float64 +largest error [\d.]+e-\d\d, in 16 rows", done.stdout, re.M)
        assert re.search(r"^one process +[\d.]+ m?s; with \d ranks ", done.stdout, re.M)
        assert re.search(r"^measured +.* communicating$", done.stdout, re.M)
        assert re.search(r"^attention over \d ranks == attention True$", done.stdout, re.M)


def test_a_wrong_command_is_one_line(monkeypatch, failed):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for message, options in {
        "python -m torch.distributed.run --nproc-per-node 2 gpt.py parallel ring": [],
        "part is 'part2'; it must be part0 or part4 on CUDA": ["--device", "cuda", "--part", "part2"],
        "--queries is 9; with --causal it must be at most N = 5": ["-N", 5, "--queries", 9, "--causal"],
    }.items():
        assert message in failed("parallel", "ring", *options)


@pytest.mark.full
@pytest.mark.parametrize("form", ["--node-rank", "--rdzv-backend c10d"])
def test_the_documented_commands_of_two_machines_send_the_bytes_of_the_formula(form, extension):
    """Each machine is a process of this one; the second begins."""
    document = (ROOT / "docs" / "use" / "scale.md").read_text()
    (line,) = [each for each in document.splitlines() if "--nnodes 2" in each and form in each]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for told, here in {"eth0 python": f"lo {sys.executable}", "10.0.0.1": "127.0.0.1", "29512": port}.items():
        line = line.replace(told, here)
    runs = []
    for node in (1, 0):
        own = line.replace("--node-rank 0", f"--node-rank {node}").replace("is_host=1", f"is_host={1 - node}")
        runs.append(start(["env", *own.split(), "-N", 4096, "--queries", 64, "--heads", 8]))
    done = [finish(run) for run in runs]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    out = "".join(each.stdout for each in done)  # rank 0 reports, which c10d gives to either
    formula = 8 * 4096 * 32 * 8 // 2
    assert re.search(rf"^ +0 +32 +2,048 +{formula:,} +{formula:,} ", out, re.M), out
