"""The trial of a backward pass: its inputs, the gradients in float64, and the usual mistakes.

csrc/attention.h has the formulas. A result is dq, dk and dv below each other, (B, H, Nq + 2 Nk, d).
"""

import functools
from typing import Any

import numpy as np

from shakespeare.judge import cases, tolerance
from shakespeare.judge.cases import Array, Case, Numbers, turned
from shakespeare.judge.diagnosis import TILES, Guesses, Subject, masks
from shakespeare.judge.tolerance import Expected, Floats


@functools.cache
def inputs(case: Case) -> list[Array]:
    """q, k, v, out, lse and dout, always the same; dout is strided if q is."""
    q, k, v = cases.inputs(case)
    shape = (case.B, case.Nq, case.H, case.d) if case.fused else q.shape
    dout = np.random.default_rng((case.Nq, case.Nk, case.d)).standard_normal(shape, np.float32)
    lse = np.logaddexp.reduce(Numbers(case).s, -1).astype(np.float32)
    out = cases.expected(case).out.astype(np.float32)
    return [q, k, v, out, lse, dout.swapaxes(1, 2) if case.fused else dout]


class Formulas(Numbers):
    """The numbers of a case and of its backward pass. D: (B, H, Nq, 1)."""

    def __init__(self, case: Case, float_type: type[np.floating[Any]] = np.float64) -> None:
        super().__init__(case, float_type)
        self.out, lse, self.dout = (t.astype(float_type) for t in inputs(case)[3:])
        self.lse = lse[..., None]
        self.p = self.weights(self.seen)
        self.dp = self.dout @ turned(self.v)
        self.D = (self.dout * self.out).sum(-1, keepdims=True)

    def weights(self, seen: Any) -> Floats:
        """P with a mask."""
        return np.exp(np.where(seen, self.scores - self.lse, self.lse.dtype.type(-np.inf)))

    def gradients(self, **other: Any) -> Floats:
        """The gradients of q, k and v; other: p, dp, D, scale or ds."""
        p, dp, D, scale = (other.get(name, getattr(self, name)) for name in ("p", "dp", "D", "scale"))
        ds = other.get("ds", scale * p * (dp - D))
        return np.concatenate([ds @ self.k, turned(ds) @ self.q, turned(p) @ self.dout], 2)


def split(case: Case, result: Floats) -> list[Floats]:
    """dq, dk and dv."""
    return np.split(result, [case.Nq, case.Nq + case.Nk], 2)


@functools.cache
def expected(case: Case) -> Expected:
    """The gradients in float64; allowed: (Nq + 2 Nk, 1), for each gradient as for an output."""
    exact = Formulas(case)
    peer = Formulas(case, np.float32).gradients()
    out = exact.gradients()
    floor = tolerance.floor(np.abs(exact.scores).max())
    pairs = zip(split(case, out), split(case, peer))
    allowed = [np.full((len(t[0, 0]), 1), tolerance.beside(t, other, floor).allowed) for t, other in pairs]
    return Expected(out, np.concatenate(allowed))


def guesses(case: Case) -> Guesses:
    """The results of usual mistakes."""
    call = Formulas(case)
    gradients = call.gradients
    p = call.p
    dp = call.dp
    D = call.D
    scale = call.scale
    seen = call.seen
    rule = "dS = scale * P * (dP - D)"
    dq, dk, dv = split(case, gradients())

    def result(dq: Floats = dq, dk: Floats = dk, dv: Floats = dv) -> Floats:
        return np.concatenate([dq, dk, dv], 2)

    yield "rowsum", f"D is left out: {rule}", gradients(D=0)
    yield "rowsum", f"D is added: {rule}", gradients(D=-D)
    what = "the products of a row are not summed: D is the sum of dout * out over a row"
    yield "rowsum", what, gradients(D=(call.dout * call.out)[..., -1:])
    yield "scale", f"dq and dk are not scaled: {rule}", gradients(scale=1)
    yield "scale", f"dq is not scaled: {rule}", result(dq=dq / scale)
    yield "scale", "dk is scaled twice: is Q scaled already?", result(dk=dk * scale)
    yield "scale", "the scale is 1/sqrt(d) always: use the scale of the call", gradients(scale=case.d**-0.5)
    yield "sum", "lse is not subtracted: P = exp(S - lse)", gradients(p=p * np.exp(call.lse))
    scores = turned(np.where(seen, call.scores, 0))
    yield "matrices", "dv is S^T dout: it is P^T dout", result(dv=scores @ call.dout)
    yield "matrices", f"P is left out: {rule}", gradients(ds=scale * seen * (dp - D))
    yield "matrices", "dP is dout K^T: it is dout V^T", gradients(dp=call.dout @ turned(call.k))
    yield "matrices", "dk and dv are exchanged", result(dk=dv, dv=dk)
    if case.Nq == case.Nk:
        yield "transposed", "dv is P dout: it is P^T dout", result(dv=p @ call.dout)
    for kind, sentence, mask in masks(case):
        yield kind, sentence, gradients(p=call.weights(mask))
    i, j = np.indices(seen.shape)
    for name, at, count, sums in (("keys", j, case.Nk, "dq"), ("queries", i, case.Nq, "dk and dv")):
        for n in range(count):
            new = split(case, gradients(p=p * (at < n)))
            what = f"the {name} from {n} on are left out"
            yield "tail", f"{what}: the tail of a tile", result(*new)
            part = result(new[0]) if sums == "dq" else result(dq, *new[1:])
            yield "tail", f"{what} of {sums}: the tail of a tile", part
        for tile in TILES:
            last = split(case, gradients(p=p * (at >= (count - 1) // tile * tile)))
            for matrix, t in zip(("dq", "dk", "dv"), last):
                if matrix in sums:
                    yield "added", f"{matrix} is set for each tile, not added to", result(**{matrix: t})


INPUTS = ("q", "k", "v", "out", "lse", "dout")
BACKWARD = Subject(INPUTS, {"dq": "q", "dk": "k", "dv": "v"}, inputs, expected, guesses)
