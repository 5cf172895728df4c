"""README.md and docs/*.md are right: linked files exist, commands are valid, samples are reproduced."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from support import ROOT

from app.cli import cli as commands
from model.checkpoint import SHIPPED

README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_linked_file_exists(name):
    file = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_the_sample_is_what_the_command_writes(cli, extension):
    """Only its beginning: rounding on another CPU may change the rest."""
    prompt = re.search(r'--inference -m (\S+) --prompt "(.*)"', README)
    assert prompt
    done = cli(
        "part4",
        "--inference",
        "-m",
        prompt[1],
        "--prompt",
        prompt[2],
        "--num-samples",
        1,
        "--max-new-tokens",
        150,
    )
    assert done.returncode == 0 and len(done.stdout) > 150
    assert done.stdout.rstrip("\n") in README


def test_the_losses_are_the_records():
    for name in SHIPPED:
        record = json.loads((ROOT / "checkpoints" / name / "training.json").read_text())
        assert re.search(rf"^\| {name} \| \d+ \| {record['val_loss']:.4f} \|", README, re.M)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_shown_command_is_valid(name):
    """The options are parsed; other tests check the output."""
    text = (ROOT / name).read_text()
    for command in re.findall(r"python (?:\.\./)?gpt\.py ([^\n|;`]+)", text):
        words = shlex.split(command.replace("$part", "part1").replace("$n", "128"), comments=True)
        if words and "--help" not in words:
            commands.commands[words[0]].make_context("gpt.py", words[1:])


def test_the_readme_shows_commands_and_links():
    assert README.count("gpt.py ") >= 5 and "](docs/" in README
