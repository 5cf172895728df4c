"""gpt.py bench --compare: two runs side by side, and which differences are more than chance."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from lab.bench import Cell, Run
from lab.report import CASE, case_text

LEVEL = 0.01  # share of the reported differences that may be chance
THRESHOLD = 0.05  # two runs of the same code on a quiet machine differ by less


@dataclass(frozen=True)
class Difference:
    """A cell's medians in two runs, in seconds, and p, the chance of such a difference if there is none."""

    cell: Cell
    before: float
    now: float
    p: float

    @property
    def change(self) -> float:
        """+0.1 where it takes 10 % longer now."""
        return self.now / self.before - 1


def differences(before: Run, now: Run, threshold: float = THRESHOLD) -> tuple[list[Difference], int]:
    """Cells whose medians differ by more than `threshold` and by more than chance, the slowest change first.

    Also gives the number of cells that both runs timed. By chance is judged by the Mann-Whitney U test on the
    rounds, corrected for the number of cells (Benjamini & Hochberg 1995) at LEVEL. The rounds of a run share
    its machine's state, which no test of them can see: that is what the threshold is for.
    Raises ValueError if SciPy is missing, no cell is in both runs, or there are too few rounds to tell.
    """
    try:
        from scipy import stats
    except ImportError:
        raise ValueError("--compare needs SciPy: pip install -c constraints.txt -e '.[lab]'") from None
    old = {result.cell: result.seconds for result in before.results if len(result.seconds) > 1}
    timed = [result for result in now.results if len(result.seconds) > 1]
    both = [(result.cell, old[result.cell], result.seconds) for result in timed if result.cell in old]
    if not both:
        raise ValueError("no cell was timed in both runs; they can only be compared where they do the same")
    least = max(2 / math.comb(len(a) + len(b), len(a)) for _, a, b in both)  # p of rounds that all differ
    if least > LEVEL:
        raise ValueError(
            f"the runs have {len(both[0][1])} and {len(both[0][2])} rounds, too few to tell a difference "
            "from chance; measure with -r 10"
        )
    p = [float(stats.mannwhitneyu(a, b).pvalue) for _, a, b in both]
    corrected = stats.false_discovery_control(p)
    found = [
        Difference(cell, statistics.median(a), statistics.median(b), float(chance))
        for (cell, a, b), chance in zip(both, corrected)
    ]
    found = [each for each in found if each.p < LEVEL and abs(each.change) > threshold]
    return sorted(found, key=lambda each: -each.change), len(both)


def text(found: list[Difference], cells: int, before: Run, now: Run, threshold: float) -> str:
    """The differences as a Markdown table, or that there is none."""
    lines = []
    if before.machine.get("cpu") != now.machine.get("cpu"):
        lines.append(f"Before it was another processor: {before.machine.get('cpu')}.")
    lines += [f"In the run of {run.machine.get('date')}: {run.busy}" for run in (before, now) if run.busy]
    if not found:
        lines.append(f"No difference above {100 * threshold:g} % and above chance in {cells} cells.")
        return "\n".join(lines)
    names = [name for name in CASE if any(getattr(each.cell, name) is not None for each in found)]
    titles = ["contender", *(CASE[name] for name in names), "before, ms", "now, ms", "change", "by chance"]
    lines.append(f"{len(found)} of {cells} cells differ by more than {100 * threshold:g} % and than chance:")
    lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for each in found:
        case = [each.cell.contender, *(case_text(name, getattr(each.cell, name)) for name in names)]
        word = "slower" if each.change > 0 else "faster"
        figures = [f"{1e3 * each.before:.4g}", f"{1e3 * each.now:.4g}", f"{100 * each.change:+.1f} % {word}"]
        lines.append(f"| {' | '.join([*case, *figures, f'{each.p:.0e}'])} |")
    return "\n".join(lines)
