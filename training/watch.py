"""How a run reports its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from model.gpt import GPT
from model.tokenizer import CharTokenizer


@dataclass
class Status:
    """The progress of a run.

    steps: the estimated total. progress: 0 to 1. seconds: since the start. left: estimated seconds until the
    end. rate: characters per second of the whole time. learning_rate: the share of the peak. curve: [step,
    training loss, validation loss] of each evaluation. best: the least validation loss.
    """

    done: int
    steps: int
    progress: float
    seconds: float
    left: float
    rate: float
    learning_rate: float
    curve: list[list[float]]
    best: float


class Watcher(Protocol):
    """A run calls these methods in its own thread; their time counts as the run's."""

    def begin(self, averaged: GPT, tokenizer: CharTokenizer) -> None:
        """The run begins. averaged: the model that is evaluated and saved; it changes at each step."""

    def note(self, sentence: str) -> None:
        """Report a sentence that the user should know."""

    def stepped(self, status: Status) -> None:
        """A step is done."""

    def evaluated(self, status: Status) -> None:
        """The last row of the curve is new."""


class Nobody:
    """A watcher that does nothing."""

    def begin(self, averaged: GPT, tokenizer: CharTokenizer) -> None:
        pass

    def note(self, sentence: str) -> None:
        pass

    def stepped(self, status: Status) -> None:
        pass

    def evaluated(self, status: Status) -> None:
        pass
