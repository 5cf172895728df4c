"""The profile of a training step."""

import json
import re

import pytest

from shakespeare.lab import profile_training
from shakespeare.model.config import GPTConfig

SMALL = GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=16, bias=False)


@pytest.mark.parametrize("part", ["part0", "part4"])
def test_a_profile_adds_up(part, extension, monkeypatch, threads):
    threads(2)
    monkeypatch.setattr(profile_training, "SECONDS", 0.01)
    p = profile_training.profile(part, SMALL, 3)
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
    lines = profile_training.table(p).splitlines()
    assert "batch 3, block 8, 1 layers, 2 heads, width 16, 9 characters; 2 threads" in lines[0]
    assert any(re.fullmatch(r"\| step \| \d+\.\d\d \| 100\.0% \|", line) for line in lines)


def test_the_command_profiles_a_step(cli, failed, extension, monkeypatch):
    monkeypatch.setattr(profile_training, "SECONDS", 0.01)
    done = cli("profile", "part4", "--train", "--batch", 1, "--threads", 1, "-o", "json")
    found = json.loads(done.stdout)
    assert (found["part"], found["batch"], found["block_size"], found["threads"]) == ("part4", 1, 128, 1)
    assert "it must be part0 or part4 for gradients" in failed("profile", "part2", "--train")
