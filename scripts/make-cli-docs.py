"""Write docs/cli.md: the help of gpt.py and of each of its commands.

python scripts/make-cli-docs.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.cli import cli  # noqa: E402

HEAD = """\
# The command line

The help of `gpt.py` and of each command, written by `python scripts/make-cli-docs.py`.

"""
COLUMNS = 98  # what click uses of the 100 columns that gpt.py asks for


def document() -> str:
    """The text of docs/cli.md."""
    return HEAD + "\n".join([section("gpt.py"), *(section("gpt.py", name) for name in cli.commands)])


def section(*words: str) -> str:
    """A heading, the command and what it prints on a terminal of 100 columns or more."""
    shown = CliRunner().invoke(cli, [*words[1:], "--help"], prog_name=words[0], terminal_width=COLUMNS)
    return f"## {words[-1]}\n\n```text\n$ python {' '.join(words)} --help\n{shown.output}```\n"


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(document())
