"""The trial of a user's change of scores, a header for attention's score_mod.

python -m shakespeare.own.trial.score_mod FILE SIZE SECONDS SEED

runs the header, which is compiled, and prints Tried as JSON.
"""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shakespeare.attention_ext import attention, processor, reference, rules
from shakespeare.lab import timing
from shakespeare.own.trial import cases
from shakespeare.own.trial.cases import Case
from shakespeare.own.trial.clock import MIN_TIME, ROUNDS
from shakespeare.own.trial.player import give_up_rights
from shakespeare.own.trial.speed import LADDER, Size

NEAR = 2.0**-12  # how far apart, as a share, two scores are whose changes tell how rounding grows
STEP = 2.0**-6  # of the differences
KINKS = 0.01  # share of the pairs that may lie at a kink of the score, where differences mean nothing
WITHOUT = "none: attention has no gradient with this header; float slope(float s, At at) gives it"


@dataclass
class Tried:
    """What is known of a header. wrong: a sentence, at: the case. cases: right ones.

    slope: what is said of it. seen: share of the pairs in the timed call. ms: of the parts with it, and of
    part4 'without' it.
    """

    wrong: str = ""
    at: str = ""
    cases: int = 0
    slope: str = WITHOUT
    seen: float = 1.0
    ms: dict[str, float] = field(default_factory=dict)
    cpu: str = ""


class Mistake(Exception):
    """What is wrong with a header."""


def tensors(case: Case) -> list[Tensor]:
    """q, k and v."""
    return [torch.from_numpy(t) for t in cases.inputs(case)]


def check_score(mod: rules.ScoreMod, case: Case) -> float:
    """The relative error of a weight that the scores' rounding causes. Raises Mistake for wrong numbers."""
    q, k, _ = tensors(case)
    s = (case.applied * q) @ k.mT
    (once, _), (again, _), (near, _) = (mod.change(t) for t in (s, s, s + NEAR * s))
    if not torch.equal(once, again) and not once.isnan().any():
        raise Mistake("score is another number at a second call: it must depend on s and at alone")
    shown = once > rules.HIDDEN
    for place in (once.isnan() | (once == math.inf)).nonzero()[:1].tolist():
        raise Mistake(f"score({s[tuple(place)]:.6g}, {at(place)}) is {once[tuple(place)]:.6g}")
    grown = (near - once).abs()[shown] / NEAR
    largest = torch.cat([grown[grown.isfinite()], once[shown].abs(), s.abs().flatten()]).max()
    return cases.floor(float(largest))


def at(place: list[int]) -> str:
    """A pair, as a header's At."""
    return "At{" + ", ".join(map(str, place)) + "}"


def check_slope(mod: rules.ScoreMod, case: Case) -> None:
    """Raise Mistake unless slope is score's derivative, by differences of two steps."""
    q, k, _ = tensors(case)
    s = (case.applied * q) @ k.mT
    score, slope = mod.change(s)
    quotients = []
    for step in (STEP, STEP / 2):
        ends = (s + step, s - step)
        above, below = (mod.change(end)[0].double() for end in ends)
        quotients.append((above - below) / (ends[0].double() - ends[1].double()))
    wide, narrow = quotients
    rounding = 2.0**-22 * (score.abs() + narrow.abs() * s.abs()) / STEP
    off = (slope - narrow).abs() > 4 * (wide - narrow).abs() + 4 * rounding + 1e-4 * narrow.abs()
    off &= (score > rules.HIDDEN) & narrow.isfinite()
    if off.double().mean() > KINKS or slope.isnan().any():
        place = tuple((off | slope.isnan()).nonzero()[0].tolist())
        call = f"({s[place]:.6g}, {at([*place])})"
        raise Mistake(f"slope{call} is {slope[place]:.6g}; score's differences there are {narrow[place]:.6g}")


def results(case: Case, header: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Part 0, and the parts that a header is tried with, as functions of q, k and v."""
    settings: dict[str, Any] = {"causal": case.causal, "scale": case.applied, "score_mod": header}
    for part in ("part0", *LADDER["cpu"]):
        yield part, partial(attention, part, **settings)


def check(mod: rules.ScoreMod, header: Path, case: Case) -> None:
    """Raise Mistake unless all parts compute what the header says, with gradients if it has a slope."""
    floor = check_score(mod, case)
    torch.set_num_threads(case.threads)
    given = tensors(case)
    wide = [t.double().requires_grad_() for t in given]
    ruled = rules.checked({"score_mod": header}, given[0], case.Nk)
    exact: Any = reference.attention(*wide, causal=case.causal, scale=case.applied, rules=ruled)
    calls = dict(results(case, header))
    peer = calls.pop("part0")(*given)
    expected = cases.beside(exact.detach().numpy(), peer.numpy(), floor)
    for part, call in calls.items():
        if not expected.allows(call(*given).double().numpy()):
            raise Mistake(f"{part} differs from the definition: does score depend on more than s and at?")
    if not mod.has_slope or case.scores == "large":
        return
    check_slope(mod, case)
    dout = torch.ones_like(peer)
    gradients = torch.autograd.grad(exact, wide, dout.double())
    found = []
    for part in ("part0", "part4"):
        leaves = [t.clone().requires_grad_() for t in given]
        found.append(torch.autograd.grad(dict(results(case, header))[part](*leaves), leaves, dout))
    for name, right, peer, got in zip("qkv", gradients, *found):
        if not cases.beside(right.numpy(), peer.numpy(), floor).allows(got.double().numpy()):
            raise Mistake(f"part4's gradient of {name} differs from the definition's")


def timed(header: Path, size: Size) -> dict[str, float]:
    """Milliseconds of the parts with the header, and of part 4 without."""
    torch.set_num_threads(size.threads)
    case = Case(1, size.heads, size.N, size.N, size.d, size.causal)
    given = tensors(case)
    calls = {part: partial(call, *given) for part, call in results(case, header)}
    del calls["part0"]
    calls["without"] = partial(attention, "part4", *given, causal=size.causal)
    samples = timing.in_turns(list(calls.values()), ROUNDS, MIN_TIME / ROUNDS)
    return {name: 1e3 * s.median for name, s in zip(calls, samples)}


def tried(header: Path, size: Size, seconds: float, seed: int) -> Tried:
    """Try a header. seconds: that a case may take before it is endless."""
    found = Tried(cpu=processor.name())
    try:
        mod = rules.ScoreMod(header)
        found.slope = (
            "score's derivative, by differences; part4's gradients are right" if mod.has_slope else WITHOUT
        )
        for case in cases.seeded(seed):
            found.at = str(case)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            check(mod, header, case)
            found.cases += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        found.seen = float((mod.change(torch.zeros(1, 1, size.N, size.N))[0] > rules.HIDDEN).float().mean())
        found.ms = timed(header, size)
    except Mistake as error:
        found.wrong = str(error)
    return found


if __name__ == "__main__":
    give_up_rights()
    file, sizes, seconds, seed = sys.argv[1:]
    np.seterr(all="ignore")
    done = tried(Path(file), Size(**json.loads(sizes)), float(seconds), int(seed))
    print(json.dumps(asdict(done)))
