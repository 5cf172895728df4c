"""Each benchmark's program runs, prints its table, and names a wrong argument."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from node_process import WEB_TESTS
from support import finished, printed, table
from training_texts import words

from shakespeare.web import build

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("extension")]


def shown(name: str, arguments: str) -> str:
    """In a process of its own: the server's benchmark pins itself to a core."""
    return printed(sys.executable, "-m", f"benchmarks.{name}", *arguments.split())


def test_bulk():
    head, *rows = table(shown("bulk", "--workers 1,2 --shard-size 2 --shards 1 --rounds 1 -m shakes128"))
    assert head[:2] == ["workers", "tokens/s"]
    assert [row[0] for row in rows] == ["1", "2"] and rows[0][3] == "1.00"
    assert all(float(row[1].replace(",", "")) > 0 and 0 < float(row[6]) <= 1.1 for row in rows)


def test_serving():
    pytest.importorskip("starlette", reason="pip install -e '.[serve]'")
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("processes cannot be pinned to cores here")
    said = shown("serving", "-m shakes128 --rounds 1 --streams 3 --tokens 12")
    figures = r"[\d,]+ \| \d+% \| \d+% \| 1\.00 \(1\.00\) \| \d+%"
    assert re.findall(rf"^\| gpt\.py serve \| (\d+) \| {figures} \|$", said, re.M) == ["3", "1"], said
    assert re.search(r"median [\d.]+ ms, 99th of 100 [\d.]+ ms", said)
    assert "| llama-server |" in said  # or why it takes no part


def test_training():
    head, *rows = table(shown("training", "--threads 1,2 --batch 1,3 --block-size 5 --rounds 1"))
    cases = [[f"{batch} x 5", threads] for threads in "12" for batch in (1, 3)]
    assert head[:2] == ["batch", "threads"] and [row[:2] for row in rows] == cases
    for row in rows:
        pytorchs, native, ratio = map(float, row[2:5])
        assert abs(ratio - pytorchs / native) <= 0.2 * ratio + 0.01 and float(row[5]) <= 1e-4


def test_speedrun(tmp_path: Path):
    corpus, file = tmp_path / "text.txt", tmp_path / "saved.json"
    corpus.write_text(words(4000))
    recipe = "--n-layer 1 --n-head 2 --n-embd 16 --batch-chars 128 --block-size 16"
    command = [sys.executable, "-m", "benchmarks.speedrun", "--corpus", corpus, "--seeds", "3,5"]
    done = finished(*command, "--target", "2.2786", "--save", file, "--steps", "20", *recipe.split())
    saved_file, (_, *rows) = json.loads(file.read_text()), table(done.stdout)
    assert saved_file["options"].startswith("--steps 20 ") and saved_file["options"].endswith(recipe)
    assert [row[0] for row in rows] == ["3", "5"]
    missed = [run["loss"] > 2.2786 for run in saved_file["runs"]]
    for row, run, late in zip(rows, saved_file["runs"], missed):
        assert row[3:] == ["20", "2,560", f"{run['loss']:.4f}", "not reached" * late]
        assert run["curve"][-1][0] == 20 and 0 < run["training_seconds"] < run["seconds"]
    assert done.returncode == any(missed), done.stderr
    failed = finished(*command, "--n-embd", "25", "--n-head", "3")
    assert failed.returncode == 2 and "seed 0: gpt.py: error: n_embd is 25" in failed.stderr


def test_web():
    """The page, and the native engine compiled for SSE."""
    for missing, reason in (
        (platform.machine() != "x86_64", "SSE is of x86-64"),
        (not (shutil.which("chromium") and shutil.which("node")), "chromium or node is missing"),
        (not importlib.util.find_spec("ziglang"), "ziglang is missing"),
        (not (WEB_TESTS / "node_modules" / "playwright-core").is_dir(), "npm install --prefix tests/web"),
    ):
        if missing:
            pytest.skip(reason)
    build.make()  # most of the time, which is not the benchmark's
    text = shown("web", "-m shakes128 --rounds 2")
    rows = dict(re.findall(r"^\| (page|native engine, \S+) \| ([\d,]+) \|", text, re.M))
    assert set(rows) == {"page", "native engine, x86-64-v2"}
    assert all(int(speed.replace(",", "")) > 0 for speed in rows.values())
    assert "shakes128, fp32, texts of 127 tokens" in text


def test_a_wrong_argument_is_named():
    done = finished(sys.executable, "-m", "benchmarks.drafts", "--temperatures", "0.8,-1")
    assert done.returncode == 2 and "'--temperatures': '0.8,-1' must be numbers" in done.stderr
