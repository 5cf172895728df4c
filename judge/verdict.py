"""Decides whether a user's kernel is right: by the cases, the sanitizers, Triton's compiler and the clock."""

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.attention_ext import user_kernel
from shakespeare.attention_ext.parts import BuildError, Dtype
from shakespeare.judge import cases, diagnosis, player, sanitizers, speed, triton_tiles
from shakespeare.judge.cases import Array, Case
from shakespeare.judge.diagnosis import FORWARD, Finding, Subject
from shakespeare.judge.gradients import BACKWARD
from shakespeare.judge.player import JIT_SECONDS, Gone, Player, Wrong
from shakespeare.judge.speed import Figures, Size, Stop
from shakespeare.judge.tolerance import Floats
from shakespeare.judge.triton_tiles import Tiles

MAX_MEMORY = 4 << 30  # bytes that a kernel on the CPU may map in the cases
SHARE = 0.3  # of the limit: a case that is expected to take more, by the fastest one before it, is skipped
MEASURED_WORK = 1000  # multiply-adds; a smaller call says little
SIMULATED_WORK = 60_000  # multiply-adds of a case at most in Numba's simulator of CUDA
BEYOND = re.compile("illegal memory access|misaligned address|out of bounds")  # a GPU reports it


@dataclass
class Verdict:
    """Whether a kernel is right, and what explains it.

    refused: why it could not be compiled; then nothing was tried. output: the compiler's. at, case: the first
    wrong case, or that of a crash, and its number. passed: the numbers of the right ones. tried: cases;
    skipped: those that would take too long. finding: what explains a wrong result. shown: the first wrong
    case, what was tried, and the result. memory: what sanitizers say. tiles, figures: a right kernel's, or
    why there are none. library: a sentence if another's attention does the work. backward: the backward pass
    is judged. sources: the file, and what it includes or imports.
    """

    refused: str = ""
    output: str = ""
    at: str = ""
    case: int | None = None
    passed: list[int] = field(default_factory=list)
    tried: int = 0
    skipped: list[str] = field(default_factory=list)
    wrong: bool = False
    finding: Finding | None = None
    shown: tuple[Case, Subject, Floats] | None = None
    memory: list[str] = field(default_factory=list)
    tiles: Tiles | Finding = field(default_factory=list)
    figures: Figures | Finding | None = None
    library: str = ""
    backward: bool = False
    sources: list[Path] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found."""
        return not self.wrong and not self.refused

    @property
    def passes(self) -> bool:
        """Whether it is right, and nothing speaks against its speed."""
        untimed = isinstance(self.figures, Finding) and self.figures.kind != speed.UNTIMED
        return self.right and not untimed

    @property
    def why(self) -> str:
        """Why it is not right; '' if that is not known."""
        return self.refused or (self.finding.sentence if self.finding else "")

    def add(self, finding: Finding, at: str = "") -> None:
        """Take a mistake as the finding. at: what has shown it, if it is no case."""
        if at and not self.wrong:
            self.at = at
        self.wrong = True
        self.finding = finding

    def sanitize(self, file: Path, dtype: str = "fp32", stop: Stop = None) -> None:
        """Add what sanitizers find. Raises Stopped if stop()."""
        if self.refused or self.finding and self.finding.kind == "endless":
            return
        for message, finding in sanitizers.search(
            file, self.backward, self.case if self.wrong else None, dtype, stop
        ):
            self.memory.append(message)
            if finding:
                self.add(finding, "a call under a sanitizer")

    def try_cases(
        self,
        run: diagnosis.Run,
        settle: Callable[[], object],
        chosen: Mapping[Case, int],
        seconds: float,
        subject: Subject,
    ) -> None:
        """Try a kernel with cases, and explain what is wrong. Raises as Player.call() does.

        run: calls it. settle: raises Wrong if a result changes after its call. chosen: the cases' numbers.
        """
        wrong: dict[Case, Floats] = {}
        fastest = math.inf  # seconds of a multiply-add
        for case, number in chosen.items():
            if fastest < math.inf and fastest * case.work * case.repeats > SHARE * seconds:
                self.skipped.append(str(case))
                continue
            if not wrong:
                self.at = str(case)
                self.case = number
            start = time.perf_counter()
            results = (run(case) for _ in range(case.repeats))
            bad = next((got for got in results if not subject.expected(case).allows(got)), None)
            spent = time.perf_counter() - start
            self.tried += 1
            if bad is None:
                self.passed.append(number)
            else:
                if not wrong:
                    settle()
                    self.wrong = True
                    self.shown = case, subject, bad
                wrong[case] = bad
            if case.work >= MEASURED_WORK:
                fastest = min(fastest, spent / case.work / case.repeats)
        settle()
        if wrong:
            with contextlib.suppress(RuntimeError, Wrong, Gone):
                self.finding = diagnosis.diagnose(run, wrong, subject)


class Checker:
    """Decides about one file after the other. A player is started before it is needed."""

    def __init__(self) -> None:
        self._player: Player | None = None
        self._others = player.strangers()

    def close(self) -> None:
        """End the player, and what files have left behind. No compiler may run then."""
        self._end_player()
        player.end_strangers(self._others)

    def _end_player(self) -> None:
        if self._player:
            self._player.close()
            self._player = None

    def warm(self, file: Path) -> Player:
        """The player that this file needs, which is started."""
        with_torch = user_kernel.read(file).needs_torch
        if self._player and (with_torch > self._player.with_torch or not self._player.alive):
            self._end_player()
        self._player = self._player or Player(with_torch)
        return self._player

    def check(
        self,
        file: Path,
        seconds: float,
        seed: int = 0,
        backward: bool = False,
        windowed: bool = False,
        dtype: Dtype = Dtype.FP32,
    ) -> Verdict:
        """Try the kernel of a file, or its backward pass, with all cases.

        seconds: what a call may take before it is endless. seed, dtype: decide the inputs. windowed: also
        with a window.
        """
        played = self.warm(file)
        source = user_kernel.read(file)
        verdict = Verdict(backward=backward)
        subject = BACKWARD if backward else FORWARD
        on_gpu = source.device == "cuda"
        max_work = SIMULATED_WORK if source.simulated == "numba" else math.inf
        every = enumerate(cases.seeded(seed, windowed, dtype))
        chosen = {case: n for n, case in every if case.work <= max_work}
        compiling = seconds + JIT_SECONDS * source.compiling
        if source.triton and on_gpu:  # it compiles for new sizes and tiles
            seconds = compiling
        limits = chain([compiling], repeat(seconds))
        beside = threading.Thread(target=lambda: [*map(subject.expected, chosen)])
        beside.start()  # while a compiler runs

        def run(case: Case, inputs: Sequence[Array] | None = None, **settings: Any) -> Floats:
            matrices = dict(zip(subject.names, subject.inputs(case) if inputs is None else inputs))
            options: dict[str, Any] = {"causal": case.causal, "scale": case.applied, "threads": case.threads}
            if windowed:
                options["window"] = case.window
            return np.array(played.call(matrices, next(limits), **options | settings)[0], np.float64)

        try:
            played.load(file, None if on_gpu else MAX_MEMORY, backward, dtype)
            beside.join()
            verdict.sources = played.sources
            verdict.try_cases(run, played.settle, chosen, math.inf if on_gpu else seconds, subject)
            verdict.library = played.library(file)
        except BuildError as error:
            verdict.refused = str(error)
            verdict.output = error.output
            verdict.sources = user_kernel.sources(file)
        except (Gone, Wrong) as error:
            verdict.add(error.finding)
        except RuntimeError as error:
            verdict.add(Finding("bounds" if BEYOND.search(str(error)) else "raised", str(error)))
        finally:
            beside.join()
            self._end_player()
        return verdict

    def examine(self, file: Path, verdict: Verdict, size: Size, stop: Stop = None) -> Iterator[str]:
        """Add what sanitizers, Triton's compiler and the clock find; yield the name of each part of a report.

        With size.alone Triton's tiles are not compiled. Raises Stopped if stop().
        """
        known = verdict.finding
        verdict.sanitize(file, size.dtype, stop)
        if not stop:  # else a compiler may run for the next save
            player.end_strangers(self._others)
        if verdict.finding != known:
            yield "verdict"
        yield "memory"
        if verdict.right and not size.alone:
            verdict.tiles = triton_tiles.swept(file, size, stop)
            if isinstance(verdict.tiles, Finding) and verdict.tiles.kind == "compile":
                verdict.add(verdict.tiles, "no case: it is right in Triton's interpreter")
            yield "tiles" if verdict.right else "verdict"
        if verdict.right:
            verdict.figures = speed.measure(file, size, stop)
            if isinstance(verdict.figures, Figures):
                if verdict.figures.library and not verdict.library:
                    verdict.library = verdict.figures.library
                    yield "library"
            elif verdict.figures.kind not in speed.UNMEASURED:
                verdict.add(verdict.figures, "a timed call")
            yield "speed" if verdict.right else "verdict"
