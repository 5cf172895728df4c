"""Profiles: spans do not overlap and add up to the wall time. Recording changes no result."""

import json
import re

import pytest
import tiny
import torch
from steps import choose, prefill

from shakespeare.generation.engines.table import open_engine
from shakespeare.lab import profile
from shakespeare.lab.profile import KINDS
from shakespeare.model import load
from shakespeare.model.config import GPTConfig

CASES = [("native", 1), ("native", 2), ("torch", 1), ("torch", 2)]
PROMPT = dict(native=100, torch=10)  # the native engine's threads share prompts above 64 tokens
TOKENS = 5


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Repeat nothing, and see no load by other processes."""
    monkeypatch.setattr(profile, "REPETITIONS", 1)
    monkeypatch.setattr(profile.Load, "others", lambda self: 0.0)


@pytest.fixture(params=CASES, ids=str)
def case(request, extension, threads):
    """Run the test for each engine with one and two threads; the number is set."""
    name, count = request.param
    threads(count)
    return name, count


@pytest.mark.parametrize("texts", [1, 5])
def test_spans_do_not_overlap_and_their_shares_add_up(case, texts):
    engine = open_engine(load("shakes128").model, case[0], slots=texts)
    prefill, decode, plain = profile.measure(engine, PROMPT[case[0]], TOKENS)
    for phase in (prefill, decode):
        assert phase.threads == (case[1] if case[0] == "native" else 1)
        for thread in range(phase.threads):
            spans = [span for span in phase.spans if span.thread == thread]
            assert all(span.begin <= span.end for span in spans)
            assert all(a.end <= b.begin for a, b in zip(spans, spans[1:]))
        for span in phase.spans:
            assert 0 <= span.thread < phase.threads
            assert sum(begin <= span.begin and span.end <= end for begin, end in phase.calls) == 1
        shares = phase.shares()
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) >= 0 and shares["attention"] > 0
    assert len(prefill.calls) == 1 and (len(decode.calls) == TOKENS if texts == 1 else decode.calls)
    f = profile.figures({"new_tokens": TOKENS, "texts": texts}, prefill, decode, plain)
    assert f["recorded"]["tokens_per_second"] * decode.seconds == pytest.approx(texts * TOKENS)
    for column in ("prefill_ms", "decode_us_per_token", "decode_us_per_step"):
        assert sum(row[column] for row in f["rows"]) == pytest.approx(f["recorded"][column])
    for column in ("prefill_percent", "decode_percent"):
        assert sum(row[column] for row in f["rows"]) == pytest.approx(100)


def test_recording_changes_no_bit(case):
    gpt = tiny.gpt(block_size=150, n_embd=48, n_head=3)
    uniforms = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    runs = []
    for recorded in (False, True):
        engine = open_engine(gpt, case[0], slots=3)
        spans_of = profile.recorder(engine)
        spans_of.record(recorded)
        prefill(engine, 0, [i % 11 for i in range(PROMPT[case[0]])])
        engine.copy(0, 1)
        engine.copy(0, 2)
        run = []
        for u in uniforms:
            tokens = choose(engine, [0], [u]) + choose(engine, [1, 2], [u, 1 - u])
            run.append((tokens, [engine.logits(slot) for slot in range(3)]))
        runs.append(run)
        assert bool(spans_of.spans()) is recorded
        assert spans_of.spans() == []  # the call before took them
    assert runs[0] == runs[1]


def test_the_command(cli, extension, monkeypatch):
    monkeypatch.setattr(profile.Load, "others", lambda self: 1.5)
    asked = "profile -m shakes128 --tokens 3 --prompt-tokens 10 --threads 1".split()
    several = json.loads(cli(*asked, "part4", "--texts", 2, "-o", "json").stdout)  # without drafts
    assert "draft" not in {row["kind"] for row in several["rows"] if row["decode_us_per_step"]}
    for part, weights, kv_cache in (("part0", "fp32", "bf16"), ("part4", "int8", "fp32")):
        done = cli(*asked, "--weights", weights, "--kv-cache", kv_cache, part)
        assert done.stdout.startswith(f"shakes128: {part}, ")
        assert f"weights in {weights}, cache in {kv_cache}, 1 thread; a prompt of 10 tokens, " in done.stdout
        lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
        kinds = [line.split(" | ")[0].removeprefix("| ") for line in lines]
        absent = {"waiting"} if part == "part4" else {"waiting", "draft"}
        assert "\nRecording: " in done.stdout and "\nNot recording: " in done.stdout
        assert "others took 1.50 processors" in done.stdout
        assert kinds[1:] == [*(kind for kind in KINDS if kind not in absent), "other", "wall time"]


def test_an_error_is_one_line(failed, monkeypatch):
    monkeypatch.setattr("shakespeare.generation.texts.MOST_CACHE_BYTES", 2**25)  # a token takes 4 KiB
    for arguments, message in (
        (["part4", "--texts", "65"], "texts is 65; it must be from 1 to 64 with caches of 128 tokens"),
        (["part4", "--texts", "2", "--train"], "--texts does not go with --train"),
        (["part4", "--batch", "3"], "--batch needs --train"),
        (["part0", "--tokens", "65"], "prompt_tokens is 64 and tokens is 65; together they must be at most"),
    ):
        assert message in failed("profile", *arguments)


SMALL = GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=16, bias=False)


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_a_profile_adds_up(part, extension, monkeypatch, threads):
    threads(2)
    monkeypatch.setattr(profile, "SECONDS", 0.01)
    p = profile.training_figures(part, SMALL, 3)
    kinds = {row["kind"]: row["ms"] for row in json.loads(json.dumps(p))["rows"]}
    assert sum(kinds.values()) == pytest.approx(p["step_ms"])
    assert p["not_profiled_ms"] > 0 and p["steps"] >= 5
    assert list(kinds)[-1] == "other"
    if part == "part4":
        *works, waiting, _ = kinds
        assert waiting == "waiting" and works == sorted(works, key=lambda kind: -kinds[kind])
        assert all(kinds[kind] > 0 for kind in ("products", "attention, backward", "Muon"))
    else:
        assert any("mm" in kind for kind in kinds)
    lines = profile.table(p).splitlines()
    assert "batch 3, block 8, 1 layers, 2 heads, width 16, 9 characters; 2 threads" in lines[0]
    assert any(re.fullmatch(r"\| step \| \d+\.\d\d \| 100\.0% \|", line) for line in lines)


def test_the_command_profiles_a_step(cli, failed, extension, monkeypatch):
    monkeypatch.setattr(profile, "SECONDS", 0.01)
    done = cli("profile", "part4", "--train", "--batch", 1, "--threads", 1, "-o", "json")
    found = json.loads(done.stdout)
    assert (found["part"], found["batch"], found["block_size"], found["threads"]) == ("part4", 1, 128, 1)
    assert "it must be part0 or part4 for gradients" in failed("profile", "part2", "--train")
