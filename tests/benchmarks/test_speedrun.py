"""The speedrun trains, prints its table, saves its runs, and names what `train` refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support import finished, table
from training_texts import words


@pytest.mark.full
@pytest.mark.usefixtures("extension")
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
