"""The calls that a user's kernel is tried with: inputs, and their results in float64."""

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.parts import Dtype
from shakespeare.judge.tolerance import Expected, Floats, beside, floor
from shakespeare.lab.formats import counted

Array = NDArray[np.float32]
LARGE = 300.0  # the largest score of a case with large scores: e^89 is beyond float32
STEEP = 40.0  # by how much the scores of a growing case rise from the first key to the last


@dataclass(frozen=True)
class Case:
    """A call: q is (B, H, Nq, d), k and v are (B, H, Nk, d). scale: None for 1/sqrt(d).

    scores: 'plain', 'large' (LARGE) or 'growing' (each key above those before it). fused: views of one matrix
    (B, N, 3 H d), as in the model. repeats: calls, each of which must be right. seed: decides the inputs.
    window: in a causal call, the keys before its own that a query sees; keys that no query sees hold NaN.
    dtype: to which q, k and v are rounded.
    """

    B: int
    H: int
    Nq: int
    Nk: int
    d: int
    causal: bool = False
    scale: float | None = None
    scores: str = "plain"
    fused: bool = False
    threads: int = 1
    repeats: int = 1
    seed: int = 0
    window: int | None = None
    dtype: Dtype = Dtype.FP32

    @property
    def applied(self) -> float:
        """The scale."""
        return 1 / math.sqrt(self.d) if self.scale is None else self.scale

    @property
    def work(self) -> int:
        """Multiply-adds of a call without a mask."""
        return 2 * self.B * self.H * self.Nq * self.Nk * self.d

    def seen(self) -> NDArray[np.bool_]:
        """The mask (Nq, Nk): True where a query sees a key."""
        mask = np.ones((self.Nq, self.Nk), bool)
        mask = np.tril(mask, self.Nk - self.Nq) if self.causal else mask
        return mask if self.window is None else np.triu(mask, self.Nk - self.Nq - self.window)

    def __str__(self) -> str:
        rows = f"N = {self.Nk}" if self.Nq == self.Nk else f"Nq = {self.Nq}, Nk = {self.Nk}"
        words = (
            f"{counted(self.B * self.H, 'head')} of {rows}, d = {self.d}",
            "causal" if self.causal else "no mask",
            "" if self.window is None else f"a window of {self.window}",
            "" if self.scale is None else f"scale = {self.scale}",
            "" if self.scores == "plain" else f"{self.scores} scores",
            "q, k and v strided as in the model" if self.fused else "",
            f"{self.threads} threads" if self.threads > 1 else "",
            "" if self.dtype is Dtype.FP32 else self.dtype,
        )
        return ", ".join(filter(None, words))


# Small ones first: the first wrong case is shown. Each property has a pair of cases that differ in it.
CASES = (
    Case(1, 1, 1, 1, 4),
    Case(1, 1, 4, 4, 8),
    Case(1, 1, 4, 4, 8, causal=True),
    Case(1, 1, 8, 8, 8, scale=0.5),
    Case(1, 1, 3, 7, 8),
    Case(1, 1, 3, 7, 8, causal=True),
    Case(2, 3, 8, 8, 16),
    Case(1, 1, 64, 64, 32),
    Case(1, 1, 64, 64, 32, causal=True),
    Case(1, 1, 63, 63, 32),
    Case(1, 1, 63, 63, 24, causal=True),
    Case(1, 1, 64, 64, 24),
    Case(1, 2, 33, 33, 80, causal=True),
    Case(1, 2, 8, 24, 16, scores="large"),
    Case(1, 2, 24, 24, 16, causal=True, scores="large"),
    Case(1, 1, 16, 160, 16, scores="growing"),
    Case(1, 1, 160, 160, 16, causal=True, scores="growing"),
    Case(2, 2, 20, 20, 8, causal=True, fused=True),
    Case(1, 1, 1, 5, 1),
    Case(1, 2, 1, 300, 32, causal=True),
    Case(1, 2, 123, 123, 80),
    Case(2, 1, 7, 40, 33, causal=True),
    Case(1, 1, 128, 128, 64, causal=True),
    Case(1, 1, 256, 256, 64),
    Case(1, 1, 130, 1000, 64),
    Case(1, 4, 200, 200, 16, causal=True, threads=4, repeats=8),
    Case(1, 1, 512, 512, 16, threads=3, repeats=3),
    Case(1, 1, 1025, 1025, 16),
    Case(1, 1, 1025, 1025, 16, causal=True),
)


WINDOWED = tuple(replace(case, window=case.Nq // 4) for case in CASES if case.causal)


def seeded(seed: int, windowed: bool = False, dtype: Dtype = Dtype.FP32) -> list[Case]:
    """The cases with inputs of a seed in a dtype, also those with a window."""
    return [replace(case, seed=seed, dtype=dtype) for case in CASES + (WINDOWED if windowed else ())]


def seed_of(file: Path, secret: int | None) -> int:
    """A seed that no other file has, and that does not tell the secret; 0 without one."""
    if secret is None:
        return 0
    return int(hashlib.sha256(b"%d " % secret + file.read_bytes()).hexdigest()[:15], 16)


def rounded(t: Array, dtype: Dtype) -> Array:
    """float32 numbers that a dtype has, the nearest ones."""
    if dtype is Dtype.FP32:
        return t
    import torch  # kernels in float32 need none

    return torch.from_numpy(t).to(dtype.torch_dtype).float().numpy()


def fused(matrix: Array) -> list[Array]:
    """q, k and v, each (B, H, N, d), in one matrix (B, N, 3, H, d)."""
    return [matrix[:, :, i].swapaxes(1, 2) for i in range(3)]


@functools.cache
def inputs(case: Case) -> list[Array]:
    """q, k and v, always the same for a seed."""
    random = np.random.default_rng(case.seed * 100_000_007 + case.Nq * 10_007 + case.Nk * 101 + case.d)
    B = case.B
    H = case.H
    d = case.d
    if case.fused:
        return fused(rounded(random.standard_normal((B, case.Nk, 3, H, d), np.float32), case.dtype))
    q, k, v = (random.standard_normal((B, H, n, d), np.float32) for n in (case.Nq, case.Nk, case.Nk))
    if case.scores == "large":
        q *= np.float32(LARGE / np.abs(case.applied * q @ turned(k)).max())
    if case.scores == "growing":
        q = np.abs(q) + np.float32(0.5)
        rise = np.linspace(0, 1, case.Nk, dtype=np.float32)
        k = np.ones_like(k) * rise[:, None] + np.float32(0.01) * k
        q *= np.float32(STEEP) / np.float32(np.abs(case.applied * q @ turned(k)).max())
    return [rounded(t, case.dtype) for t in (q, k, v)]


def call_inputs(case: Case) -> list[Array]:
    """What a call is given: the inputs, with NaN for keys and values that no query sees."""
    q, *kv = inputs(case)
    unseen = 0 if case.window is None else case.Nk - case.Nq - case.window
    if unseen > 0:
        kv = [np.concatenate([np.full_like(t[:, :, :unseen], np.nan), t[:, :, unseen:]], 2) for t in kv]
    return [q, *kv]


class Numbers:
    """The numbers of a case in float64 or float32. scores: scaled; s: with the mask."""

    def __init__(self, case: Case, float_type: type[np.floating[Any]] = np.float64) -> None:
        self.q, self.k, self.v = (t.astype(float_type) for t in inputs(case))
        self.case = case
        self.scale = float_type(case.applied)
        self.seen = case.seen()
        self.scores = self.scale * (self.q @ turned(self.k))
        self.s = np.where(self.seen, self.scores, float_type(-np.inf))

    def output(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """The output for other matrices."""
        return attention(q, k, v, self.seen, self.scale)


def turned(t: Floats) -> Floats:
    """The transpose of each matrix."""
    return t.swapaxes(-1, -2)


@functools.cache
def expected(case: Case) -> Expected:
    """The result (B, H, Nq, d) in float64, and the allowed error."""
    exact = Numbers(case)
    peer = Numbers(case, np.float32)
    out, other = (each.output(each.q, each.k, each.v) for each in (exact, peer))
    return beside(out, other, floor(np.abs(exact.scores).max()), case.dtype)


def attention(q: Floats, k: Floats, v: Floats, seen: NDArray[np.bool_], scale: Any) -> Floats:
    """softmax(scale q k^T) v by the definition, in the inputs' type."""
    s = np.where(seen, scale * (q @ turned(k)), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True)).astype(q.dtype)
    return (p @ v) / p.sum(-1, keepdims=True)
