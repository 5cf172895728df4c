"""What `gpt.py try --new FILE` writes: the naive part in each language, with its loop nest explained."""

import re
import shlex
from pathlib import Path


def write(file: Path) -> None:
    """Write the start for a file's suffix, one of parts.SUFFIXES. Raises ValueError if the file exists."""
    text = (Path(__file__).parent / f"start{file.suffix}").read_text(encoding="utf-8")
    names = {"start.": f"{file.stem}.", f"try start{file.suffix}": f"try {shlex.quote(file.name)}"}
    text = re.sub(r"try start\.\w+|start\.", lambda match: names[match[0]], text)
    try:
        with open(file, "x", encoding="utf-8", errors="surrogateescape") as start:
            start.write(text)
    except FileExistsError:
        raise ValueError(f"--new is {str(file)!r}; that file exists, and is not replaced") from None
