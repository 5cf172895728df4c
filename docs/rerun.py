"""Run the command after `$ ` at the head of each text block, and replace the block's output."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(```text\n\$ python )([^\n]+)\n.*?```", re.DOTALL)


def rerun(document: str) -> str:
    """The document with the current output in every block."""

    def run(block: re.Match) -> str:
        command = [sys.executable, *shlex.split(block[2])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return f"{block[1]}{block[2]}\n{done.stdout.rstrip()}\n```"

    return BLOCK.sub(run, document)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(rerun(file.read_text()))
