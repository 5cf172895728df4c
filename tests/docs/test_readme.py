"""The README says what is so: the help it shows, the files it links, the text it prints."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from click.testing import CliRunner
from support import ROOT

import gpt
from model.checkpoint import SHIPPED

README = (ROOT / "README.md").read_text()


def test_the_help_is_the_commands():
    shown = CliRunner().invoke(gpt.cli, ["part4", "--help"], prog_name="gpt.py", terminal_width=100).output
    assert f"```text\n$ python gpt.py part4 --help\n{shown}```" in README


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_sample_is_what_the_command_writes(cli, extension):
    """The first characters: another CPU's rounding could change the text at some later point."""
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


DOCUMENTS = ("README.md", "docs/attention.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_shown_command_is_understood(name):
    """By its options: what it prints is its own tests' matter."""
    text = (ROOT / name).read_text()
    shown = re.findall(r"python (?:\.\./)?gpt\.py ([^\n|;`]+)", text)
    assert len(shown) >= 5
    for command in shown:
        words = shlex.split(command.replace("$part", "part1").replace("$n", "128"), comments=True)
        if words[-1:] != ["--help"]:
            gpt.cli.commands[words[0]].make_context("gpt.py", words[1:])


def test_every_file_that_the_walk_links_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "docs/attention.md").read_text())
    assert len(links) >= 9
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
