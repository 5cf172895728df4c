"""The trial of a user's change of scores, a header for attention's score_mod.

python -m shakespeare.judge.score_mod FILE SIZE SECONDS SEED DEVICE

runs the header, and prints what tried() finds as JSON. The definition is PyTorch's softmax in float64 of the
header's scores of all pairs.
"""

import json
import math
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext import attention, processor, reference, rules
from shakespeare.attention_ext.parts import BuildError, Dtype
from shakespeare.judge import cases, tolerance
from shakespeare.judge.cases import Case
from shakespeare.judge.clock import MIN_TIME, ROUNDS
from shakespeare.judge.player_process import give_up_rights
from shakespeare.judge.speed import LADDER, Size
from shakespeare.lab import timing

NEAR = 2.0**-12  # how far apart, as a share, two scores are whose changes tell how rounding grows
STEP = 2.0**-6  # scores differ by it where a derivative is estimated
# On CUDA each width is compiled: heads are this wide, and a case has few queries and many keys.
WIDTH = 64
SPLIT = Case(1, 2, 4, 700, WIDTH, causal=True)
COMPILING = 120  # seconds that NVRTC may take for a case
KINKS = 0.01  # share of the pairs that may lie at a kink of the score, where differences mean nothing


def at(s: Tensor, place: list[int]) -> str:
    """A call of the header."""
    return f"({s[tuple(place)]:.6g}, At{{{', '.join(map(str, place))}}})"


def check_slope(mod: rules.ScoreMod, s: Tensor) -> None:
    """Raise ValueError unless slope is score's derivative, by differences of two steps."""
    score, slope = mod.change(s)
    wide, narrow = (
        (mod.change(s + step)[0].double() - mod.change(s - step)[0]) / ((s + step).double() - (s - step))
        for step in (STEP, STEP / 2)
    )
    rounding = 2.0**-22 * (score.abs() + narrow.abs() * s.abs()) / STEP
    off = (slope - narrow).abs() > 4 * (wide - narrow).abs() + 4 * rounding + 1e-4 * narrow.abs()
    off = off & (score > rules.HIDDEN) & narrow.isfinite() | slope.isnan()
    if off.double().mean() > KINKS:
        place = off.nonzero()[0].tolist()
        got = slope[tuple(place)]
        right = narrow[tuple(place)]
        raise ValueError(f"slope{at(s, place)} is {got:.6g}; score's differences there are {right:.6g}")


def cases_on(device: str, seed: int, dtype: Dtype) -> list[Case]:
    """The cases of a device."""
    every = cases.seeded(seed, dtype=dtype)
    if device == "cpu":
        return every
    return [*dict.fromkeys(replace(case, d=WIDTH) for case in every), replace(SPLIT, seed=seed, dtype=dtype)]


def summed(case: Case, score: Tensor, slope: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The magnitudes that the gradients of q, k and v sum if dout is 1, in float64.

    score, slope: (B, H, Nq, Nk), as the header changes them. q: (B, H, Nq, d). k, v: (B, H, Nk, d). The
    results are like q and k, and (B, H, Nk, 1) for v, whose columns sum the same weights. dS is
    P slope (dP - D), a difference whose terms are rounded: D comes from the rounded output.
    """
    shown = reference.seen(case.Nq, case.Nk, q.device) if case.causal else torch.ones_like(score).bool()
    p = torch.softmax(score.double().masked_fill(~(shown & (score > rules.HIDDEN)), -torch.inf), -1)
    p = p.nan_to_num()  # of a query without keys
    dp = v.abs().double().sum(-1)[:, :, None]
    ds = abs(case.applied) * p * slope.abs() * (dp + (p * dp).sum(-1, keepdim=True))
    return [ds @ k.abs().double(), ds.mT @ q.abs().double(), p.mT.sum(-1, keepdim=True)]


def check(mod: rules.ScoreMod, header: Path, case: Case, device: str) -> None:
    """Raise ValueError unless a device's parts compute what the header says, and gradients by its slope."""
    torch.set_num_threads(case.threads)
    q, k, v = tensors = [*map(torch.from_numpy, cases.inputs(case))]
    s = (case.applied * q) @ k.mT
    score, slope = mod.change(s)
    again, near = (mod.change(t)[0] for t in (s, s + NEAR * s))
    for place in (score.isnan() | (score == math.inf)).nonzero()[:1].tolist():
        raise ValueError(f"score{at(s, place)} is {score[tuple(place)]:.6g}")
    if not torch.equal(score, again):
        raise ValueError("score is another number at a second call: it must depend on s and at alone")
    if mod.has_slope and case.scores != "large":  # there differences are rounded too much
        check_slope(mod, s)
    shown = score > rules.HIDDEN
    grown = torch.cat([(near - score)[shown] / NEAR, score[shown], s.flatten()]).abs()
    floor = tolerance.floor(float(grown[grown.isfinite()].max()))
    call = partial(attention, causal=case.causal, scale=case.applied, score_mod=header)
    kind = case.dtype.torch_dtype
    kinds = ("cpu", torch.double), (device, kind), (device, kind)
    doubles, *leaves = ([t.to(on, dtype, copy=True).requires_grad_() for t in tensors] for on, dtype in kinds)
    ruled: Any = {"rules": rules.checked({"score_mod": header}, q, case.Nk)}
    exact: Any = reference.attention(*doubles, causal=case.causal, scale=case.applied, **ruled)
    given = [t.to(device, kind) for t in tensors]
    parts = LADDER["cpu"] if device == "cpu" else ("part4",)
    results: dict[str, list[Tensor]] = {part: [call(part, *given)] for part in ("part0", *parts)}
    definition = [exact.detach()]
    names = ["output"]
    rounded: list[Tensor | None] = [None]
    if mod.has_slope:
        rounded += summed(case, score, slope, *tensors)
        names += [f"gradient of {name}" for name in "qkv"]
        definition += torch.autograd.grad(exact.sum(), doubles)
        for part, inputs in zip(("part0", "part4"), leaves):
            results[part] += torch.autograd.grad(call(part, *inputs).sum(), inputs)
    peers = results.pop("part0")
    for part, found in results.items():
        for name, right, peer, got, sums in zip(names, definition, peers, found, rounded):
            exact_numbers, of_peer, numbers = (t.cpu().double().numpy() for t in (right, peer, got))
            terms = None if sums is None else sums.numpy()
            if not tolerance.beside(exact_numbers, of_peer, floor, case.dtype, terms).allows(numbers):
                raise ValueError(f"{part}'s {name} differs from the definition's")


def timed(header: Path, size: Size, device: str) -> tuple[dict[str, float], str]:
    """Milliseconds of the parts with the header, and of part 4 without; the processor."""
    torch.set_num_threads(size.threads)
    kind = Dtype(size.dtype).torch_dtype
    arrays = cases.inputs(Case(1, size.heads, size.N, size.N, size.d))
    q, k, v = (torch.from_numpy(array).to(device, kind) for array in arrays)
    call = partial(attention, q=q, k=k, v=v, causal=size.causal)
    calls = {part: partial(call, part, score_mod=header) for part in LADDER["cpu"]}
    clock = None
    name = processor.name()
    if device == "cuda":
        from shakespeare.lab.cuda.device import Gpu

        calls = {"part4": calls["part4"]}
        clock = Gpu()
        name = clock.describe()["name"]
    calls["without"] = partial(call, "part4")
    samples = timing.in_turns(list(calls.values()), ROUNDS, MIN_TIME / ROUNDS, clock)
    return {name: 1e3 * s.median for name, s in zip(calls, samples)}, name


def tried(header: Path, size: Size, seconds: float, seed: int, device: str = "cpu") -> dict[str, Any]:
    """wrong: a sentence, or ''; at: the case. cases: their number. slope: whether there is one.

    ms: the parts', and 'without'. cpu: the processor. seconds: that a case may take before it is endless.
    """
    where = "compiling it"
    try:
        mod = rules.ScoreMod(header)
        every = cases_on(device, seed, Dtype(size.dtype))
        for case in every:
            where = str(case)
            signal.setitimer(signal.ITIMER_REAL, seconds + COMPILING * (device == "cuda"))
            check(mod, header, case, device)
    except (ValueError, BuildError) as error:
        return {"wrong": getattr(error, "output", "") + str(error), "at": where}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    ms, name = timed(header, size, device)
    return {"wrong": "", "cases": len(every), "slope": mod.has_slope, "ms": ms, "cpu": name}


if __name__ == "__main__":
    give_up_rights()
    file, sizes, seconds, seed, device = sys.argv[1:]
    print(json.dumps(tried(Path(file), Size(**json.loads(sizes)), float(seconds), int(seed), device)))
