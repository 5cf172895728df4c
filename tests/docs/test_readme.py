"""The documents are right: linked files exist, commands are valid, samples are reproduced."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from support import ROOT

from shakespeare.app.cli import COMMANDS, command_of
from shakespeare.model.checkpoint import SHIPPED

README = (ROOT / "README.md").read_text()
TORCHRUN = r"(?:-m torch\.distributed\.run [-.\w ]+ )?"
# The least number of (links to files, commands of gpt.py) in each document, so that no check is of nothing.
DOCUMENTS = {
    "README.md": (10, 5),
    "CONTRIBUTING.md": (0, 0),
    "SECURITY.md": (1, 0),
    "docs/attention.md": (9, 5),
    "docs/benchmarking.md": (2, 3),
    "docs/cli.md": (0, len(COMMANDS)),
    "docs/course.md": (0, 5),
    "docs/decoder.md": (3, 3),
    "docs/gpu.md": (7, 10),
    "docs/scale.md": (6, 10),
    "docs/serve.md": (4, 1),
    "docs/training.md": (1, 6),
    "docs/try.md": (6, 8),
    "docs/web.md": (3, 4),
    "docs/webgpu.md": (7, 5),
    "tests/robustness/README.md": (1, 0),
}


def test_every_document_is_checked():
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= DOCUMENTS.keys()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_linked_file_exists(name):
    file = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
    assert len(links) >= DOCUMENTS[name][0]
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_the_sample_is_what_the_command_writes(cli, extension):
    """Only the beginning is compared: rounding on another CPU may change the rest."""
    prompt = re.search(r'--inference -m (\S+) --prompt "(.*)"', README)
    assert prompt
    common = ("part4", "--inference", "--num-samples", 1, "--max-new-tokens", 150)
    done = cli(*common, "-m", prompt[1], "--prompt", prompt[2])
    assert done.returncode == 0 and len(done.stdout) > 150
    assert done.stdout.rstrip("\n") in README


def test_the_losses_are_the_records():
    text = (ROOT / "docs" / "training.md").read_text()
    for name in SHIPPED:
        record = json.loads((ROOT / "checkpoints" / name / "training.json").read_text())
        assert re.search(rf"^\| {name} \| \d+ \| {record['val_loss']:.4f} \|", text, re.M)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_shown_command_is_valid(name):
    """The options are parsed; other tests check the output."""
    text = (ROOT / name).read_text()
    shown = re.findall(rf"python {TORCHRUN}(?:\.\./)?gpt\.py ([^\n|;`]+)", text)
    assert len(shown) >= DOCUMENTS[name][1]
    for command in shown:
        words = shlex.split(command.replace("$part", "part1").replace("$n", "128"), comments=True)
        if words and "--help" not in words:
            command_of(words[0]).make_context("gpt.py", words[1:])
