"""Checks the exercises of a folder, stage by stage, in processes that a student's file cannot end."""

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shakespeare.attention_ext import user_kernel
from shakespeare.judge import cases
from shakespeare.judge.course.exercises import EXERCISES, Exercise, Failed, includes
from shakespeare.judge.player import Found
from shakespeare.judge.speed import Figures, Size
from shakespeare.judge.verdict import Checker

Files = list[tuple[Exercise, Path]]
SIZES = {"cpu": Size(alone=True), "cuda": Size(4096, 32, 100, alone=True)}  # the timed calls, by device


@dataclass
class Result:
    """What an exercise has reached.

    full_points: points that all stages give. passed: the stages, in order; laps: the seconds of each. failed:
    why the next one is not passed; '' if all are. note: describes the timed call. ms, share: its
    milliseconds, and its share of the limit. seconds: that the check took.
    """

    name: str
    full_points: float
    stages: int
    passed: list[str] = field(default_factory=list)
    laps: list[float] = field(default_factory=list)
    failed: str = ""
    note: str = ""
    ms: float | None = None
    share: float | None = None
    seconds: float = 0.0

    @property
    def points(self) -> float:
        """The points, of which each stage gives as many."""
        return self.full_points * (len(self.passed) / self.stages)

    def as_json(self) -> dict[str, object]:
        """The result for --json."""
        named = {"of" if name == "full_points" else name: value for name, value in vars(self).items()}
        return named | {"points": self.points}


def weighted(texts: Iterable[str]) -> dict[str, float]:
    """{'4-flash': 10.0} of ['4-flash=10']. Raises ValueError for a text of another form."""
    pattern = f"({'|'.join(row.name for row in EXERCISES)})=([0-9]{{1,6}}(?:\\.[0-9]{{1,6}})?)"
    for text in texts:
        if not re.fullmatch(pattern, text):
            form = "NAME=POINTS, an exercise's name such as 4-flash and a number of at least 0"
            raise ValueError(f"weight is {text!r}; it must be {form}")
    return {name: float(points) for name, _, points in (text.partition("=") for text in texts)}


def named(path: Path, weights: Mapping[str, float] = {}) -> Files:
    """A path's exercises and their files; those with weights may be missing. Raises ValueError for none."""
    folder = path if path.is_dir() else path.parent
    files = [(row, folder / row.file) for row in EXERCISES if path in (folder, folder / row.file)]
    if existing := [(row, file) for row, file in files if file.is_file() or row.name in weights]:
        return existing
    raise ValueError(f"DIRECTORY is {str(path)!r}; it must hold exercises, or be one of them")


def check(
    exercises: Files, seconds: float, weights: Mapping[str, float] = {}, secret: int | None = None
) -> Iterator[Result]:
    """Check each exercise. seconds: that a call may take before it is endless.

    weights: points, by default one for each stage. secret: gives each file inputs of its own.
    """
    with contextlib.closing(Checker()) as checker:
        for exercise, file in exercises:
            start = time.perf_counter()
            count = len(exercise.stages)
            result = Result(exercise.name, weights.get(exercise.name, count), count)
            if not file.is_file():
                result.failed = f"there is no {file.name}"
                yield result
                continue
            failures: tuple[type[Exception], ...] = (Failed,)
            stages = _attention(exercise, file, result, checker, seconds, cases.seed_of(file, secret))
            if exercise.task == "decoder":
                from shakespeare.judge.course import decoder  # imports torch

                failures = (Failed, Found, RuntimeError)  # a player's call raises these
                stages = decoder.stages(file, exercise.share, seconds)
            try:
                for stage, note in stages:
                    result.passed.append(stage)
                    result.laps.append(time.perf_counter() - start - sum(result.laps))
                    result.note = note
            except failures as error:
                result.failed = str(error)
            if not result.passed and file.read_text(errors="replace") == exercise.text():
                result.failed = "it is untouched"
            result.seconds = time.perf_counter() - start
            yield result


def _attention(
    exercise: Exercise, file: Path, result: Result, checker: Checker, seconds: float, seed: int
) -> Iterator[tuple[str, str]]:
    """Yield each stage that a kernel or its backward pass passes, with a note; raise Failed at another."""
    backward = exercise.task == "backward"
    windowed = exercise.task == "window"
    verdict = checker.check(file, seconds, seed, backward, windowed)
    every = cases.seeded(0, windowed)
    checker.warm(file)
    right = {case for i, case in enumerate(every) if i in verdict.passed or str(case) in verdict.skipped}
    for stage in ("plain", "causal", "awkward"):
        wrong = [case for case in every if includes(stage, case, windowed) and case not in right]
        if wrong or not verdict.passed:
            raise Failed(verdict.why or f"wrong for {wrong[0]}")
        yield stage, ""
    size = replace(SIZES[user_kernel.read(file).device], backward=backward)
    steps = checker.examine(file, verdict, size)
    while verdict.right and next(steps) != "memory":
        pass
    if not verdict.right:
        raise Failed(verdict.why or "wrong")
    yield "memory", ""
    for _ in steps:
        pass
    figures = verdict.figures
    if not isinstance(figures, Figures):
        raise Failed(figures.sentence if figures else verdict.why)
    if verdict.library:
        raise Failed(verdict.library)
    result.ms = figures.ms["own"]
    result.share = figures.share
    note = f"{result.ms:.3g} ms, {100 * figures.share:.3g} % of the FMA peak "
    result.note = f"{note}({figures.peak / 1e9:.3g} GFLOP/s), {figures.cpu}"
    if 100 * figures.share < exercise.share:
        raise Failed(f"{result.note}; {exercise.share:g} % is asked for")
    yield "fast", result.note
