"""What a run tells those who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from model.gpt import GPT
from model.tokenizer import CharTokenizer


@dataclass
class Status:
    """How far a run is.

    steps: in all, as far as one can tell. progress: 0 to 1. seconds: since the start; left: until the end.
    rate: characters per second, evaluations and all else included. learning_rate: the share of the peak.
    curve: [step, training loss, validation loss] of each evaluation. best: the least validation loss.
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
    """Is called by a run, in its thread; the time it takes is the run's."""

    def begin(self, averaged: GPT, tokenizer: CharTokenizer) -> None:
        """The run begins. averaged: the model that is evaluated and saved; it changes at each step."""

    def note(self, sentence: str) -> None:
        """Something that the person who trains should know."""

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
