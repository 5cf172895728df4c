"""Run the command after `$ ` at the head of each text block, and replace the block's output."""

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"(?<=```text\n)\$ ([^\n]+)\n.*?(?=```)", re.DOTALL)


def output(block: re.Match) -> str:
    """The command, by this Python, and what it prints now."""
    env = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    command = ["bash", "-o", "pipefail", "-c", block[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return f"$ {block[1]}\n{done.stdout.rstrip()}\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(BLOCK.sub(output, file.read_text()))
