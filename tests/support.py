"""What several tests need that is no fixture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Done:
    """What a finished command left."""

    returncode: int
    stdout: str
    stderr: str


class Hostile:
    """Unpickling it runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)
