"""Profiles: spans do not overlap and add up to the wall time. Recording changes no result."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
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
TOKENS, LAYERS = 5, 4


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


def test_no_kind_is_missing(measured, case):
    work = set(KINDS) - {"waiting"}
    prefill, decode = (Counter(s.kind for s in phase.spans) for phase in (measured.prefill, measured.decode))
    assert set(prefill) == work - {"sampling"} | ({"waiting"} if case == ("native", 2) else set())
    assert set(decode) - {"waiting"} == work
    assert prefill["embedding"] == prefill["head"] == 1
    assert decode["embedding"] == decode["sampling"] == TOKENS
    for kind in work - {"embedding", "head", "sampling"}:
        assert decode[kind] >= LAYERS * TOKENS
    if case[0] == "torch":
        assert decode["norm"] == (2 * LAYERS + 1) * TOKENS and decode["attention"] == LAYERS * TOKENS


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


def test_the_trace_of_known_times():
    """Threads are counted from 1: Perfetto takes a thread 0 for the one with the process's number."""
    events = profile.trace(made())["traceEvents"]
    assert {e["pid"] for e in events} == {1}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "calling thread", 2: "helper 1"}
    spans = [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    prompt, first, second = {"tokens": 7}, {"position": 7}, {"position": 8}
    assert spans == [
        ("prefill", 1, 0, 4000, prompt),
        ("QKV", 1, 500, 2000, prompt),
        ("QKV", 2, 1000, 1000, prompt),
        ("waiting", 1, 2500, 1000, prompt),
        ("token 0", 1, 4000, 10, first),
        ("head", 1, 4000, 8, first),
        ("token 1", 1, 4020, 30, second),
        ("sampling", 1, 4030, 20, second),
    ]


def test_the_trace_is_what_viewers_read(case):
    measured, trace = run(*case)
    names = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "M"}
    assert set(names) == {"process_name", "thread_name"}
    assert names["process_name"]["args"]["name"] == f"shakes128 part4, {case[0]} engine"
    events = [e for e in trace["traceEvents"] if e["ph"] != "M"]
    assert len(events) == 1 + len(measured.prefill.spans) + TOKENS + len(measured.decode.spans)
    named = {e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for event in events:
        assert set(event) == {"name", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ph"] == "X" and event["dur"] >= 0 and event["tid"] in named
    times = [e["ts"] for e in events]
    assert times[0] == 0 and times == sorted(times)
    calls = {e["name"]: e for e in events if e["name"] not in KINDS}
    assert list(calls) == ["prefill", *(f"token {i}" for i in range(TOKENS))]
    parents = {tuple(e["args"].items()): e for e in calls.values()}
    for event in events:
        parent = parents[tuple(event["args"].items())]
        assert parent["ts"] <= event["ts"] + 1e-6
        assert event["ts"] + event["dur"] <= parent["ts"] + parent["dur"] + 1e-6


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


def test_a_recorder_that_is_off_records_nothing(case):
    gpt = tiny.gpt()
    engine = open_engine(gpt, case[0])
    spans_of = profile.recorder(engine)

    def spans() -> list:
        engine.prefill(0, [1, 2, 3])
        engine.next([0], [0.5])
        return spans_of.spans()

    assert spans() == []
    spans_of.record(True)
    assert {kind for kind, *_ in spans()} - {"waiting"} == set(KINDS) - {"waiting"}
    spans_of.record(True)  # a second time: spans are not recorded twice
    assert Counter(kind for kind, *_ in spans())["sampling"] == 1
    spans_of.record(False)
    assert spans() == []


def test_hooks_stay_off_the_model():
    gpt = tiny.gpt()
    engine = open_engine(gpt, "torch", part="part0")
    hooks = profile.Hooks(engine)
    hooks.record(True)
    hooked = [m for m in engine.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert len(hooked) == 4 + gpt.config.n_layer * 6
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt.modules())
    hooks.record(False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.model.modules())


@pytest.mark.parametrize("weights, kv_cache", [("fp32", "bf16"), ("bf16", "fp32"), ("int8", "bf16")])
def test_the_command(cli, part, weights, kv_cache):
    done = cli(
        "profile",
        "--tokens",
        3,
        "--prompt-tokens",
        10,
        "-m",
        "shakes128",
        "--threads",
        1,
        "--weights",
        weights,
        "--kv-cache",
        kv_cache,
        part,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"shakes128: {part}, ")
    assert (
        f"weights in {weights}, cache in {kv_cache}, 1 thread; a prompt of 10 tokens, then 3 more"
        in done.stdout
    )
    rows = [line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines() if line[:2] == "| "]
    assert rows[1:] == [*(kind for kind in KINDS if kind != "waiting"), "other", "wall time"]


def test_the_commands_options_reach_what_they_are_for(cli, extension, monkeypatch, tmp_path):
    calls = []

    def recorded(model, engine, **options):
        calls.append((engine, {name: options[name] for name in ("part", "simd", "br", "bc")}))
        return right(model, engine, **options)

    right = profile.open_engine
    monkeypatch.setattr(profile, "open_engine", recorded)
    done = cli(
        "profile",
        "part4",
        "--engine",
        "torch",
        "--simd",
        "off",
        "-br",
        5,
        "-bc",
        "auto",
        "--tokens",
        2,
        "-o",
        "json",
        "--threads",
        1,
        "--trace",
        "trace.json",
    )
    assert done.returncode == 0, done.stderr
    assert calls == [("torch", dict(part="part4", simd="off", br=5, bc=None))]
    f = json.loads(done.stdout)
    expected = dict(engine="torch", simd="off", threads=1, prompt_tokens=64, new_tokens=2)
    assert {name: f[name] for name in expected} == expected
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["simd"] == "off"
    cli("profile", "part0", "--threads", 1, "--tokens", 1)
    assert calls[1][0] is None


WRONG = [
    (["part5"], "'part5' is not one of 'part0'"),
    ([], "Missing argument 'PART'"),
    (["part0", "--tokens", "0"], "'--tokens': 0 is not in the range"),
    (["part0", "--tokens", "65"], "prompt_tokens is 64 and tokens is 65; together they must be at most"),
    (["part0", "--prompt-tokens", "128"], "prompt_tokens is 128 and tokens is 1; together they"),
    (["part0", "--engine", "native"], "engine is 'native'; it must be 'torch' with part0"),
    (["part0", "--trace", "no/where.json"], "no/where.json: No such file or directory"),
    (["part0", "--trace", "."], ".: Is a directory"),
    (["part0", "-m", "shakes512"], "model 'shakes512' was not found"),
    (["part0", "-br", "0"], "'-br' / '--br': 0 is not in the range"),
]


@pytest.mark.parametrize("arguments, message", WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_an_error_is_one_line(failed, arguments, message, tmp_path):
    assert message in failed("profile", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(tokens=1.5), TypeError, "tokens is a float; it must be a whole number"),
        (dict(prompt_tokens=True), TypeError, "prompt_tokens is a bool"),
        (dict(prompt_tokens=0), ValueError, "prompt_tokens is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        profile.run(load("shakes128"), model="shakes128", part="part0", **change)
