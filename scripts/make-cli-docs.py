"""Write docs/cli.md: the help of gpt.py and of each of its commands.

python scripts/make-cli-docs.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from app.cli import cli  # noqa: E402

COLUMNS = 98  # what click uses of the 100 columns that gpt.py asks for


def document() -> str:
    """The text of docs/cli.md."""
    lines = [
        "# The command line",
        "",
        "The help of `gpt.py` and of each command, written by `python scripts/make-cli-docs.py`.",
        "",
        *section("gpt.py", "gpt.py --help", help_of(cli, "gpt.py")),
    ]
    for name, command in cli.commands.items():
        lines += section(name, f"gpt.py {name} --help", help_of(command, f"gpt.py {name}"))
    return "\n".join(lines)


def section(title: str, line: str, text: str) -> list[str]:
    """A heading, the command and what it prints."""
    return [f"## {title}", "", "```text", f"$ python {line}", text, "```", ""]


def help_of(command: click.Command, name: str) -> str:
    """The help as a terminal of 100 columns or more shows it."""
    settings = {"help_option_names": ["-h", "--help"], "terminal_width": COLUMNS}
    return click.Context(command, info_name=name, **settings).get_help()  # type: ignore[arg-type]


if __name__ == "__main__":
    (ROOT / "docs" / "cli.md").write_text(document())
