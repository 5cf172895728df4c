"""Which usual mistake explains a wrong result: probes call the kernel again, guesses compute results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.own.trial import cases
from shakespeare.own.trial.cases import Case, Floats

LIKE = 2e-3  # the largest difference, as a share of the largest number, of a result that a guess explains
ROUNDED = 0.02  # of an imprecise one
TILES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)  # keys of a tile, for guesses
MOST_CASES = 4  # whose results are guessed
MOST_GUESSED = 2**20  # multiply-adds of a call whose results are guessed
# Whether l and the output are corrected, whether by the inverse, and what is then wrong.
UNCORRECTED = (
    (False, False, False, "neither l nor the output is rescaled when the maximum rises"),
    (True, False, False, "the output is not rescaled when the maximum rises"),
    (False, True, False, "the sum l is not rescaled when the maximum rises"),
    (True, True, True, "the correction is exp(m_new - m); it must be exp(m - m_new)"),
)

NOTHING = "nothing is written"

# Runs the kernel, as worker.Trial.run() does.
Run = Callable[..., Floats]
# The kinds of mistake, and what each is called.
KINDS = {
    "scale": "the scale",
    "mask": "the causal mask",
    "offset": "queries fewer than keys",
    "transposed": "transposed",
    "tail": "the tail of a tile",
    "maximum": "the maximum is not subtracted",
    "rescale": "sums are not rescaled",
    "leftover": "the previous result is left in out",
    "sum": "not divided by the sum",
    "strides": "the strides",
    "heads": "the heads",
    "matrices": "the wrong matrix",
    "scratch": "the scratch",
    "race": "threads race",
    "inputs": "an input is changed",
    "precision": "imprecise",
    "bounds": "out of bounds",
    "crash": "crashed",
    "endless": "endless",
    "raised": "raised an error",
}


@dataclass(frozen=True)
class Finding:
    """A mistake: one of KINDS, and a sentence."""

    kind: str
    sentence: str


def diagnose(run: Run, wrong: Mapping[Case, Floats], right: Sequence[Case]) -> Finding | None:
    """The mistake that explains the wrong results, by case; None if none fits.

    right: the cases with right results.
    """
    nothing = None
    for case in wrong:
        if found := of_memory(run, case):
            if not found.sentence.startswith(NOTHING):
                return found
            nothing = nothing or found  # a larger case may show more
    if nothing:
        return nothing
    return (
        of_precision(wrong) or of_guesses(wrong) or of_rescaling(run, wrong, right) or by_cases(wrong, right)
    )


def of_memory(run: Run, case: Case) -> Finding | None:
    """What another content of out, of the scratch, other strides or one thread changes."""
    exact = cases.expected(case)

    def correct(out: Floats) -> bool:
        return bool(np.abs(out - exact.out).max() <= exact.allowed)  # NaN is not

    first, second = run(case, fill=3.0), run(case, fill=5.0)
    left = (first == 3.0) & (second == 5.0)
    if left.any():
        return _unwritten(case, left)
    if not _same(first, second) and _same(first, run(case, fill=3.0)):
        return Finding("leftover", "out is added to, not set: what it held before is in the result")
    if case.threads > 1 and correct(run(case, threads=1)):
        return Finding("race", f"it is right with one thread and wrong with {case.threads}: they race")
    if correct(run(case, scratch_fill=0.0)) and not correct(run(case, scratch_fill=np.nan)):
        return Finding("scratch", "scratch is read before it is written; it is not zero at first")
    if not _same(first, run(case, fill=3.0)):
        return Finding("race", "the same call gives different results: threads race, or memory is not set")
    if case.fused and correct(run(case, inputs=[np.ascontiguousarray(t) for t in cases.inputs(case)])):
        return Finding(
            "strides",
            "it is right only for contiguous matrices: use row_stride, head_stride and batch_stride",
        )
    return None


def _unwritten(case: Case, left: NDArray[np.bool_]) -> Finding:
    """The mistake of a result of which a part is not written."""
    rows, columns = np.asarray(left.all((0, 1, 3))), np.asarray(left.all((0, 1, 2)))
    for what, which in (("row", rows), ("column", columns)):
        at = np.flatnonzero(which)
        if len(at) and len(at) == len(which) - at[0] and left.sum() == which.sum() * left.size // len(which):
            first = at[0]
            if first == 0:
                break
            return Finding(
                "tail", f"out's {what}s from {first} on are not written: the tail of a tile is left out"
            )
    heads = np.asarray(left.all((2, 3))).ravel()
    if heads.any() and not heads.all():
        return Finding("heads", f"out is not written for {heads.sum()} of {len(heads)} heads")
    if left.all():
        n = case.Nq if case.Nq < case.Nk else case.Nk
        return Finding("tail", f"{NOTHING} for N = {n}: are tiles larger than N left out?")
    return Finding("tail", f"{left.sum()} of {left.size} numbers of out are not written")


def of_guesses(wrong: Mapping[Case, Floats]) -> Finding | None:
    """The guess that is the result in most of the first small cases; the first one of several."""
    finite = [case for case, got in wrong.items() if case.work <= MOST_GUESSED and np.isfinite(got).any()]
    small = finite[:MOST_CASES]
    counts = Counter(finding for case in small for finding in dict.fromkeys(matching(case, wrong[case])))
    return counts.most_common(1)[0][0] if counts else None


def matching(case: Case, got: Floats) -> Iterator[Finding]:
    """The guesses that are the result, in the order of guesses()."""
    exact = cases.expected(case).out
    for finding, guess in guesses(case):
        known = np.isfinite(guess)
        if not known.any() or known.mean() < 0.5 or guess.shape != got.shape:
            continue
        largest = max(np.abs(guess[known]).max(), 1e-3)
        apart = np.abs(guess - exact)[known].max() / largest
        off = np.abs(got - guess)[known].max() / largest
        if off <= min(LIKE, apart / 8):
            yield finding


def guesses(case: Case) -> Iterator[tuple[Finding, Floats]]:
    """What the usual mistakes give, in float64: (B, H, Nq, d)."""
    q, k, v = (t.astype(np.float64) for t in cases.inputs(case))
    (B, H, Nq, d), Nk, scale = q.shape, k.shape[2], case.applied
    seen, offset = case.seen(), case.Nk - case.Nq
    s = q @ k.swapaxes(2, 3)

    def softmax(scores: Floats, axis: int = -1) -> Floats:
        with np.errstate(all="ignore"):
            e = np.exp(scores - scores.max(axis, keepdims=True))
            return e / e.sum(axis, keepdims=True)

    def masked(scores: Floats, mask: NDArray[np.bool_] = seen) -> Floats:
        return np.where(mask, scores, -np.inf)

    factors: dict[str, float] = {
        "the scores are not scaled": 1.0,
        "the scores are scaled twice": scale * scale,
        "the scores are scaled by 1/d, not by 1/sqrt(d)": 1 / d,
        "the scores are multiplied by sqrt(d), not divided": d**0.5,
        "the scale is 1/sqrt(d) always: use the scale of the call": d**-0.5,
        "the scale is 1/sqrt(N), not 1/sqrt(d)": Nk**-0.5,
        "the weights are powers of 2, not of e: multiply the scores by log2(e)": scale * np.log(2),
        "the weights are powers of e, but the scale holds log2(e): take powers of 2": scale / np.log(2),
        "the scores have the wrong sign": -scale,
    }
    for sentence, factor in factors.items():
        yield Finding("scale", sentence), softmax(masked(factor * s)) @ v

    ones = np.ones((Nq, Nk), bool)
    if case.causal:
        masks = {
            "one key too few is seen: query i sees the keys j <= i + (Nk - Nq), its own too": (
                offset - 1,
                "mask",
            ),
            "one key too many is seen: query i sees the keys j <= i + (Nk - Nq)": (offset + 1, "mask"),
            "Nk - Nq is left out: query i sees the keys j <= i + (Nk - Nq)": (0, "offset"),
            "Nk - Nq is added twice": (2 * offset, "offset"),
        }
        yield Finding("mask", "the causal mask is not applied"), softmax(scale * s) @ v
        for sentence, (first, kind) in masks.items():
            yield Finding(kind, sentence), softmax(masked(scale * s, np.tril(ones, first))) @ v
        for tile in (4, 8, 16, 32, 64, 128):
            i = np.arange(Nq)[:, None] // tile * tile
            guess = softmax(masked(scale * s, np.arange(Nk) <= i + offset)) @ v
            what = "all rows of a tile see the keys of its first row: the last one sees most"
            yield Finding("mask", what), guess
        later = np.triu(ones, offset)
        yield (
            Finding("mask", "the mask is transposed: later keys are seen"),
            softmax(masked(scale * s, later)) @ v,
        )
        zeroed = softmax(np.where(seen, scale * s, 0)) @ v
        yield Finding("mask", "a masked score becomes 0, not -inf"), zeroed
        p = softmax(scale * s) * seen
        yield Finding("mask", "masked weights are set to 0 after the sum is taken"), p @ v
    elif Nq <= Nk:
        causal = softmax(masked(scale * s, np.tril(ones, offset))) @ v
        yield Finding("mask", "a mask is applied in a call without one"), causal

    p = softmax(masked(scale * s))
    out = p @ v
    yield (
        Finding("transposed", "K is read as (d, N): it is (N, d)"),
        softmax(masked(scale * (q @ k.reshape(B, H, d, Nk)))) @ v,
    )
    yield (
        Finding("transposed", "V is read as (d, N): it is (N, d)"),
        p @ v.reshape(B, H, d, Nk).swapaxes(2, 3),
    )
    yield (
        Finding("transposed", "Q is read as (d, N): it is (N, d)"),
        softmax(masked(scale * (q.reshape(B, H, d, Nq).swapaxes(2, 3) @ k.swapaxes(2, 3)))) @ v,
    )
    written = np.ascontiguousarray(out.swapaxes(2, 3)).reshape(out.shape)
    yield Finding("transposed", "out is written as (d, N): it is (N, d)"), written
    yield (
        Finding("transposed", "out is written as (B, N, H, d): it is (B, H, N, d)"),
        np.ascontiguousarray(out.swapaxes(1, 2)).reshape(out.shape),
    )
    yield (
        Finding("transposed", "the softmax is taken over the queries: it is over the keys, the rows of S"),
        softmax(masked(scale * s), -2) @ v,
    )
    if Nq == Nk:
        transposed = softmax(masked(scale * s.swapaxes(2, 3))) @ v
        yield Finding("transposed", "S is transposed: S[i][j] is Q[i] K[j]"), transposed
        yield Finding("transposed", "P is transposed in P V"), p.swapaxes(2, 3) @ v
    yield Finding("matrices", "K and V are exchanged"), softmax(masked(scale * (q @ v.swapaxes(2, 3)))) @ k
    yield Finding("matrices", "P is multiplied by K, not by V"), p @ k
    yield (
        Finding("matrices", "there is no softmax: the scores are multiplied by V"),
        np.where(seen, scale * s, 0) @ v,
    )

    with np.errstate(all="ignore"):
        top = masked(scale * s).max(-1, keepdims=True)
        e = np.exp(masked(scale * s) - top)
        l = e.sum(-1, keepdims=True)
        yield Finding("sum", "the weights are not divided by their sum"), e @ v
        yield Finding("sum", "the weights are not divided by their sum"), np.exp(masked(scale * s)) @ v
        yield Finding("sum", "the result is divided by the sum twice"), out / l
        yield Finding("sum", "the result is multiplied by the sum, not divided"), (e @ v) * l
        yield Finding("sum", "the weights are divided by the number of keys, not by their sum"), (e @ v) / Nk
        everyone = np.exp(scale * s - (scale * s).max(-1, keepdims=True)).sum(-1, keepdims=True)
        if case.causal:
            yield Finding("sum", "the sum counts masked keys too"), (e @ v) / everyone

    if B * H > 1:
        flat = [t.reshape(1, B * H, -1, d) for t in (q, k, v)]
        for name, which in (("q", 0), ("k", 1), ("v", 2), ("k and v", 3), ("q, k and v", 4)):
            chosen = {0: (0,), 1: (1,), 2: (2,), 3: (1, 2), 4: (0, 1, 2)}[which]
            for where, index in (
                ("first head", np.zeros(B * H, int)),
                ("first batch", np.arange(B * H) % H),
                ("first head of its batch", np.arange(B * H) // H * H),
            ):
                given = [t[:, index] if i in chosen else t for i, t in enumerate(flat)]
                guess = softmax(masked(scale * (given[0] @ given[1].swapaxes(2, 3)))) @ given[2]
                yield (
                    Finding("heads", f"every head reads {name} of the {where}"),
                    guess.reshape(q.shape),
                )
    yield from of_tails(case, masked(scale * s), v)
    yield from of_tiles(case, masked(scale * s), v)


def of_tails(case: Case, s: Floats, v: Floats) -> Iterator[tuple[Finding, Floats]]:
    """Results over the first keys only, without the first ones, and over the first columns of q and k."""
    e = np.exp(s - s.max(-1, keepdims=True))
    for n in range(1, case.Nk):
        with np.errstate(all="ignore"):
            out = (e[..., :n] @ v[:, :, :n]) / e[..., :n].sum(-1, keepdims=True)
        sentence = f"the keys from {n} on are left out"
        if n == case.Nk - 1:
            sentence = "the last key is left out"
        yield Finding("tail", f"{sentence}: the tail of a tile"), out
        whole = (e[..., :n] @ v[:, :, :n]) / e.sum(-1, keepdims=True)
        yield Finding("tail", f"in P V {sentence}: the tail of a tile"), whole
    for n in (1, 2, 4, 8, 16, 32, 64):
        if n < case.Nk:
            with np.errstate(all="ignore"):
                out = (e[..., n:] @ v[:, :, n:]) / e[..., n:].sum(-1, keepdims=True)
            yield Finding("tail", f"the first {n} keys are left out" if n > 1 else "key 0 is left out"), out
    q, k, _ = (t.astype(np.float64) for t in cases.inputs(case))
    for c in range(1, case.d):
        part = cases.attention(np.ascontiguousarray(q[..., :c]), k[..., :c], v, case.seen(), case.applied)
        yield Finding("tail", f"the columns of q and k from {c} on are left out of the scores"), part


def of_tiles(case: Case, s: Floats, v: Floats) -> Iterator[tuple[Finding, Floats]]:
    """Results of an online softmax over tiles of keys that does not correct its sums, for some rows."""
    for tile in (tile for tile in TILES if tile < case.Nk):
        for of_l, of_o, inverted, what in UNCORRECTED:
            m = np.full((*s.shape[:3], 1), -np.inf)
            l, o = np.zeros_like(m), np.zeros((*s.shape[:3], v.shape[3]))
            with np.errstate(all="ignore"):
                for j in range(0, case.Nk, tile):
                    part = s[..., j : j + tile]
                    new = np.maximum(m, part.max(-1, keepdims=True))
                    safe = np.where(np.isfinite(new), new, 0)
                    p, correction = np.exp(part - safe), np.exp(m - safe)
                    if inverted:
                        correction = np.where(correction > 0, 1 / correction, 0)
                    l = (correction if of_l else 1) * l + p.sum(-1, keepdims=True)
                    o = (correction if of_o else 1) * o + p @ v[:, :, j : j + tile]
                    m = new
                yield Finding("rescale", f"{what} (tiles of {tile} keys)"), o / l


def of_rescaling(run: Run, wrong: Mapping[Case, Floats], right: Sequence[Case]) -> Finding | None:
    """Whether it is right where the maximum comes first, and wrong where it rises."""
    for case in wrong:
        if case.scores != "growing" or case.causal:
            continue
        q, k, v = cases.inputs(case)
        falling = k[:, :, ::-1].copy(), v[:, :, ::-1].copy()
        exact = cases.expected(case)  # the order of the keys changes nothing
        if np.abs(run(case, inputs=(q, *falling)) - exact.out).max() <= exact.allowed:
            return Finding(
                "rescale",
                "it is wrong only where the maximum rises: sums are not rescaled by exp(m - m_new)",
            )
    return None


def by_cases(wrong: Mapping[Case, Floats], right: Sequence[Case]) -> Finding | None:
    """A property that all wrong cases have, and no right one."""

    def only(has: Callable[[Case], Any]) -> bool:
        return all(map(has, wrong)) and not any(map(has, right)) and any(not has(case) for case in right)

    finite = all(np.isfinite(got).all() for got in wrong.values())
    properties: list[tuple[str, str, Callable[[Case], Any]]] = [
        ("strides", "it is wrong only for strided matrices: use the strides", lambda c: c.fused),
        ("offset", "it is wrong only with a mask and Nq < Nk", lambda c: c.causal and c.Nq < c.Nk),
        ("scale", "it is wrong only where the scale is not 1/sqrt(d)", lambda c: c.scale is not None),
        ("race", "it is wrong only with several threads: they race", lambda c: c.threads > 1),
        ("heads", "it is wrong only with several heads", lambda c: c.B * c.H > 1),
        ("mask", "it is wrong only with a causal mask", lambda c: c.causal),
        ("mask", "it is wrong only without a mask", lambda c: not c.causal),
    ]
    if not finite:
        large = ("large", "growing")
        if all(c.scores in large for c, got in wrong.items()):
            return Finding("maximum", "large scores give NaN or infinity: subtract the row's maximum first")
    for tile in (128, 96, 64, 48, 32, 16, 8, 4):
        properties += [
            (
                "tail",
                f"it is wrong only where {tile} does not divide N: the tail of a tile",
                partial(_cut, tile),
            ),
            (
                "tail",
                f"it is wrong only where {tile} does not divide d: the tail",
                partial(_cut_columns, tile),
            ),
            (
                "tail",
                f"it is wrong only beyond {tile} keys: the tiles after the first",
                partial(_longer, tile),
            ),
            ("tail", f"it is wrong only beyond d = {tile}", partial(_wider, tile)),
        ]
    for kind, sentence, has in properties:
        if only(has):
            return Finding(kind, sentence)
    if all(case.scores == "growing" for case in wrong):
        return Finding("rescale", "it is wrong only where the maximum rises: sums are not rescaled")
    return None


def _cut(tile: int, case: Case) -> bool:
    return bool(case.Nk % tile or case.Nq % tile)


def _cut_columns(tile: int, case: Case) -> bool:
    return case.d % tile != 0


def _longer(tile: int, case: Case) -> bool:
    return case.Nk > tile


def _wider(tile: int, case: Case) -> bool:
    return case.d > tile


def of_precision(wrong: Mapping[Case, Floats]) -> Finding | None:
    """Whether all results are near, but for large scores, whose rounding is large."""
    errors = []
    for case, got in wrong.items():
        exact = cases.expected(case)
        if case.scores == "plain":
            errors.append(np.abs(got - exact.out).max() / np.abs(exact.out).max())
    if not errors or not max(errors) < ROUNDED:
        return None
    return Finding(
        "precision",
        f"the results are near, but {max(errors):.0e} of the largest off; float32 gives 1e-6. Are numbers "
        "rounded to 16 bits, or products to TF32 (Triton: input_precision='ieee')?",
    )


def _same(a: Floats, b: Floats) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))
