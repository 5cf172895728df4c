"""docs/cli.md has the help of every command."""

from __future__ import annotations

import runpy

from support import ROOT

from app.cli import cli

TEXT = (ROOT / "docs" / "cli.md").read_text()


def test_the_file_is_what_the_script_writes():
    script = runpy.run_path(str(ROOT / "scripts" / "make-cli-docs.py"))
    assert TEXT == script["document"](), "run: python scripts/make-cli-docs.py"


def test_the_help_is_the_commands(process):
    """In the form that a wide terminal shows."""
    for name in ("part4", "bench"):
        shown, _ = process(name, "--help", COLUMNS="120").communicate(timeout=60)
        assert f"```text\n$ python gpt.py {name} --help\n{shown}```" in TEXT


def test_every_command_has_a_section():
    assert [line[3:] for line in TEXT.splitlines() if line.startswith("## ")] == ["gpt.py", *cli.commands]
