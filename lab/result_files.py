"""Files of results: JSON, one for each kind of measurement and each processor."""

import json
import re
from pathlib import Path
from typing import Any

from shakespeare.attention_ext import processor

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def default_file(command: str, device: str = "") -> Path:
    """The file of a command's results, in RESULTS or the current folder. device: its name, or this CPU."""
    folder = RESULTS if RESULTS.is_dir() else Path()
    return folder / f"{command}-{processor.slug(device)}.json"


def check_file(save: str) -> None:
    """Raise ValueError if results cannot be written to this file."""
    file = Path(save)
    if not file.resolve().parent.is_dir():
        raise ValueError(f"save is {save!r}; it must be a file in a directory that exists")
    if file.exists() and not file.is_file():
        raise ValueError(f"save is {save!r}; it must be a file, and this is something else")


def write(content: dict[str, Any], file: Path) -> None:
    """Write JSON to a file, which is replaced atomically. Each list of numbers takes one line."""
    from shakespeare.model.files import write_file  # its package imports torch

    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\n([\d\s.,eE+-]*)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    write_file(file.resolve(), f"{text}\n".encode())
