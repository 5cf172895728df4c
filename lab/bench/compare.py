"""gpt.py bench --compare: the statistically significant differences between two runs."""

import math
import statistics
from dataclasses import asdict, dataclass

from shakespeare.lab.bench.cell import Cell
from shakespeare.lab.bench.report import beside_cells, case
from shakespeare.lab.bench.results import Result, Run
from shakespeare.lab.formats import counted

FALSE_DISCOVERY_RATE = 0.01  # share of the reported differences that may be chance
THRESHOLD = 0.05  # share of the time; two runs of the same code on a quiet machine differ by less
MAX_EXACT_ROUNDS = 20  # with at most this many the test is exact, with more a normal approximation


@dataclass(frozen=True)
class Difference:
    """A cell's medians in two runs, in seconds. p: the probability of such a difference by chance."""

    cell: Cell
    before: float
    now: float
    p: float

    @property
    def change(self) -> float:
        """+0.1 if a call takes 10 % longer now."""
        return self.now / self.before - 1


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    cells: how many both timed. differences: significant and above the threshold, the largest slowdown first.
    broken: results wrong only now. alone: how many cells only the earlier run has, and only this one.
    """

    cells: int
    differences: list[Difference]
    broken: list[Result]
    alone: tuple[int, int]

    @property
    def worse(self) -> bool:
        """Whether anything is slower now, or wrong."""
        return bool(self.broken) or any(difference.change > 0 for difference in self.differences)


def check(before: Run, cells: list[Cell], rounds: int) -> None:
    """Raise ValueError for runs that do not compare: no SciPy, no common cell or too few rounds."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise ValueError("--compare needs SciPy: pip install -c constraints.txt -e '.[lab]'") from None
    old = {result.cell: len(result.seconds) for result in before.results if result.seconds}
    both = [cell for cell in cells if cell in old]
    if not both:
        raise ValueError("no cell was timed in both runs, so there is nothing to compare")
    fewest = min(old[cell] for cell in both)
    least_p = 2 / math.comb(fewest + rounds, rounds)  # if all rounds of one run are faster
    if least_p * len(both) > FALSE_DISCOVERY_RATE:
        few = f"too few to tell a difference in {counted(len(both), 'cell')} from chance"
        raise ValueError(f"the runs have {fewest} and {rounds} rounds, {few}; measure with -r 10 or more")


def compare(before: Run, now: Run, threshold: float = THRESHOLD) -> Comparison:
    """The cells whose medians differ significantly and by more than `threshold`, as a share; see check().

    Mann-Whitney U test on the rounds that count, corrected for the number of cells (Benjamini & Hochberg
    1995) at FALSE_DISCOVERY_RATE. The threshold is for the machine's state, which all rounds of a run share.
    """
    from scipy import stats

    old = {result.cell: result for result in before.results}
    new = {result.cell for result in now.results}
    both = [(r.cell, old[r.cell].counted, r.counted) for r in now.results if r.cell in old]
    both = [(cell, a, b) for cell, a, b in both if a and b]
    methods = ["exact" if max(len(a), len(b)) <= MAX_EXACT_ROUNDS else "asymptotic" for _, a, b in both]
    p = [float(stats.mannwhitneyu(a, b, method=how).pvalue) for how, (_, a, b) in zip(methods, both)]
    corrected = stats.false_discovery_control(p) if p else []
    medians = ((cell, statistics.median(a), statistics.median(b)) for cell, a, b in both)
    compared = [Difference(*cell_medians, float(chance)) for cell_medians, chance in zip(medians, corrected)]
    differing = [d for d in compared if d.p < FALSE_DISCOVERY_RATE and abs(d.change) > threshold]
    differing.sort(key=lambda difference: -difference.change)
    broken = [r for r in now.results if r.status == "wrong" and r.cell in old and old[r.cell].status == "ok"]
    alone = sum(cell not in new for cell in old), sum(cell not in old for cell in new)
    return Comparison(len(both), differing, broken, alone)


def text(compared: Comparison, before: Run, now: Run, threshold: float) -> str:
    """The comparison as text: a Markdown table of the differences, or a line that there are none."""
    lines = []
    earlier, later = (
        {"processor": run.machine.get("cpu"), "GPU": (run.machine.get("gpu") or {}).get("name")}
        for run in (before, now)
    )
    for what, name in earlier.items():
        if name != later[what]:
            lines.append(f"The earlier run was on another {what}: {name}.")
    lines += [f"In the run of {run.machine.get('date')}: {run.busy}" for run in (before, now) if run.busy]
    if any(compared.alone):
        alone = f"{compared.alone[0]} cells of the earlier run and {compared.alone[1]} of this"
        lines.append(f"Not compared: {alone}, as the other run lacks them.")
    lines += [f"Right before, wrong now: {case(r.cell)}; {r.note}" for r in compared.broken]
    cells = counted(compared.cells, "cell")
    differing = compared.differences
    if not differing:
        return "\n".join([*lines, f"No difference above {100 * threshold:g} % and above chance in {cells}."])
    figures = []
    for d in differing:
        change = f"{100 * d.change:+.1f} % {'slower' if d.change > 0 else 'faster'}"
        figures.append((f"{1e3 * d.before:.4g}", f"{1e3 * d.now:.4g}", change, f"{d.p:.0e}"))
    lines.append(
        f"{len(differing)} of {cells} differ by more than {100 * threshold:g} % and by more than chance:"
    )
    titles = ("before, ms", "now, ms", "change", "by chance")
    return "\n".join([*lines, "", beside_cells([asdict(d.cell) for d in differing], titles, figures)])
