"""The documents are right: linked files exist, commands are valid, samples are reproduced."""

import json
import re
import shlex

from support import ROOT, naming

from shakespeare.app.cli import command_of
from shakespeare.model.checkpoint import SHIPPED

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests/robustness/README.md"]


def matches(pattern):
    return [(file, match) for file in DOCUMENTS for match in re.findall(pattern, file.read_text())]


def test_every_linked_file_exists():
    links = matches(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
    assert [(file.name, link) for file, link in links if not (file.parent / link).exists()] == []
    assert len(links) > 60


def test_every_shown_command_is_valid():
    """The options are parsed; other tests check the output."""
    shown = matches(r"python (?:-m torch\.distributed\.run [-.\w ]+ )?(?:\.\./)?gpt\.py ([^\n|;`]+)")
    assert len(shown) > 60
    for file, command in shown:
        words = shlex.split(command.replace("$part", "part1").replace("$n", "128"), comments=True)
        if words and "--help" not in words:
            with naming(file.name, command):
                command_of(words[0]).make_context("gpt.py", words[1:])


def test_a_walk_is_short_and_a_section_shows_one_figure_or_six_lines():
    for file in ROOT.glob("docs/learn/*.md"):
        assert len(file.read_text().splitlines()) <= 300, file.name
        for section in re.split(r"^#+ ", file.read_text(), flags=re.M)[1:]:
            output = re.findall(r"^```text\n\$ [^\n]+\n(.*?)^```", section, re.M | re.S)
            figures = section.count("](../figures/")
            assert "".join(output).count("\n") <= 6 and figures + bool(output) <= 1, (file.name, section[:60])


def test_the_sample_is_what_the_command_writes(cli, extension):
    """Only the beginning is compared: rounding on another CPU may change the rest."""
    readme = (ROOT / "README.md").read_text()
    prompt = re.search(r'--inference -m (\S+) --prompt "(.*)"', readme)
    assert prompt
    common = ("part4", "--inference", "--num-samples", 1, "--max-new-tokens", 150)
    done = cli(*common, "-m", prompt[1], "--prompt", prompt[2])
    assert len(done.stdout) > 150
    assert done.stdout.rstrip("\n") in readme


def test_the_losses_are_the_records():
    text = (ROOT / "docs" / "use" / "train.md").read_text()
    for name in SHIPPED:
        record = json.loads((ROOT / "checkpoints" / name / "training.json").read_text())
        assert re.search(rf"^\| {name} \| \d+ \| {record['val_loss']:.4f} \|", text, re.M)
