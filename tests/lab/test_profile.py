"""Profiles: spans do not overlap and add up to the wall time. Recording changes no result."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
import tiny
import torch

from attention_ext.build import toolchain
from generation.engine import open_engine
from lab import profile
from lab.profile import KINDS, Phase, Profile, Span
from model import load

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
    if name == "native" and not toolchain.has_python_header():
        pytest.skip("no Python.h, so no native engine")
    threads(count)
    return name, count


@functools.cache
def run(name: str, count: int) -> tuple[Profile, dict]:
    """A profile and its trace. The caller has set `count` threads."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        made = profile.run(
            load("shakes128"),
            model="shakes128",
            engine=name,
            prompt_tokens=PROMPT[name],
            tokens=TOKENS,
            trace_file=file,
        )
        return made, json.loads(file.read_text())


@pytest.fixture
def measured(case) -> Profile:
    return run(*case)[0]


def made(**change) -> Profile:
    """A profile of known times: a prefill of 4 ms, in which a helper works for 1 ms, then two tokens."""
    prefill = Phase(
        [(1_000_000, 5_000_000)],
        [
            Span("QKV", 0, 1_500_000, 3_500_000),
            Span("waiting", 0, 3_500_000, 4_500_000),
            Span("QKV", 1, 2_000_000, 3_000_000),
        ],
        2,
    )
    decode = Phase(
        [(9_000_000, 9_010_000), (9_020_000, 9_050_000)],
        [Span("head", 0, 9_000_000, 9_008_000), Span("sampling", 0, 9_030_000, 9_050_000)],
        2,
    )
    settings = dict(
        model="m",
        part="part4",
        engine="native",
        simd="off",
        weights="fp32",
        kv_cache="bf16",
        threads=2,
        prompt_tokens=7,
        new_tokens=2,
        repetitions=1,
    )
    fields = dict(settings=settings, prefill=prefill, decode=decode, plain=(2e-3, 3e-5), others=0.0)
    return Profile(**fields | change)


def test_spans_are_within_calls_and_do_not_overlap(measured, case):
    for phase in (measured.prefill, measured.decode):
        assert phase.threads == (case[1] if case[0] == "native" else 1)
        for thread in range(phase.threads):
            spans = [span for span in phase.spans if span.thread == thread]
            assert all(span.begin <= span.end for span in spans)
            assert all(a.end <= b.begin for a, b in zip(spans, spans[1:]))
        for span in phase.spans:
            assert 0 <= span.thread < phase.threads
            assert sum(begin <= span.begin and span.end <= end for begin, end in phase.calls) == 1
    assert len(measured.prefill.calls) == 1 and len(measured.decode.calls) == TOKENS


def test_shares_add_up(measured):
    for phase in (measured.prefill, measured.decode):
        shares = phase.shares()
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) >= 0 and shares["attention"] > 0
    f = profile.figures(measured)
    for column, total in (("prefill_ms", "prefill_ms"), ("decode_us_per_token", "decode_us_per_token")):
        assert sum(row[column] for row in f["rows"]) == pytest.approx(f["recorded"][total])
    for column in ("prefill_percent", "decode_percent"):
        assert sum(row[column] for row in f["rows"]) == pytest.approx(100)


def test_the_figures_follow_from_the_times():
    shares = made().prefill.shares()
    assert {kind: share for kind, share in shares.items() if share} == pytest.approx(
        {"QKV": 3 / 8, "waiting": (1 + 3) / 8, "other": 1 / 8}  # waiting has the helper's 3 ms without a span
    )
    shares = made().decode.shares()
    assert {kind: share for kind, share in shares.items() if share} == pytest.approx(
        {"head": 8 / 80, "sampling": 20 / 80, "waiting": 40 / 80, "other": 12 / 80}
    )
    f = profile.figures(made())
    assert f["recorded"] == pytest.approx(
        dict(prefill_ms=4, decode_us_per_token=20, tokens_per_second=50_000)
    )
    assert f["not_recorded"] == pytest.approx(
        dict(prefill_ms=2, decode_us_per_token=15, tokens_per_second=2e5 / 3)
    )


def test_the_table():
    lines = profile.table(made()).splitlines()
    assert lines[0] == (
        "m: part4, off helpers, native engine, weights in fp32, cache in bf16, 2 threads; "
        "a prompt of 7 tokens, then 2 more"
    )
    assert lines[2:10] == [
        "| | prefill, ms | share | decode, µs per token | share |",
        "|---|---|---|---|---|",
        "| QKV | 1.500 | 37.5 % | 0.00 | 0.0 % |",
        "| head |  |  | 2.00 | 10.0 % |",
        "| sampling |  |  | 5.00 | 25.0 % |",
        "| waiting | 2.000 | 50.0 % | 10.00 | 50.0 % |",
        "| other | 0.500 | 12.5 % | 3.00 | 15.0 % |",
        "| wall time | 4.000 | 100.0 % | 20.00 | 100.0 % |",
    ]
    assert "Rows are the means of 2 threads" in lines[11]
    assert lines[12] == "Recording: 4.000 ms, 20.00 µs per token, 50,000 tokens/s"
    assert lines[13] == "Not recording: 2.000 ms, 15.00 µs per token, 66,667 tokens/s"
    assert len(lines) == 15
    assert "others took 1.50 processors" in profile.table(made(others=1.5)).splitlines()[-1]


def test_recording_changes_no_bit(case):
    gpt = tiny.gpt(block_size=150, n_embd=48, n_head=3)
    uniforms = torch.rand(20, generator=torch.Generator().manual_seed(0)).tolist()
    runs = []
    for recorded in (False, True):
        engine = open_engine(gpt, case[0], slots=3)
        spans_of = profile.recorder(engine)
        spans_of.record(recorded)
        engine.prefill(0, [i % 11 for i in range(PROMPT[case[0]])])
        engine.copy(0, 1)
        engine.copy(0, 2)
        run = []
        for u in uniforms:
            tokens = engine.next([0], [u]) + engine.next([1, 2], [u, 1 - u])
            run.append((tokens, [engine.logits(slot).tolist() for slot in range(3)]))
        runs.append(run)
        assert bool(spans_of.spans()) is recorded
        assert spans_of.spans() == []  # the call before took them
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "part, weights, kv_cache",
    [("part0", "fp32", "bf16"), ("part3", "bf16", "fp32"), ("part4", "int8", "bf16")],
)
def test_the_command(cli, extension, part, weights, kv_cache):
    sizes = [*"--tokens 3 --prompt-tokens 10 -m shakes128 --threads 1".split()]
    done = cli("profile", *sizes, "--weights", weights, "--kv-cache", kv_cache, part)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"shakes128: {part}, ")
    assert (
        f"weights in {weights}, cache in {kv_cache}, 1 thread; a prompt of 10 tokens, then 3 more"
        in done.stdout
    )
    rows = [line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines() if line[:2] == "| "]
    assert rows[1:] == [*(kind for kind in KINDS if kind != "waiting"), "other", "wall time"]


WRONG = [
    ([], "Missing argument 'PART'"),
    (["part0", "--tokens", "65"], "prompt_tokens is 64 and tokens is 65; together they must be at most"),
    (["part0", "--prompt-tokens", "128"], "prompt_tokens is 128 and tokens is 1; together they"),
    (["part0", "--engine", "native"], "engine is 'native'; it must be 'torch' with part0"),
    (["part0", "--trace", "no/where.json"], "no/where.json: No such file or directory"),
]


@pytest.mark.parametrize("arguments, message", WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_an_error_is_one_line(failed, arguments, message, tmp_path):
    assert message in failed("profile", *arguments)
    assert list(tmp_path.iterdir()) == []
