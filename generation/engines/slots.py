"""What an engine in Python knows of its slots: settings, log-probabilities, checked arguments."""

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shakespeare.generation import logprobs
from shakespeare.generation.engines.engine import Floats, Tokens, rows_of
from shakespeare.generation.logprobs import TokenLogprob
from shakespeare.generation.sampling import SETTINGS, Sampling
from shakespeare.model.config import GPTConfig

# The places of a text's settings and of what follows from them: whether logits are changed before the choice.
PLACES = {name.upper(): place for place, name in enumerate((*SETTINGS, "adjusted", "inverse_temperature"))}
ROW = len(PLACES)
CONSTANTS = {**PLACES, "SETTINGS": ROW}  # of kernels


class Prompt(NamedTuple):
    """Tokens of a begin(), of which `done` are read."""

    ids: list[int]
    continues: bool
    top: int | None = None
    done: int = 0


class Slots:
    """The part of an Engine that needs no device. Its calls take turns."""

    fast_in_step = False
    tokens_at_once = 256

    def __init__(self, config: GPTConfig, slots: int, capacity: int) -> None:
        self.config = config
        self.slots = slots
        self.capacity = capacity
        self.free = list(range(slots))
        V = config.vocab_size
        self._lock: contextlib.AbstractContextManager[object] = threading.Lock()
        # tokens in the cache; an endless text's own number
        self._lengths: NDArray[Any] = np.zeros(slots, np.int64 if config.endless else np.int32)
        self._pending = np.full(slots, -1, np.int32)  # the chosen token that is not yet read; -1 for none
        self._kept: list[Any] = [self._lengths, self._pending]  # what a copy of a slot has too
        self._samplings = [Sampling() for _ in range(slots)]
        self._settings = {"sampling": np.tile(settings(Sampling()), (slots, 1)), "bias": np.zeros((slots, V))}
        self._stale = set(self._settings)  # those that the GPU has not got
        self._tops: dict[int, int] = {}  # of the slots that want logprobs
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(slots)]  # not taken yet
        self._begun: dict[int, Prompt] = {}  # to be read
        self._prompts: dict[int, Prompt] = {}  # that wait to be read together
        self._at_once = 0  # tokens of a prompt that waits, at most

    def set_sampling(self, slot: int, sampling: Sampling, logprobs: int | None = None) -> None:
        self._check_slot(slot)
        V = self.config.vocab_size
        for token, _ in sampling.logit_bias:
            if token >= V:
                raise ValueError(f"a token of logit_bias is {token}; it must be from 0 to {V - 1}")
        with self._lock:
            self._logprobs[slot] = []
            self._tops.pop(slot, None)
            if logprobs is not None:
                self._tops[slot] = logprobs
            before = self._samplings[slot]
            self._samplings[slot] = sampling
            if sampling is before or sampling == before:
                return
            self._settings["sampling"][slot] = settings(sampling)
            self._stale.add("sampling")
            if sampling.logit_bias != before.logit_bias:
                self._settings["bias"][slot] = 0
                for token, number in sampling.logit_bias:
                    self._settings["bias"][slot, token] = number
                self._stale.add("bias")

    def take_logprobs(self, slot: int) -> list[TokenLogprob]:
        with self._lock:
            taken = self._logprobs[slot]
            self._logprobs[slot] = []
        return taken

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        self._check_slot(slot)
        if not 1 <= len(ids) <= self.capacity:
            raise ValueError(f"the number of tokens is {len(ids)}; it must be from 1 to {self.capacity}")
        if not (0 <= min(ids) and max(ids) < self.config.vocab_size):
            raise ValueError(f"ids has a token outside 0 .. {self.config.vocab_size - 1}")
        with self._lock:
            if continues and slot in self._prompts:
                self._read_prompts()
            self._prompts.pop(slot, None)
            self._lengths[slot] = 0
            self._pending[slot] = -1
            self._begun[slot] = Prompt(list(ids), continues, top)

    def drop(self, slot: int) -> None:
        with self._lock:
            self._begun.pop(slot, None)

    def read(self, slot: int, seconds: float = math.inf) -> bool:
        end = time.monotonic() + seconds
        with self._lock:
            if slot not in self._begun:
                raise ValueError(f"slot is {slot}; it must be one that was begun")
            ids, continues, top, done = prompt = self._begun[slot]
            if done == 0 and not continues:  # a new text
                self._logprobs[slot] = []
            if top is None and len(ids) <= self._at_once:
                self._prompts[slot] = prompt
                done = len(ids)
            while done < len(ids):
                first = done + 1
                done, every = self._read_piece(slot, prompt)
                prompt = prompt._replace(done=done)
                if top is not None and every is not None:
                    following = ids[first : done + 1]
                    self._logprobs[slot] += logprobs.of_logits(every[: len(following)], following, top)
                if done < len(ids) and time.monotonic() >= end:
                    self._begun[slot] = prompt
                    return False
            del self._begun[slot]
            self._lengths[slot] = len(ids)
        return True

    def write(self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None) -> Tokens:
        at = np.array(slots, np.int64)
        numbers = rows_of(uniforms, len(at))
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < 1):
            raise ValueError("a uniform is outside [0, 1)")
        if seconds is not None and not seconds >= 0:
            raise ValueError("seconds must be at least 0")
        for slot in at[(at < 0) | (at >= self.slots)]:
            self._check_slot(slot)
        if len(set(slots)) < len(at):
            raise ValueError(f"slots is {list(slots)}; each must be named once")
        with self._lock:
            self._read_prompts()
            lengths = self._lengths[at] + (self._pending[at] >= 0)
            for wrong, state in ((lengths == 0, "first"), (lengths > self.capacity, "again: it is full")):
                if wrong.any():
                    raise ValueError(f"slot is {at[wrong][0]}; it must be read {state}")
            rows = numbers[: self.capacity + 1 - int(lengths.max(initial=1))]
            if not rows.size:
                return np.empty(rows.shape, np.int64)
            scored = bool(self._tops) and not self._tops.keys().isdisjoint(slots)
            chosen, every = self._write(at, rows, seconds, scored)
            if (chosen < 0).any():
                raise ValueError("logits hold NaN, or the largest is infinite; they must be numbers")
            self._lengths[at] = lengths + len(chosen) - 1
            self._pending[at] = chosen[-1]
            for i, slot in enumerate(slots if scored else ()):
                if slot in self._tops:
                    top = self._tops[slot]
                    self._logprobs[slot] += logprobs.of_logits(every[:, i], chosen[:, i].tolist(), top)
        return chosen

    def copy(self, source: int, *targets: int) -> None:
        for slot in (source, *targets):
            self._check_slot(slot)
        at = np.setdiff1d(np.array(targets, np.int64), [source])
        with self._lock:
            self._copy(source, at)
            for of_slots in self._kept:
                of_slots[at] = of_slots[[source]]
            for slot in self._begun.keys() & set(at.tolist()):
                del self._begun[slot]

    def logits(self, slot: int) -> list[float]:
        self._check_slot(slot)
        with self._lock:
            return self._logits_of(slot).tolist()

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot is {slot}; it must be from 0 to {self.slots - 1}")

    def _read_prompts(self) -> None:
        """Read the prompts that wait; an engine whose `_at_once` is 0 has none."""

    def _read_piece(self, slot: int, prompt: Prompt) -> tuple[int, Floats | None]:
        """Read more of a prompt; how much is read, with a `top` also the logits after each (tokens, V)."""
        raise NotImplementedError

    def _write(
        self, at: NDArray[np.int64], numbers: NDArray[np.float64], seconds: float | None, scored: bool
    ) -> tuple[NDArray[Any], Floats]:
        """write() for checked arguments: the tokens (rows, slots), -1 for one that cannot be chosen.

        With `scored` also the logits that they were chosen from, (rows, slots, V).
        """
        raise NotImplementedError

    def _copy(self, source: int, at: NDArray[np.int64]) -> None:
        """Copy what the GPU has of a slot, and the prompt that waits there, to these other slots."""
        raise NotImplementedError

    def _logits_of(self, slot: int) -> Floats:
        """A slot's latest logits, (V,)."""
        raise NotImplementedError


def settings(sampling: Sampling) -> NDArray[np.float64]:
    """What a kernel takes for the choice of a text's tokens, (ROW,)."""
    return np.array([*sampling.numbers, sampling.adjusts, 1 / max(sampling.temperature, 1e-300)], float)
