"""The cases of a sweep, as bench's options give them. torch is not imported here."""

from collections.abc import Sequence
from dataclasses import dataclass

L2 = ("warm", "cold")  # what the L2 cache holds before a call: what the last call left, or other data

ROUNDS = 10  # times that each contender is timed, also by `gpt.py explain`
MIN_TIME_SECONDS = 0.2  # of timing per contender, at least


@dataclass(frozen=True)
class Sweep:
    """The cases of a sweep: every length with every width, mask and number of threads.

    tokens, columns: for a batch of tokens / N and columns / d heads. queries: by default as many as keys. br,
    bc: None for the tuned tile. simds: names from SIMD. A GPU has no choice of tiles, threads and simds; on
    CUDA every contender is timed with each of l2s, from L2. rules: as rule_options.parse() takes them, on the
    CPU in fp32 and on CUDA, for as many queries as keys. backward: time gradients, for as many queries as
    keys.
    """

    lengths: Sequence[int] = (1024,)
    widths: Sequence[int] = (32,)
    queries: int | None = None
    batch: int = 1
    heads: int = 4
    tokens: int | None = None
    columns: int | None = None
    masks: Sequence[bool] = (False,)
    br: Sequence[int | None] = (None,)
    bc: Sequence[int | None] = (None,)
    threads: Sequence[int] = (1,)
    simds: Sequence[str] = ("auto",)
    dtype: str = "fp32"
    device: str = "cpu"
    l2s: Sequence[str] = L2
    rules: Sequence[str] = ("none",)
    backward: bool = False
