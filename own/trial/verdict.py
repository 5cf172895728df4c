"""What is known of a user's kernel after its trial."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.own.trial.cases import Case, Floats
from shakespeare.own.trial.diagnosis import Finding, Subject, first_part

PICTURE = 16, 64  # the most rows and columns of a picture


@dataclass
class Verdict:
    """Whether a kernel is right, and what explains it.

    refused: why it could not be compiled; then nothing was tried. output: the compiler's. at, case: the first
    wrong case, or that of a crash, and its number. passed: the numbers of the right ones. tried: cases;
    skipped: those that would take too long. finished: whether all were tried. finding: what explains a wrong
    result. shown: as shown() gives it. memory: what sanitizers say. library: that another's attention does
    the work. backward: of the backward pass. sources: the file, and what it includes or imports.
    """

    refused: str = ""
    output: str = ""
    at: str = ""
    case: int | None = None
    passed: list[int] = field(default_factory=list)
    tried: int = 0
    skipped: list[str] = field(default_factory=list)
    finished: bool = False
    wrong: bool = False
    finding: Finding | None = None
    shown: dict[str, Any] | None = None
    memory: list[str] = field(default_factory=list)
    library: str = ""
    backward: bool = False
    sources: list[Path] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.wrong and not self.refused

    @property
    def why(self) -> str:
        """Why it is not right; '' if that is not known."""
        return self.refused or (self.finding.sentence if self.finding else "")

    def add(self, finding: Finding) -> None:
        """Take a mistake as the finding."""
        self.wrong, self.finding, self.finished = True, finding, True


def shown(case: Case, of: Subject, got: Floats) -> dict[str, Any]:
    """What is shown of a wrong result: the worst number, a picture, and the numbers of the worst row."""
    exact = of.expected(case)
    ratio = exact.error(got) / exact.allowed
    name, part = first_part(of.rows(case), ratio > 1)
    ratio, out, got = ratio[:, :, part], exact.out[:, :, part], got[:, :, part]
    b, h, i, c = (int(n) for n in np.unravel_index(ratio.argmax(), ratio.shape))
    off = ratio > 1
    first = max(0, min(c - 2, case.d - 5))
    found = {"heads": off.any((2, 3)), "rows": off[b, h].any(1), "columns": off[b, h].any(0)}
    said: dict[str, Any] = {name: np.flatnonzero(some).tolist() for name, some in found.items()}
    said |= {"wrong": str(case), "matrix": name, "at": (b, h, i, c), "off": int(off.sum()), "of": off.size}
    expected, got = (t[b, h, i, first : first + 5].tolist() for t in (out, got))
    return said | {"first": first, "expected": expected, "got": got, "picture": picture(ratio[b, h])}


def picture(error: Floats) -> list[str]:
    """The errors of a head (Nq, d), as multiples of the allowed one: the worst of a block is a character."""
    rows, columns = (-(-n // most) for n, most in zip(error.shape, PICTURE))
    lines = []
    for i in range(0, error.shape[0], rows):
        worst = [error[i : i + rows, c : c + columns].max() for c in range(0, error.shape[1], columns)]
        levels = ("?" if x == np.inf else ".-+#"[int(x > 1) + int(x > 100) + int(x > 10_000)] for x in worst)
        lines.append("".join(levels))
    return lines
