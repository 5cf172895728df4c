"""The trial of a backward pass: its inputs, the gradients in float64, and the usual mistakes.

csrc/attention.h has the formulas. A result is dq, dk and dv below each other, (B, H, Nq + 2 Nk, d).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shakespeare.own.trial import cases
from shakespeare.own.trial.cases import Array, Case, Expected, Floats
from shakespeare.own.trial.diagnosis import TILES, Guesses, Subject

FLOPS = 2.5  # times a forward pass's: the products are S, dP, dV, dK and dQ


@functools.cache
def inputs(case: Case) -> list[Array]:
    """q, k, v, out, lse and dout, always the same; dout is strided if q is."""
    q, k, v = cases.inputs(case)
    shape = (case.B, case.Nq, case.H, case.d) if case.fused else q.shape
    dout = np.random.default_rng((case.Nq, case.Nk, case.d)).standard_normal(shape, np.float32)
    s = np.where(case.seen(), case.applied * (q.astype(np.float64) @ turned(k)), -np.inf)
    m = s.max(-1)
    lse = m + np.log(np.exp(s - m[..., None]).sum(-1))
    out = cases.expected(case).out.astype(np.float32)
    return [q, k, v, out, lse.astype(np.float32), dout.swapaxes(1, 2) if case.fused else dout]


def turned(t: Floats) -> Floats:
    """The transpose of each matrix."""
    return t.swapaxes(-1, -2)


class Formulas:
    """The numbers of a case, in float64 or float32. scores: scaled; s: with the mask; D: (B, H, Nq, 1)."""

    def __init__(self, case: Case, kind: type[np.floating[Any]] = np.float64) -> None:
        self.q, self.k, self.v, self.out, lse, self.dout = (t.astype(kind) for t in inputs(case))
        self.scale, self.seen, self.lse = kind(case.applied), case.seen(), lse[..., None]
        self.scores = self.scale * (self.q @ turned(self.k))
        self.s = self.masked(self.seen)
        self.p, self.dp = np.exp(self.s - self.lse), self.dout @ turned(self.v)
        self.D = (self.dout * self.out).sum(-1, keepdims=True)

    def masked(self, seen: Any) -> Floats:
        """The scores with a mask."""
        return np.where(seen, self.scores, self.scores.dtype.type(-np.inf))

    def of(self, **other: Any) -> Floats:
        """The gradients; other: p, dp, D, scale or ds."""
        p, dp, D, scale = (other.get(name, getattr(self, name)) for name in ("p", "dp", "D", "scale"))
        ds = other.get("ds", scale * p * (dp - D))
        return np.concatenate([ds @ self.k, turned(ds) @ self.q, turned(p) @ self.dout], 2)


def split(case: Case, result: Floats) -> list[Floats]:
    """dq, dk and dv."""
    return np.split(result, [case.Nq, case.Nq + case.Nk], 2)


@functools.cache
def expected(case: Case) -> Expected:
    """The gradients in float64; allowed: (Nq + 2 Nk, 1), for each gradient as for an output."""
    exact, peer = Formulas(case), Formulas(case, np.float32).of()
    out, floor = exact.of(), cases.floor(np.abs(exact.scores).max())
    allowed = (
        np.full((t.shape[2], 1), cases.beside(t, other, floor).allowed)
        for t, other in zip(split(case, out), split(case, peer))
    )
    return Expected(out, np.concatenate([*allowed]))


def guesses(case: Case) -> Guesses:
    """The results of usual mistakes."""
    call = Formulas(case)
    of, p, dp, D, scale, seen = call.of, call.p, call.dp, call.D, call.scale, call.seen
    ds, products, rule = scale * p * (dp - D), call.dout * call.out, "dS = scale * P * (dP - D)"
    dq, dk, dv = split(case, of())

    def result(dq: Floats = dq, dk: Floats = dk, dv: Floats = dv) -> Floats:
        return np.concatenate([dq, dk, dv], 2)

    what = "D is the sum of dout * out over a row"
    for sentence, wrong in (
        (f"D is left out: {rule}", 0),
        (f"D is added: {rule}", -D),
        (f"the products of a row are not summed: {what}", products[..., -1:]),
        (f"out * out is summed: {what}", (call.out**2).sum(-1, keepdims=True)),
    ):
        yield "rowsum", sentence, of(D=wrong)
    for sentence, guess in (
        (f"dq and dk are not scaled: {rule}", of(scale=1)),
        (f"dq is not scaled: {rule}", result(dq=dq / scale)),
        (f"dk is not scaled: {rule}", result(dk=dk / scale)),
        (f"dq and dk are scaled twice: {rule}", of(scale=scale**2)),
        ("dk is scaled twice: is Q scaled already?", result(dk=dk * scale)),
        ("the scale is 1/sqrt(d) always: use the scale of the call", of(scale=case.d**-0.5)),
        ("the scores are not scaled: P = exp(scale * q k^T - lse)", of(p=np.exp(call.s / scale - call.lse))),
    ):
        yield "scale", sentence, guess
    yield "sum", "lse is not subtracted: P = exp(S - lse)", of(p=np.exp(call.s))
    yield "sum", "P is exp(S - m): it is exp(S - lse)", of(p=p / p.max(-1, keepdims=True))
    for name, t in (("S", np.where(seen, call.scores, 0)), ("dS", ds), ("dP", dp * seen)):
        yield "matrices", f"dv is {name}^T dout: it is P^T dout", result(dv=turned(t) @ call.dout)
    yield "matrices", f"P is left out: {rule}", of(ds=scale * seen * (dp - D))
    yield "matrices", "dP is dout K^T: it is dout V^T", of(dp=call.dout @ turned(call.k))
    yield "matrices", "dk and dv are exchanged", result(dk=dv, dv=dk)
    if case.Nq == case.Nk:
        yield "transposed", "dv is P dout: it is P^T dout", result(dv=p @ call.dout)
        yield "transposed", "dk is dS q: it is dS^T q", result(dk=ds @ call.q)
    i, j = np.indices(seen.shape)
    offset, rule = case.Nk - case.Nq, "query i sees the keys j <= i + (Nk - Nq)"
    for kind, sentence, mask in (
        ("mask", "the causal mask is not applied", True),
        ("mask", "a mask is applied in a call without one", j <= i + offset),
        ("offset", f"Nk - Nq is left out: {rule}", j <= i),
        ("mask", f"one key too few is seen: {rule}, its own too", j < i + offset),
        ("mask", f"one key too many is seen: {rule}", j <= i + offset + 1),
    ):
        yield kind, sentence, of(p=np.exp(call.masked(mask) - call.lse))
    yield "mask", "a masked score becomes 0, not -inf", of(p=np.where(seen, p, np.exp(-call.lse)))
    for n in range(case.Nk):
        fewer, what = of(p=p * (j < n)), f"the keys from {n} on are left out"
        yield "tail", f"{what}: the tail of a tile", fewer
        yield "tail", f"{what} of dq: the tail of a tile", result(dq=split(case, fewer)[0])
    for n in range(case.Nq):
        fewer, what = of(p=p * (i < n)), f"the queries from {n} on are left out"
        yield "tail", f"{what}: the tail of a tile", fewer
        yield "tail", f"{what} of dk and dv: the tail of a tile", result(dq, *split(case, fewer)[1:])
    for tile in TILES:
        of_keys, of_queries = (
            split(case, of(p=p * (at >= (n - 1) // tile * tile))) for at, n in ((j, case.Nk), (i, case.Nq))
        )
        what = f"is set for each tile (of {tile}), not added to"
        yield "added", f"dq {what}", result(dq=of_keys[0])
        yield "added", f"dk {what}", result(dk=of_queries[1])
        yield "added", f"dv {what}", result(dv=of_queries[2])


INPUTS = ("q", "k", "v", "out", "lse", "dout")
BACKWARD = Subject(INPUTS, {"dq": "q", "dk": "k", "dv": "v"}, inputs, expected, guesses)
