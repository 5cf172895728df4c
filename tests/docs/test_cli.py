"""docs/cli.md has the help of every command."""

from __future__ import annotations

import subprocess
import sys

from support import ROOT

from shakespeare.app.cli import COMMANDS

TEXT = (ROOT / "docs" / "cli.md").read_text()


def test_the_file_is_what_the_script_writes():
    """In a process of its own: click keeps the help's option in the form of the first call."""
    script = ROOT / "scripts" / "make-docs.py"
    code = "import runpy, sys; sys.stdout.write(runpy.run_path(sys.argv[1])['help_texts']())"
    done = subprocess.run([sys.executable, "-c", code, script], capture_output=True, text=True, check=True)
    assert done.stdout == TEXT, "run: python scripts/make-docs.py"


def test_the_help_is_the_commands(process):
    """In the form that a wide terminal shows."""
    for name in ("part4", "bench"):
        shown, _ = process(name, "--help", COLUMNS="120").communicate(timeout=600)
        assert f"```text\n$ python gpt.py {name} --help\n{shown}```" in TEXT


def test_every_command_has_a_section():
    assert [line[3:] for line in TEXT.splitlines() if line.startswith("## ")] == ["gpt.py", *COMMANDS]
