"""The progress of a run, and who is told of it. Schedule counts training steps, ByTime seconds."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shakespeare.attention_ext.checks import finite, whole_number
from shakespeare.model.tokenizer import CharTokenizer
from shakespeare.training.recipe import DECAYS, EVALUATING, EVALUATIONS, LONGEST_WAIT, Recipe

if TYPE_CHECKING:
    from shakespeare.training.cuda.trainer import CudaTrainer
    from shakespeare.training.trainer import Trainer


class Schedule:
    """The recipe's number of training steps, with an evaluation after every `eval_every` and the last.

    done: training steps. curve: [done, training loss, validation loss] of each evaluation. characters: of a
    training step. ByTime also uses seconds: the time of the run and those it resumed, step_seconds: a usual
    training step's, and finishing: the estimated time of the run's end.
    """

    STATE: tuple[str, ...] = ("done", "seconds")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.done = 0
        self.seconds = 0.0
        self.step_seconds = self.finishing = 0.0
        self.characters = recipe.batch * recipe.block_size
        self.curve: list[list[float | None]] = []

    def begin(self, at: float) -> None:
        """Start the clock at this time.monotonic(); `seconds` continue from their value."""
        self._lap = at

    def elapsed(self) -> float:
        """Seconds up to now, including those after the last training step."""
        return self.seconds + time.monotonic() - self._lap

    def left(self) -> float:
        """Estimated seconds until the end."""
        return self.seconds / max(1, self.done) * (self.recipe.steps - self.done)

    def stepped(self, seconds: float) -> None:
        """Count a training step, the seconds that it took, and the time since the one before."""
        self.done += 1
        lap = time.monotonic()
        self.seconds += lap - self._lap
        self._lap = lap

    def evaluated(self, seconds: float) -> None:
        """Record the seconds of an evaluation."""

    def rate(self) -> float:
        """The next training step's share of the peak learning rate: linear warm-up, then the decay to 0.

        The warm-up takes at most a tenth of the steps.
        """
        steps = self.recipe.steps
        warmup = min(self.recipe.warmup, max(1, steps // 10))
        if self.done < warmup:
            return (self.done + 1) / warmup
        return DECAYS[self.recipe.decay](min(1.0, (self.done - warmup) / max(1, steps - warmup)))

    def progress(self) -> float:
        """The share of the run that is done, from 0 to 1."""
        return self.done / self.recipe.steps

    def steps(self) -> int:
        """The estimated number of all training steps."""
        progress = self.progress()
        return max(self.done, round(self.done / progress)) if progress else self.recipe.steps

    def speed(self) -> float:
        """Characters per second of the whole time."""
        return self.done * self.characters / max(self.seconds, 1e-9)

    def evaluation_due(self) -> bool:
        return self.done % self.recipe.eval_every == 0 or self.ended()

    def ended(self) -> bool:
        return self.done >= self.recipe.steps

    def state(self) -> dict[str, Any]:
        """The state for load(); it can be written as JSON."""
        return {name: getattr(self, name) for name in self.STATE}

    def load(self, state: dict[str, Any], curve: list[list[float | None]]) -> None:
        """Continue from a state() and a curve. Raises TypeError or ValueError for what is no number there."""
        for name in self.STATE:
            setattr(self, name, (whole_number if name == "done" else finite)(name, state[name]))
        if not isinstance(curve, list):
            raise TypeError("the curve is no list")
        for done, training, validation in curve:
            whole_number("a step of the curve", done)
            finite("a training loss of the curve", 0 if training is None else training)
            finite("a validation loss of the curve", 0 if validation is None else validation)
        self.curve = curve


class ByTime(Schedule):
    """The recipe's minutes; `finishing` seconds are kept for the work after the last training step."""

    STATE = ("done", "seconds", "finishing", "step_seconds", "_evaluating", "_next_evaluation")

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._budget = 60 * (recipe.minutes or 0)  # seconds
        self._evaluating = 0.0  # time of all evaluations
        self._wait = min(self._budget / EVALUATIONS, LONGEST_WAIT)
        self._next_evaluation = self._wait

    def left(self) -> float:
        return max(0.0, self._budget - self.seconds)

    def stepped(self, seconds: float) -> None:
        super().stepped(seconds)
        self.step_seconds += 0.1 * (seconds - self.step_seconds) if self.step_seconds else seconds

    def evaluated(self, seconds: float) -> None:
        self._evaluating += seconds
        share = (self._evaluating + seconds) / EVALUATING  # assuming that the next one takes as long
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


class Watcher:
    """A run calls these methods, which do nothing here, in its own thread; their time counts as the run's.

    stops: is asked after each training step whether to stop.
    """

    def __init__(self, stops: Callable[[], bool] = lambda: False) -> None:
        self.stops = stops

    def begin(self, trainer: "Trainer | CudaTrainer", tokenizer: CharTokenizer) -> None:
        """The run begins. trainer: has the averages that are evaluated and saved."""

    def note(self, sentence: str) -> None:
        """Report a sentence that the user should know."""

    def stepped(self, schedule: Schedule) -> None:
        """A training step is done."""

    def evaluated(self, schedule: Schedule) -> None:
        """The last row of the curve is new."""
