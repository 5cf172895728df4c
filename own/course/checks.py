"""Checks the exercises of a folder, stage by stage, in processes that a student's file cannot end."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shakespeare.lab.command import run
from shakespeare.own import kernel as kernels
from shakespeare.own.course.exercises import EXERCISES, Exercise, Failed, asked
from shakespeare.own.trial import judge, sanitizers, speed
from shakespeare.own.trial.cases import CASES
from shakespeare.own.trial.speed import Figures, Size

PYTHON_SECONDS = 120  # that the check of an exercise in PyTorch may take
SIZES = {"cpu": Size(alone=True), "cuda": Size(4096, 32, 100, alone=True)}  # of the timed call


@dataclass
class Result:
    """What an exercise has reached.

    passed: the stages, in order. failed: why the next one is not passed; '' if all are. note: of the timed
    call. ms, share: its milliseconds, and its share of the limit. seconds: that the check took.
    """

    name: str
    of: int
    passed: list[str] = field(default_factory=list)
    failed: str = ""
    note: str = ""
    ms: float | None = None
    share: float | None = None
    seconds: float = 0.0

    @property
    def points(self) -> int:
        """One for each stage."""
        return len(self.passed)


def named(path: Path) -> list[tuple[Exercise, Path]]:
    """The exercises of a folder, or the one of a file, with their files.

    Raises ValueError if there is none.
    """
    folder = path if path.is_dir() else path.parent
    files = [(row, folder / row.file) for row in EXERCISES]
    existing = [(row, file) for row, file in files if path in (folder, file) and file.is_file()]
    if not existing:
        raise ValueError(f"DIRECTORY is {str(path)!r}; it must hold exercises, or be one of them")
    return existing


def check(exercises: Sequence[tuple[Exercise, Path]], seconds: float) -> Iterator[Result]:
    """Check each exercise. seconds: that a call may take before it is endless."""
    with contextlib.closing(judge.Checker()) as checker:
        for exercise, file in exercises:
            start = time.perf_counter()
            result = Result(exercise.name, len(exercise.stages))
            by_python = exercise.kind == "decoder"
            stages = () if by_python else _attention(exercise, file, result, checker, seconds)
            try:
                for stage, note in _python(exercise, file) if by_python else stages:
                    result.passed.append(stage)
                    result.note = note
            except Failed as error:
                result.failed = str(error)
            if not result.passed and file.read_text(errors="replace") == exercise.text():
                result.failed = "it is untouched"
            result.seconds = time.perf_counter() - start
            yield result


def _attention(
    exercise: Exercise, file: Path, result: Result, checker: judge.Checker, seconds: float
) -> Iterator[tuple[str, str]]:
    """Yield each stage that a kernel or its backward pass passes, with a note.

    Raises Failed at the first other one.
    """
    backward = exercise.kind == "backward"
    verdict = checker.check(file, seconds, backward=backward)
    checker.warm(file)
    right = {case for i, case in enumerate(CASES) if i in verdict.passed or str(case) in verdict.skipped}
    for stage in ("plain", "causal", "awkward"):
        wrong = [case for case in CASES if asked(stage, case) and case not in right]
        if wrong or not verdict.passed:
            raise Failed(verdict.why or f"wrong for {wrong[0]}")
        yield stage, ""
    sanitizers.sanitize(file, verdict)
    if not verdict.right:
        raise Failed(verdict.why or "wrong")
    yield "memory", ""
    figures = speed.measure(file, replace(SIZES[kernels.read(file).device], backward=backward))
    if not isinstance(figures, Figures):
        raise Failed(figures.sentence)
    if library := verdict.library or figures.library:
        raise Failed(library)
    result.ms, result.share = figures.ms["own"], figures.share
    note = f"{result.ms:.3g} ms, {100 * figures.share:.3g} % of the FMA peak "
    result.note = f"{note}({figures.peak / 1e9:.3g} GFLOP/s), {figures.cpu}"
    if 100 * figures.share < exercise.share:
        raise Failed(f"{result.note}; {exercise.share:g} % is asked for")
    yield "fast", result.note


def _python(exercise: Exercise, file: Path) -> Iterator[tuple[str, str]]:
    """The same of the decoder, by a process."""
    command = [sys.executable, "-m", "shakespeare.own.course.models", str(file.resolve())]
    try:
        code, out, err = run([*command, str(exercise.share)], PYTHON_SECONDS, None, **judge.environment())
    except subprocess.TimeoutExpired:
        raise Failed(f"it did not end within {PYTHON_SECONDS} s, and was ended") from None
    stage = ""
    for line in out.splitlines():
        said = json.loads(line)
        if "failed" in said:
            raise Failed(said["failed"])
        yield (stage := said["stage"]), said["note"]
    if code or stage != "fast":
        raise Failed(f"it was not checked: {(err.splitlines() or [f'exit code {code}'])[-1]}")
