"""gpt.py explain: its figures are those of the count and of this machine."""

import re

import pytest
import torch

from shakespeare.attention_ext import PARTS, extension
from shakespeare.attention_ext.processor import caches
from shakespeare.lab import counters, machine
from shakespeare.lab.bench.plan import plan
from shakespeare.lab.bench.sweep import Sweep
from shakespeare.lab.explain import computed, skipped_text
from shakespeare.lab.formats import size_text
from shakespeare.lab.scratch import block_of
from shakespeare.lab.traffic import Case, streams, traffic

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("extension")]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_explained(cli, part, monkeypatch):
    monkeypatch.setattr(machine, "fma_peak", lambda simd="auto", threads=1: 1e11)
    done = cli("explain", part, "-N", 96, "-d", 24, "-br", 32, "-bc", 48, "--causal")
    assert done.stdout.startswith(f"{part}, {PARTS[part].summary}: 4 heads of N = 96, d = 24")
    assert ("Br = 32, Bc = 48" in done.stdout) == (part == "part4")
    pairs = 96 * 97 / 2
    assert f"arithmetic  {4 * 4 * 24 * pairs / 1e6:.3g} MFLOP" in done.stdout
    total = re.search(r"^  all +(\S+ \S+)", done.stdout, re.M)[1]
    case = Case(96, 96, 24, heads=4, causal=True, br=32, bc=48)
    counted = streams(part, case, block_of("auto"))
    assert total == size_text(traffic(counted, caches()[0].size))
    limits = {name: float(ms) for ms, name in re.findall(r"([\d.e-]+) ms for (.+) \(", done.stdout)}
    assert "the FMA peak" in limits
    assert any(name.startswith("one lane of ") for name in limits) == (part == "part1")
    assert f"filling L{caches()[-1].level}" not in limits  # all data stays there
    assert re.search(r"^bound by    (.+)$", done.stdout, re.M)[1] == max(limits, key=limits.get)
    assert limits["the FMA peak"] == pytest.approx(4 * 4 * 24 * pairs / 1e8, rel=0.01)
    assert re.search(r"^measured    [\d.]+ ms", done.stdout, re.M)
    assert ("misses " in done.stdout) == (PARTS[part].operator is not None)


@pytest.mark.parametrize("rule, causal", [("window=16", True), ("documents=20+alibi", False)])
def test_what_rules_skip(rule, causal):
    """Against the pairs of a query and a key that it sees, one by one; and alone no query computes more."""
    i, j = torch.arange(96)[:, None], torch.arange(96)
    shown = (i - j).abs() <= 16 if causal else i // 20 == j // 20
    shown = shown & (j <= i) if causal else shown
    sizes = {"masks": (causal,), "rules": (rule,), "lengths": (96,)}
    cell, alone = (plan(["part4"], Sweep(br=(side,), bc=(8,), **sizes))[0] for side in (32, 1))
    assert cell.flops == pytest.approx(4 * 4 * 32 * shown.sum().item())
    rows = [tile.any(0).nonzero().flatten() for tile in shown.split(32)]
    read = sum(-(-int(keys[-1] + 1 - keys[0]) // 8) for keys in rows)
    whole = (4 + 8 + 12) if causal else 3 * 12
    assert f"skipped     {whole - read} of {whole} tiles of 32 x 8; " in skipped_text(cell)
    assert "100 % of the scores computed are seen" in skipped_text(alone)
    assert shown.sum() < computed(cell) < 96 * 96 and computed(alone) == shown.sum()
    (third,) = plan(["part3"], Sweep(**sizes))
    share = 1 - shown.sum().item() / (96 * 97 / 2 if causal else 96 * 96)
    assert f"skipped     {100 * share:.3g} % of the pairs" in skipped_text(third)


def test_rules_and_bfloat16_are_explained(cli):
    text = cli("explain", "part4", "-N", 96, "--window", 5, "--softcap", 3).stdout
    assert "no mask, window=5+softcap=3.0, 1 thread" in text and "skipped     " in text
    text = cli("explain", "part0", "-N", 96, "--sinks").stdout
    assert "skipped     nothing: " in text and "misses" not in text
    text = cli("explain", "part4", "-N", 96, "--dtype", "bf16").stdout
    assert "moved       not counted for part4 in bf16" in text and "misses" not in text


def test_amx_is_explained(cli, monkeypatch):
    monkeypatch.setattr(extension, "uses_amx", lambda queries, simd: True)
    monkeypatch.setattr(machine, "amx_peak", lambda threads=1: 1e15)
    text = cli("explain", "part4", "-N", 96, "-d", 64, "--dtype", "bf16").stdout
    assert "d / 16 = 4 cycles of AMX: 52 % of its peak" in text
    assert "for the AMX peak (1000000 GFLOP/s)" in text
    for other in (["part0", "--dtype", "bf16"], ["part4", "--dtype", "bf16", "--simd", "off"], ["part4"]):
        text = cli("explain", *other, "-N", 96).stdout
        assert "AMX" not in text and "for the FMA peak (" in text and "1000000 GFLOP/s" not in text


def test_the_instructions_of_the_softmax(cli):
    text = cli("explain", "part4", "-N", 64, "-d", 24, "--simd", "portable").stdout
    found = r"^softmax     (\d+) instructions .*2 d = 48 multiply-adds: at most (\d+) %"
    size, share = map(int, re.search(found, text, re.M).groups())
    assert share == round(100 * 48 / (48 + size)) and size == extension.size("softmax")
    for other in (("part4", "--simd", "off"), ("part3",)):
        assert "softmax     " not in cli("explain", *other, "-N", 64, "-d", 24).stdout


def test_simulated_misses_stand_beside_the_count_or_the_reason(cli, monkeypatch):
    found = counters.Misses(3 << 20, 5 << 10)
    monkeypatch.setattr(counters, "misses", lambda *arguments, **options: found)
    done = cli("explain", "part2", "-N", 64, "--cachegrind")
    assert "misses      of one head, simulated by cachegrind" in done.stdout
    assert "3 MiB into L1, by the count" in done.stdout and "5 KiB into L2, by the count" in done.stdout
    monkeypatch.undo()
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    done = cli("explain", "part1", "-N", 64)
    assert "misses      not counted: perf was not found on PATH; --cachegrind simulates them" in done.stdout
