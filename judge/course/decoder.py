"""The check of the decoder; a player runs the student's file."""

import contextlib
import secrets
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shakespeare.judge.course.exercises import Failed
from shakespeare.judge.player import LOAD_SECONDS, Player
from shakespeare.judge.tolerance import beside
from shakespeare.lab.timing import Cpu, Timer
from shakespeare.model import load
from shakespeare.model.gpt import GPT

MODEL = "shakes128"
SECONDS = 120  # that the check may take
FLOOR = 5e-7  # allowed error, as a share of the largest number
ROUNDS = 7
STEPS = 20  # timed ones of a round
MIN_SECONDS = 0.02  # the products of a round take at least
PROMPT = 30  # tokens before the timed steps
COMPARED = 0.1  # share of the timed steps whose logits are compared


def passed(got: Tensor, wanted: Tensor, peer: Tensor, what: str) -> None:
    """Raise Failed unless `got` errs little more than PyTorch's float32, `peer`, beside float64."""
    mine, exact, other = (t.detach().numpy() for t in (got, wanted, peer))
    expected = beside(exact, other, FLOOR)
    if not expected.allows(mine):
        raise Failed(f"{what} is off by {expected.error(mine).max():.2g}; {expected.allowed:.2g} is allowed")


class Decoder:
    """A student's GPT in a player, beside this project's in float32 and float64."""

    def __init__(self, player: Player, seconds: float) -> None:
        checkpoint = load(MODEL)
        self.config = checkpoint.config
        self.peer = GPT.from_weights(self.config, checkpoint.weights)
        self.exact = GPT.from_weights(self.config, checkpoint.weights).double()
        self._player = player
        self._seconds = seconds  # that a call may take
        self._end = time.monotonic() + SECONDS

    def logits(self, ids: Tensor, new: bool = False, cached: bool = True) -> tuple[Tensor, float]:
        """The logits of more tokens (B, T), after earlier ones unless `new`, and the seconds of the call."""
        if time.monotonic() > self._end:
            raise Failed(f"it did not end within {SECONDS} s, and was ended")
        B, T = ids.shape
        shapes = {"logits": (B, T, self.config.vocab_size)}
        arrays = {"ids": np.ascontiguousarray(ids.numpy().astype(np.float32))}
        got, seconds, _ = self._player.call(arrays, self._seconds, shapes=shapes, new=new, cached=cached)
        return torch.from_numpy(got), seconds

    @torch.inference_mode()
    def compare(self, ids: Tensor, steps: list[int], what: str) -> None:
        """Read the tokens so many at a time, with a cache; without one if there is one step."""
        parts = ids.split(steps, 1)
        cached = len(steps) > 1
        got = torch.cat([self.logits(part, i == 0, cached)[0] for i, part in enumerate(parts)], 1)
        passed(got, self.exact(ids), self.peer(ids), f"the logits of {what}")

    def tokens(self, texts: int, count: int) -> Tensor:
        """Random ones, which no file foresees."""
        generator = torch.Generator().manual_seed(secrets.randbits(62))
        return torch.randint(self.config.vocab_size, (texts, count), generator=generator)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch has one thread here in the meantime."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def stages(file: Path, share: float, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield each stage that a file passes, with a note. Raises Failed, or as Player.call(), at another one.

    seconds: that a call may take before it is endless.
    """
    with one_thread(), contextlib.closing(Player(with_torch=True, threads=1)) as player:
        player.ask({"load": str(file.resolve()), "model": MODEL}, LOAD_SECONDS)
        mine = Decoder(player, seconds)
        tokens = mine.tokens
        compare = mine.compare
        full = mine.config.block_size
        compare(tokens(1, 20), [20], "20 tokens")
        yield "plain", ""
        compare(tokens(1, 20), [1] * 20, "20 tokens, one at a time")
        yield "causal", ""
        compare(tokens(3, 17), [5, 1, 1, 10], "3 texts, 5, 1, 1 and 10 tokens at a time")
        compare(tokens(1, 1), [1], "a token")
        compare(tokens(1, full), [full - 2, 1, 1], f"{full} tokens, the last two one at a time")
        yield "awkward", ""
        again = tokens(1, 30)
        what = "30 tokens, in calls that follow others"
        for _ in range(2):  # a weight, key or value that a call has changed
            compare(again, [10, *[1] * 20], what)
        compare(again, [30], what)
        yield "memory", ""
        yield "fast", fast(mine, share)


@torch.inference_mode()
def fast(mine: Decoder, share: float) -> str:
    """The share of the speed of the products alone, in a sentence. Raises Failed if it is too small.

    A step's time is taken with what handing it over takes. No step has the context of another one.
    """
    tensors = mine.peer.state_dict().values()
    weights = [t for t in tensors if t.dim() == 2 and len(t) != mine.config.block_size]
    rows = [torch.randn(1, t.shape[1]) for t in weights]
    products = Timer(lambda: [row @ t.T for row, t in zip(rows, weights)], Cpu(), MIN_SECONDS)
    seconds = list[float]()
    for _ in range(ROUNDS):
        ids = mine.tokens(1, PROMPT + STEPS)
        mine.logits(ids[:, :PROMPT], new=True)
        taken = [mine.logits(ids[:, at : at + 1]) for at in range(PROMPT, PROMPT + STEPS)]
        seconds.append(statistics.median(second for _, second in taken))
        products.round()
        last = STEPS - 1
        exact, peer = (model(ids)[:, PROMPT:] for model in (mine.exact, mine.peer))
        for n in {*secrets.SystemRandom().sample(range(last), round(COMPARED * STEPS)), last}:
            passed(taken[n][0][:, 0], exact[:, n], peer[:, n], "the logits of a timed step")
    return judged(statistics.median(seconds), products.samples.median, share)


def judged(step: float, limit: float, share: float) -> str:
    """What is said of a step's seconds and those of its products. Raises Failed if it is too slow."""
    text = f"{1e3 * step:.3g} ms, {100 * limit / step:.3g} % of its products alone ({1e3 * limit:.3g} ms)"
    if 100 * limit < share * step:
        raise Failed(text)
    return text
