"""The page's worker in node: after a refusal of the kernels it goes on with fresh ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny
from node_process import WEB_TESTS
from support import ROOT
from tiny import VOCABULARY

from generation import generate
from model.checkpoint import SUMS, load, save
from web import build

SPOILT = 5  # the position whose embedding overflows
BEGIN: dict[str, Any] = {
    "part": "part4",
    "ids": [0],
    "seed": "3",
    "context": "slide",
    "useCache": True,
    "sampling": {"temperature": 0.8, "topK": 200, "topP": 1},
    "capacity": 16,
}


@pytest.fixture
def answers(node_program: str, wasm: None, tmp_path: Path):
    """Return a function that gives the worker's answers to calls, over a model whose texts fail at SPOILT."""
    directory = tmp_path / "spoilt"
    save(directory, tiny.gpt(), VOCABULARY, {})
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    weights["transformer.wpe.weight"][SPOILT] = 3e38  # its variance is infinite
    safetensors.torch.save_file(weights, directory / "model.safetensors")
    (directory / SUMS).unlink()

    def run(*calls: tuple[str, dict]) -> list[dict]:
        given = {
            "modules": (ROOT / "web" / "js").as_uri(),
            "wasm": str(build.compiled("simd")),
            "directory": str(directory),
            "calls": calls,
        }
        done = subprocess.run(
            [node_program, WEB_TESTS / "worker.mjs", json.dumps(given)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run.directory = directory  # type: ignore[attr-defined]
    return run


def test_after_a_refusal_the_kernels_are_fresh_and_the_texts_the_same(answers, extension):
    text, much = ("more", {"most": SPOILT}), ("more", {"most": SPOILT + 1})
    made = answers(("begin", BEGIN), text, ("begin", BEGIN), much, text, ("begin", BEGIN), text)
    first, refused, between, last = made[1], made[3], made[4], made[6]
    assert "logits hold NaN" in refused["error"] and (first["instances"], refused["instances"]) == (1, 2)
    assert "error" in between and "logits" not in between["error"]  # no text is begun
    assert first["tokens"] == last["tokens"] and len(first["tokens"]) == SPOILT
    checkpoint = load(str(answers.directory))
    expected = generate(
        checkpoint, checkpoint.tokenizer.characters[0], SPOILT, seed=3, temperature=0.8, top_k=200
    )
    assert "".join(checkpoint.tokenizer.characters[token] for token in last["tokens"]) == expected


def test_what_the_page_itself_refuses_spoils_nothing(answers):
    """A call that does not exist fails, and the text goes on."""
    made = answers(("begin", BEGIN), ("nothing", {}), ("more", {"most": 2}))
    assert "error" in made[1] and len(made[2]["tokens"]) == 2 and made[2]["instances"] == 1
