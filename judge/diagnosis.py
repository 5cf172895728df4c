"""Which usual mistake explains a wrong result: probes call the kernel again, guesses compute results."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.judge import cases
from shakespeare.judge.cases import Array, Case, Numbers
from shakespeare.judge.tolerance import Expected, Floats

LIKE = 2e-3  # the largest difference, as a share of the largest number, of a result that a guess explains
ROUNDED = 0.02  # the same for an imprecise result
SUMMED = 1e-5  # the same for a result that is summed in another order, as by a GPU's atomics
TILES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)  # keys of a tile, for guesses
MAX_CASES = 4  # whose results are guessed
MAX_GUESSED = 2**20  # multiply-adds of a call whose results are guessed
# Powers of the correction exp(m - m_new) that l and the output are multiplied by, and what is then wrong.
UNCORRECTED = (
    (0, 0, "neither l nor the output is rescaled when the maximum rises"),
    (1, 0, "the output is not rescaled when the maximum rises"),
    (0, 1, "the sum l is not rescaled when the maximum rises"),
    (-1, -1, "the correction is exp(m_new - m); it must be exp(m - m_new)"),
)

Run = Callable[..., Floats]  # calls the kernel, as judge's run() does
Guesses = Iterator[tuple[str, str, Floats]]  # kind, sentence, result in float64


@dataclass(frozen=True)
class Finding:
    """A mistake: a sentence, and its kind.

    kind: scale, mask, offset, transposed, tail, maximum, rescale, leftover, sum, strides, heads, matrices,
    scratch, race, inputs, precision, bounds, crash, endless or raised; of gradients also rowsum or added.
    """

    kind: str
    sentence: str


class Subject(NamedTuple):
    """What is tried. names: the inputs'. into: a result's matrices, with the input that has their shape.

    A result of several matrices, (B, H, rows, d) each, has them below each other.
    """

    names: Sequence[str]
    into: dict[str, str]
    inputs: Callable[[Case], list[Array]]
    expected: Callable[[Case], Expected]
    guesses: Callable[[Case], Guesses]

    def rows(self, case: Case) -> dict[str, int]:
        """The rows of each matrix of a result."""
        return {name: case.Nq if like == "q" else case.Nk for name, like in self.into.items()}


def diagnose(run: Run, wrong: dict[Case, Floats], subject: Subject) -> Finding | None:
    """The mistake that explains the wrong results, by case; None if none fits."""
    if any(case.window is not None and np.isnan(got).any() for case, got in wrong.items()):
        return Finding("mask", "it gives NaN: are keys read that no query sees? They hold NaN")
    by_memory = filter(None, (memory_finding(run, case, subject) for case in reversed(wrong)))
    return (
        next(by_memory, None)
        or precision_finding(wrong, subject)
        or guessed_finding(wrong, subject)
        or maximum_finding(wrong)
    )


def memory_finding(run: Run, case: Case, subject: Subject) -> Finding | None:
    """What another content of out, of the scratch, other strides or one thread changes."""
    right = subject.expected(case).allows
    first = run(case, fill=3.0)
    second = run(case, fill=5.0)
    left = (first == 3.0) & (second == 5.0)
    if left.any():
        name, part = first_part(subject.rows(case), left)
        return _unwritten(case, name, left[:, :, part])
    again = run(case, fill=3.0)
    if not same(first, second) and same(first, again):
        name, _ = first_part(subject.rows(case), first != second)
        return Finding("leftover", f"{name} is added to, not set: what it held before is in the result")
    if case.threads > 1 and right(run(case, threads=1)):
        return Finding("race", f"it is right with one thread and wrong with {case.threads}: they race")
    if right(run(case, scratch_fill=0.0)) and not right(run(case)):
        return Finding("scratch", "scratch is read before it is written; it is not zero at first")
    if not same(first, again):
        return Finding("race", "the same call gives different results: threads race, or memory is not set")
    what = "it is right only for contiguous matrices: use row_stride, head_stride and batch_stride"
    strided = case.fused and right(run(case, inputs=[np.ascontiguousarray(t) for t in subject.inputs(case)]))
    return Finding("strides", what) if strided else None


def same(one: Floats, other: Floats) -> bool:
    """Whether two results are equal, but for the order in which they were summed."""
    largest = np.abs(other[np.isfinite(other)]).max(initial=0.0)
    return np.allclose(one, other, rtol=0, atol=SUMMED * largest, equal_nan=True)


def first_part(rows: dict[str, int], off: NDArray[np.bool_]) -> tuple[str, slice]:
    """The first matrix of a result of which a number is off: its name and rows."""
    end = 0
    for name, count in rows.items():
        part = slice(end, end + count)
        end = end + count
        if off[:, :, part].any():
            break
    return name, part


def _unwritten(case: Case, name: str, left: NDArray[np.bool_]) -> Finding:
    """The mistake of a result of which a part is not written."""
    heads = np.asarray(left.all((2, 3)))
    rows = np.asarray(left.all((0, 1, 3)))
    first = int(rows.argmax())
    if left.all():
        what = f"nothing is written for N = {min(case.Nq, case.Nk)}: are tiles larger than N left out?"
    elif first and rows[first:].all() and left.mean() == rows.mean():
        what = f"{name}'s rows from {first} on are not written: the tail of a tile is left out"
    elif heads.any():
        return Finding("heads", f"{name} is not written for {heads.sum()} of {heads.size} heads")
    else:
        what = f"{left.sum()} of {left.size} numbers of {name} are not written"
    return Finding("tail", what)


def precision_finding(wrong: Mapping[Case, Floats], subject: Subject) -> Finding | None:
    """Whether all results are near, but for large scores, whose rounding is large."""
    plain = [(got, subject.expected(case)) for case, got in wrong.items() if case.scores == "plain"]
    error = max((exact.error(got).max() / np.abs(exact.out).max() for got, exact in plain), default=np.inf)
    if not error < ROUNDED:
        return None
    dtype = next(iter(wrong)).dtype
    what = f"the results are near, but {error:.0e} of the largest off; {dtype} gives "
    if dtype.rounding:
        what += f"{dtype.rounding:.0e}. Scores, sums and the output before its end belong in float32"
    else:
        what += "1e-6. Are numbers rounded to 16 bits, or products to TF32 (Triton: input_precision='ieee')?"
    return Finding("precision", what)


def guessed_finding(wrong: Mapping[Case, Floats], subject: Subject) -> Finding | None:
    """The guess that is the result in most of the first small cases; the first one of several."""
    small = [case for case, got in wrong.items() if case.work <= MAX_GUESSED and np.isfinite(got).any()]
    counts = Counter(
        f for case in small[:MAX_CASES] for f in dict.fromkeys(matching(case, wrong[case], subject))
    )
    return counts.most_common(1)[0][0] if counts else None


def matching(case: Case, got: Floats, subject: Subject) -> Iterator[Finding]:
    """The guesses that are the result, in their order."""
    exact = subject.expected(case).out
    with np.errstate(all="ignore"):
        for kind, sentence, guess in subject.guesses(case):
            known = np.isfinite(guess)
            if known.mean() < 0.5:
                continue
            largest = max(np.abs(guess[known]).max(), 1e-3)
            apart = np.abs(guess - exact)[known].max() / largest
            if np.abs(got - guess)[known].max() / largest <= min(LIKE + 4 * case.dtype.rounding, apart / 8):
                yield Finding(kind, sentence)


def softmax(s: Floats, axis: int = -1) -> Floats:
    """Over the keys, or another axis."""
    e = np.exp(s - s.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def scale_guesses(case: Case, call: Numbers) -> Guesses:
    """Scores that are multiplied by something else."""
    scale = case.applied
    d = case.d
    for sentence, factor in (
        ("the scores are not scaled", 1.0),
        ("the scores are scaled twice", scale * scale),
        ("the scores are scaled by 1/d, not by 1/sqrt(d)", 1 / d),
        ("the scale is 1/sqrt(d) always: use the scale of the call", d**-0.5),
        ("the weights are powers of 2, not of e: multiply the scores by log2(e)", scale * np.log(2)),
        ("the weights are powers of e, but the scale holds log2(e): take powers of 2", scale / np.log(2)),
    ):
        yield "scale", sentence, softmax(factor / scale * call.s) @ call.v


def masks(case: Case) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """Other masks (Nq, Nk), with kind and sentence."""
    i, j = np.indices((case.Nq, case.Nk))
    offset = case.Nk - case.Nq
    rule = "query i sees the keys j <= i + (Nk - Nq)"
    first = "all rows of a tile see the keys of its first row: the last one sees most"
    if case.window is not None:
        what = "the window is not applied: query i sees no key before i + Nk - Nq - left"
        yield "mask", what, j <= i + offset
    if case.causal:
        yield "mask", "the causal mask is not applied", j >= 0
        yield "mask", f"one key too few is seen: {rule}, its own too", j < i + offset
        yield "mask", f"one key too many is seen: {rule}", j <= i + offset + 1
        yield "offset", f"Nk - Nq is left out: {rule}", j <= i
        for tile in (4, 8, 16, 32, 64, 128):
            yield "mask", first, j <= i // tile * tile + offset
        yield "mask", "the mask is transposed: later keys are seen", j >= i + offset
    elif case.Nq <= case.Nk:
        yield "mask", "a mask is applied in a call without one", j <= i + offset


def mask_guesses(case: Case, call: Numbers) -> Guesses:
    """Other masks."""
    scores = call.scores
    v = call.v
    seen = call.seen
    for kind, sentence, mask in masks(case):
        yield kind, sentence, softmax(np.where(mask, scores, -np.inf)) @ v
    if case.causal:
        yield "mask", "a masked score becomes 0, not -inf", softmax(np.where(seen, scores, 0)) @ v
        yield "mask", "masked weights are set to 0 after the sum is taken", (softmax(scores) * seen) @ v


def matrix_guesses(case: Case, call: Numbers) -> Guesses:
    """Matrices that are read or written in another order, or exchanged."""
    q = call.q
    k = call.k
    v = call.v
    p = softmax(call.s)

    def turned(t: Floats) -> Floats:
        return t.reshape(*t.shape[:2], case.d, -1).swapaxes(2, 3)

    out = p @ v
    yield "transposed", "K is read as (d, N): it is (N, d)", call.output(q, turned(k), v)
    yield "transposed", "V is read as (d, N): it is (N, d)", p @ turned(v)
    yield "transposed", "Q is read as (d, N): it is (N, d)", call.output(turned(q), k, v)
    by_columns, by_rows = (out.swapaxes(*axes).reshape(out.shape) for axes in ((2, 3), (1, 2)))
    yield "transposed", "out is written as (d, N): it is (N, d)", by_columns
    yield "transposed", "out is written as (B, N, H, d): it is (B, H, N, d)", by_rows
    what = "the softmax is taken over the queries: it is over the keys, the rows of S"
    yield "transposed", what, softmax(call.s, -2) @ v
    yield "matrices", "K and V are exchanged", call.output(q, v, k)
    yield "matrices", "P is multiplied by K, not by V", p @ k


def sum_guesses(case: Case, call: Numbers) -> Guesses:
    """Weights that are divided by something else."""
    e = np.exp(call.s - call.s.max(-1, keepdims=True))
    what = "the weights are not divided by their sum"
    yield "sum", what, e @ call.v
    yield "sum", what, np.exp(call.s) @ call.v
    yield "sum", "the weights are divided by the number of keys, not by their sum", e @ call.v / case.Nk


def head_guesses(case: Case, call: Numbers) -> Guesses:
    """Heads that read another head's matrices."""
    heads = np.arange(case.B * case.H)
    matrices_by_name = {"q": call.q, "k": call.k, "v": call.v}
    indices = {
        "first head": 0 * heads,
        "first batch": heads % case.H,
        "first head of its batch": heads // case.H * case.H,
    }
    for names in ("q", "k", "v", "kv", "qkv") if len(heads) > 1 else ():
        for where, index in indices.items():
            read = {
                name: matrices_by_name[name].reshape(-1, *matrices_by_name[name].shape[2:])[index]
                for name in names
            }
            matrices = (read.get(name, t).reshape(t.shape) for name, t in matrices_by_name.items())
            yield "heads", f"every head reads {' and '.join(names)} of the {where}", call.output(*matrices)


def tail_guesses(case: Case, call: Numbers) -> Guesses:
    """Results without the last keys, and without the last columns of q and k."""
    e = np.exp(call.s - call.s.max(-1, keepdims=True))
    for n in range(1, case.Nk):
        what = f"the keys from {n} on are" if n < case.Nk - 1 else "the last key is"
        product = e[..., :n] @ call.v[:, :, :n]
        yield "tail", f"{what} left out: the tail of a tile", product / e[..., :n].sum(-1, keepdims=True)
        yield "tail", f"in P V {what} left out: the tail of a tile", product / e.sum(-1, keepdims=True)
    for c in range(1, case.d):
        what = f"the columns of q and k from {c} on are left out of the scores"
        yield "tail", what, call.output(call.q[..., :c], call.k[..., :c], call.v)


def tile_guesses(case: Case, call: Numbers) -> Guesses:
    """Results of an online softmax over tiles of keys that does not correct its sums."""
    for tile in (tile for tile in TILES if tile < case.Nk):
        for power_of_l, power_of_o, what in UNCORRECTED:
            m = np.full((*call.s.shape[:3], 1), -np.inf)
            l = np.zeros_like(m)
            o = np.zeros_like(call.q)
            for j in range(0, case.Nk, tile):
                s = call.s[..., j : j + tile]
                new = np.maximum(m, s.max(-1, keepdims=True))
                p = np.exp(s - np.where(np.isfinite(new), new, 0))
                change = np.where(np.isfinite(m), m - new, 0)  # the sums are 0 before
                l = np.exp(power_of_l * change) * l + p.sum(-1, keepdims=True)
                o = np.exp(power_of_o * change) * o + p @ call.v[:, :, j : j + tile]
                m = new
            yield "rescale", f"{what} (tiles of {tile} keys)", o / l


def guesses(case: Case) -> Guesses:
    """The results of usual mistakes."""
    call = Numbers(case)
    for guess in (
        scale_guesses,
        mask_guesses,
        matrix_guesses,
        sum_guesses,
        head_guesses,
        tail_guesses,
        tile_guesses,
    ):
        yield from guess(case, call)


FORWARD = Subject("qkv", {"out": "q"}, cases.call_inputs, cases.expected, guesses)


def maximum_finding(wrong: Mapping[Case, Floats]) -> Finding | None:
    """Whether only large scores are wrong, and give NaN or infinity."""
    if any(case.scores == "plain" for case in wrong) or all(np.isfinite(got).all() for got in wrong.values()):
        return None
    return Finding("maximum", "large scores give NaN or infinity: subtract the row's maximum, or lse, first")
