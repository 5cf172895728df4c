"""The documents are right: linked files exist, commands are valid, samples are reproduced."""

from __future__ import annotations

import json
import re
import shlex

from support import ROOT, naming

from shakespeare.app.cli import COMMANDS, command_of
from shakespeare.model.checkpoint import SHIPPED

TORCHRUN = r"(?:-m torch\.distributed\.run [-.\w ]+ )?"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/robustness/README.md"]
LINES = 300  # of a walk
SHOWN = 6  # lines of output in a section of a walk


def test_every_linked_file_exists():
    links = [
        (file, link)
        for file in DOCUMENTS
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
    ]
    assert len(links) > 60
    assert [(file.name, link) for file, link in links if not (file.parent / link).exists()] == []


def test_every_shown_command_is_valid():
    """The options are parsed; other tests check the output."""
    shown = [
        (file, command)
        for file in DOCUMENTS
        for command in re.findall(rf"python {TORCHRUN}(?:\.\./)?gpt\.py ([^\n|;`]+)", file.read_text())
    ]
    assert len(shown) > 60 + len(COMMANDS)
    for file, command in shown:
        words = shlex.split(command.replace("$part", "part1").replace("$n", "128"), comments=True)
        if words and "--help" not in words:
            with naming(file.name, command):
                command_of(words[0]).make_context("gpt.py", words[1:])


def test_a_section_of_a_walk_shows_one_figure_or_six_lines():
    for file in ROOT.glob("docs/learn/*.md"):
        text = file.read_text()
        assert text.count("\n") <= LINES, file.name
        for section in re.split(r"^#+ ", text, flags=re.M)[1:]:
            output = "".join(re.findall(r"^```text\n\$ [^\n]+\n(.*?)^```", section, re.M | re.S)).splitlines()
            figures = section.count("](../figures/")
            assert len(output) <= SHOWN and figures + bool(output) <= 1, (file.name, section.splitlines()[0])


def test_the_sample_is_what_the_command_writes(cli, extension):
    """Only the beginning is compared: rounding on another CPU may change the rest."""
    readme = (ROOT / "README.md").read_text()
    prompt = re.search(r'--inference -m (\S+) --prompt "(.*)"', readme)
    assert prompt
    common = ("part4", "--inference", "--num-samples", 1, "--max-new-tokens", 150)
    done = cli(*common, "-m", prompt[1], "--prompt", prompt[2])
    assert done.returncode == 0 and len(done.stdout) > 150
    assert done.stdout.rstrip("\n") in readme


def test_the_losses_are_the_records():
    text = (ROOT / "docs" / "training.md").read_text()
    for name in SHIPPED:
        record = json.loads((ROOT / "checkpoints" / name / "training.json").read_text())
        assert re.search(rf"^\| {name} \| \d+ \| {record['val_loss']:.4f} \|", text, re.M)
