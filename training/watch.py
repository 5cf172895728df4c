"""How a run reports its progress."""

from dataclasses import dataclass

from model.gpt import GPT
from model.tokenizer import CharTokenizer


@dataclass
class Status:
    """The progress of a run.

    steps: the estimated total. progress: 0 to 1. seconds: since the start. left: estimated seconds until the
    end. rate: characters per second of the whole time. learning_rate: the share of the peak. curve: [step,
    training loss, validation loss] of each evaluation.
    """

    done: int
    steps: int
    progress: float
    seconds: float
    left: float
    rate: float
    learning_rate: float
    curve: list[list[float]]


class Watcher:
    """A run calls these methods, which do nothing here, in its own thread; their time counts as the run's."""

    def begin(self, averaged: GPT, tokenizer: CharTokenizer) -> None:
        """The run begins. averaged: the model that is evaluated and saved; each training step changes it."""

    def note(self, sentence: str) -> None:
        """Report a sentence that the user should know."""

    def stepped(self, status: Status) -> None:
        """A training step is done."""

    def evaluated(self, status: Status) -> None:
        """The last row of the curve is new."""
