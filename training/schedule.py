"""How far a run is: BySteps counts steps, ByTime seconds, so that it ends on time on a busy machine too."""

from __future__ import annotations

import time
from typing import Any, Protocol

from training.recipe import DECAYS, Recipe, learning_rate

EVALUATIONS = 40  # of a run by time, at most; of a long one more
LONGEST_WAIT = 60.0  # seconds between two evaluations, unless they take long
EVALUATING = 0.03  # share of the time that they may take
MOST_STEPS = 10  # that one slow step may count as


class Schedule(Protocol):
    """The progress of a run."""

    done: int  # steps
    seconds: float  # that the run has taken, those before a resumption included

    def begin(self, at: float) -> None:
        """Start the clock at this time.monotonic(); `seconds` go on from where they are."""

    def elapsed(self) -> float:
        """Seconds up to now, those after the last step included."""

    def left(self) -> float:
        """Seconds until the end, as far as one can tell."""

    def stepped(self, seconds: float) -> None:
        """Count a step, which took so long, and the time since the one before."""

    def evaluated(self, seconds: float) -> None:
        """Take note that an evaluation has taken so long."""

    def rate(self) -> float:
        """The next step's share of the peak learning rate."""

    def progress(self) -> float:
        """From 0 to 1."""

    def evaluation_due(self) -> bool: ...

    def ended(self) -> bool: ...

    def state(self) -> dict[str, Any]:
        """What load() takes; it can be written as JSON."""

    def load(self, state: dict[str, Any]) -> None: ...


class BySteps:
    """The recipe's number of steps, with an evaluation after every `eval_every` and the last."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.done, self.seconds = recipe, 0, 0.0

    def begin(self, at: float) -> None:
        self._lap = at

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._lap

    def left(self) -> float:
        return self.seconds / max(1, self.done) * (self.recipe.steps - self.done)

    def stepped(self, seconds: float) -> None:
        self.done += 1
        lap = time.monotonic()
        self.seconds, self._lap = self.seconds + lap - self._lap, lap

    def evaluated(self, seconds: float) -> None:
        pass

    def rate(self) -> float:
        return learning_rate(self.recipe, self.done)

    def progress(self) -> float:
        return self.done / self.recipe.steps

    def evaluation_due(self) -> bool:
        return self.done % self.recipe.eval_every == 0 or self.ended()

    def ended(self) -> bool:
        return self.done >= self.recipe.steps

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "seconds": self.seconds}

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.seconds = state["done"], state["seconds"]


class ByTime:
    """The recipe's minutes, of which `finishing` seconds are kept for what follows the last step.

    A step counts as at most MOST_STEPS usual ones. One during which the machine slept makes the run end
    later; it does not cut the decay of the learning rate short.
    """

    STATE = (
        *("done", "seconds", "finishing", "step_seconds"),
        *("_evaluating", "_evaluation_seconds", "_next_evaluation"),
    )

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.minutes is not None
        self.recipe, self.done, self.seconds = recipe, 0, 0.0
        self.finishing = 0.0  # estimated by the run, again and again
        self.step_seconds = 0.0  # of a usual step
        self._evaluating = 0.0  # seconds
        self._evaluation_seconds = 0.0  # of a usual one
        self._wait = min(self._budget / EVALUATIONS, LONGEST_WAIT)
        self._next_evaluation = self._wait

    @property
    def _budget(self) -> float:
        return 60 * (self.recipe.minutes or 0)

    def begin(self, at: float) -> None:
        self._lap = at

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._lap

    def left(self) -> float:
        return max(0.0, self._budget - self.seconds)

    def stepped(self, seconds: float) -> None:
        self.done += 1
        counted = min(seconds, MOST_STEPS * self.step_seconds) if self.step_seconds else seconds
        self.step_seconds += 0.1 * (counted - self.step_seconds) if self.step_seconds else counted
        lap = time.monotonic()
        self.seconds += lap - self._lap - (seconds - counted)
        self._lap = lap

    def evaluated(self, seconds: float) -> None:
        usual = self._evaluation_seconds
        counted = min(seconds, MOST_STEPS * usual) if usual else seconds
        self._evaluation_seconds = min(usual, counted) if usual else counted
        self._evaluating += counted
        share = (self._evaluating + counted) / EVALUATING  # with the next one, which takes as long
        self._next_evaluation = max(self.elapsed() + self._wait, share)

    def rate(self) -> float:
        progress = self.progress()
        # A tenth of a short run is shorter than the warm-up.
        warm = max((self.done + 1) / max(1, self.recipe.warmup), progress / 0.1)
        return min(1.0, warm) * DECAYS[self.recipe.decay](progress)

    def progress(self) -> float:
        return min(1.0, self.seconds / self._training_seconds())

    def evaluation_due(self) -> bool:
        return self.seconds >= self._next_evaluation and not self.ended()

    def ended(self) -> bool:
        return self.done > 0 and self.seconds + 0.5 * self.step_seconds >= self._training_seconds()

    def _training_seconds(self) -> float:
        return max(0.5 * self._budget, self._budget - self.finishing)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.STATE}

    def load(self, state: dict[str, Any]) -> None:
        for name in self.STATE:
            setattr(self, name, state[name])
