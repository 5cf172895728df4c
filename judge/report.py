"""What `gpt.py try` prints: the verdict, the first wrong case with a picture, the speed, and one hint."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from shakespeare.attention_ext.parts import DEVICES, Dtype
from shakespeare.attention_ext.user_kernel import SIMULATORS, has_gpu, joined, read, sources
from shakespeare.judge.cases import Case
from shakespeare.judge.diagnosis import Finding, Subject, first_part
from shakespeare.judge.hints import hint
from shakespeare.judge.speed import Figures, Size, place
from shakespeare.judge.tolerance import Floats
from shakespeare.judge.verdict import Verdict
from shakespeare.lab.formats import counted, size_text

WIDTH = 100
PICTURE = 16, 64  # the most rows and columns of a picture
NEAR = 10  # a call that takes fewer times what handing it over takes is near that
MISTAKES = "docs/use/try.md#mistakes"


def line(title: str, text: str) -> str:
    """A titled text, wrapped."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{title:12}", subsequent_indent=" " * 12)


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as '0 to 2, 5'; long lists are cut."""
    known = set(numbers)
    starts, ends = ([n for n in numbers if n + step not in known] for step in (-1, 1))
    texts = [f"{a} to {b}" if b > a else f"{a}" for a, b in zip(starts, ends)]
    return ", ".join(texts if len(texts) <= 6 else [*texts[:6], "..."])


def verdict(file: Path, outcome: Verdict, size: Size) -> str:
    """Right or wrong, and what was found, in lines."""
    name = f"{file.name}'s backward pass" if outcome.backward else file.name
    if outcome.refused:
        return f"{outcome.output}{name} does not run: {outcome.refused}"
    if outcome.right:
        simulated = read(file).simulated
        where = f", in {SIMULATORS[simulated][0]}" if simulated else ""
        where += "" if size.dtype == Dtype.FP32 else f", in {size.dtype}"
        lines = [f"{name} is right in {counted(outcome.tried, 'case')}{where}"]
        if outcome.library:
            lines.append(library(file, outcome, size))
    else:
        lines = [f"{name} is wrong", line("first at" if outcome.shown else "at", outcome.at or "the start")]
        if outcome.shown:
            lines += first_wrong(shown(*outcome.shown))
        lines.append(line("because", outcome.why or "no usual mistake gives this result"))
        if outcome.finding:
            lines.append(line("read", MISTAKES))
    if outcome.skipped:
        many = counted(len(outcome.skipped), "case")
        lines.append(line("not tried", f"{many} that would take too long, such as {outcome.skipped[0]}"))
    return "\n".join(lines)


def shown(case: Case, subject: Subject, got: Floats) -> dict[str, Any]:
    """What is shown of a wrong result: the worst number, a picture, and the numbers of the worst row."""
    exact = subject.expected(case)
    ratio = exact.error(got) / exact.allowed
    matrix, part = first_part(subject.rows(case), ratio > 1)
    ratio = ratio[:, :, part]
    off = ratio > 1
    b, h, i, c = (int(n) for n in np.unravel_index(ratio.argmax(), ratio.shape))
    first = max(0, min(c - 2, case.d - 5))
    row = b, h, i, slice(first, first + 5)
    return {
        "heads": np.flatnonzero(off.any((2, 3))).tolist(),
        "rows": np.flatnonzero(off[b, h].any(1)).tolist(),
        "columns": np.flatnonzero(off[b, h].any(0)).tolist(),
        "wrong": str(case),
        "matrix": matrix,
        "at": (b, h, i, c),
        "off": int(off.sum()),
        "of": off.size,
        "first": first,
        "expected": exact.out[:, :, part][row].tolist(),
        "got": got[:, :, part][row].tolist(),
        "picture": picture(ratio[b, h]),
    }


def picture(error: Floats) -> list[str]:
    """The errors of a head (Nq, d), as multiples of the allowed one: the worst of a block is a character."""
    rows, columns = (-(-n // limit) for n, limit in zip(error.shape, PICTURE))
    lines = []
    for i in range(0, error.shape[0], rows):
        worst = [error[i : i + rows, c : c + columns].max() for c in range(0, error.shape[1], columns)]
        levels = ("?" if x == np.inf else ".-+#"[int(x > 1) + int(x > 100) + int(x > 10_000)] for x in worst)
        lines.append("".join(levels))
    return lines


def first_wrong(found: dict[str, Any]) -> list[str]:
    """The worst row of the first wrong case and the picture of its head, in lines."""
    b, h, i, _ = found["at"]
    heads, rows, columns = (spans(found[name]) for name in ("heads", "rows", "columns"))
    where = f"heads {heads}; in head {h} of batch {b} rows {rows}, columns {columns}"
    matrix = "" if found["matrix"] == "out" else f" of {found['matrix']}"
    expected, got = ("".join(f"{x:12.5g}" for x in found[name]) for name in ("expected", "got"))
    last = found["first"] + len(found["expected"]) - 1
    return [
        line("", f"{found['off']} of {found['of']} numbers{matrix} are off: {where}"),
        f"{f'row {i}':12}expected {expected}  columns {found['first']} to {last}",
        f"{'':12}got      {got}  ",
        "error       . right; - + # wrong, more than 100 and 10,000 times what is allowed; ? no number",
        *(f"{'':12}{row}" for row in found["picture"]),
    ]


def library(file: Path, outcome: Verdict, size: Size) -> str:
    """The line on the library whose attention the file calls."""
    return line("library", outcome.library)


def memory(file: Path, outcome: Verdict, size: Size) -> str:
    """What the sanitizers say."""
    return "\n".join(line("" if i else "memory", message) for i, message in enumerate(outcome.memory))


def call(device: str, size: Size) -> str:
    """The timed call, in words."""
    mask = ("causal" if size.causal else "no mask") + (", backward" if size.backward else "")
    mask += "" if size.dtype == Dtype.FP32 else f", {size.dtype}"
    case = f"{counted(size.heads, 'head')} of N = {size.N}, d = {size.d}, {mask}"
    return f"{case}, {counted(size.threads, 'thread')}" if device == "cpu" else case


def speed(file: Path, outcome: Verdict, size: Size) -> str:
    """Time, ladder, scratch, traffic and the hint, in lines."""
    figures = outcome.figures
    if not isinstance(figures, Figures):
        return line("speed", figures.sentence if figures else "")
    mine = figures.ms["own"]
    rate = figures.flops / (1e-3 * mine) / 1e9
    lines = [line("speed", f"{mine:.3g} ms: {call(figures.device, size)}; {figures.cpu}")]
    peak = "FMA peak" if size.dtype == Dtype.FP32 else "speed of a large matrix product"
    speed = f"{rate:.3g} GFLOP/s" if rate < 1e4 else f"{1e-3 * rate:.3g} TFLOP/s"
    lines.append(line("", f"{speed}, {100 * figures.share:.2g} % of the {peak}"))
    if mine < NEAR * figures.handing_ms:
        what = f"{figures.handing_ms:.2g} ms more were for handing each call over: larger calls are firmer"
        lines.append(line("", what))
    if sdpa := figures.ms.get("sdpa"):
        what = "SDPA's backward pass" if size.backward else "SDPA"
        lines.append(line("", f"{sdpa / mine:.3g} times as fast as PyTorch's {what} ({sdpa:.3g} ms)"))
    if figures.ladder:
        known = sorted(((figures.ms[name], name) for name in figures.ladder), reverse=True)
        steps = ", ".join(f"{name} {ms:.3g}" for ms, name in known)
        lines.append(line("ladder", f"{place(figures)} ({steps} ms)"))
    if figures.scratch is not None:
        lines.append(line("scratch", size_text(figures.scratch)))
    if figures.moved:
        counts = ", ".join(f"{size_text(count)} into {cache}" for cache, count in figures.moved.items())
        what = f"for one head {counts}; at least {size_text(figures.least)} (cachegrind)"
        lines.append(line("moved", what))
    if not size.backward:
        what, page = hint(figures, size, joined(sources(file)))
        lines += [line("what now", what), line("read", page)]
    if figures.busy:
        lines.append(figures.busy)
    return "\n".join(lines)


def header(file: Path, found: dict[str, Any], size: Size, device: str) -> str:
    """What score_mod.tried() found on a device, in lines."""
    if found["wrong"]:
        return f"{file.name} is wrong\n{line('at', found['at'])}\nbecause     {found['wrong']}"
    ms = dict(found["ms"])
    cost = f"part4 takes {ms['part4']:.3g} ms with it, {ms.pop('without'):.3g} without"
    none = "none, so no gradient: float slope(float s, At at) is score's derivative by s"
    lines = (
        f"{file.name} is right in {counted(found['cases'], 'case')}, in {', '.join(ms)} on {DEVICES[device]}",
        line("slope", "as score's differences say; part4's gradients are right" if found["slope"] else none),
        line("speed", f"{cost}: {call(device, size)}; {found['cpu']}"),
        line("ladder", ", ".join(f"{name} {each:.3g}" for name, each in ms.items()) + " ms with it"),
    )
    return "\n".join(lines)


def tiles(file: Path, outcome: Verdict, size: Size) -> str:
    """A row for each of Triton's tiles."""
    rows = outcome.tiles
    if isinstance(rows, Finding):
        return line("tiles", rows.sentence)
    if not rows:
        return ""
    what = f"compiled for {rows[0]['arch']}" + ("" if has_gpu() else ", not timed")
    lines = [f"tiles       registers   spilled    shared       ms  {what}"]
    for row in rows:
        ms = f"{row['ms']:.3g}" if row["ms"] else "" if row["fits"] else "too big"
        sizes = "".join(f"{name} {n}, " for name, n in row["sizes"].items())
        tile = f"{row['kernel']}: {sizes}{row['warps']} warps, {row['stages']} stages"
        spilled, shared = map(size_text, (row["spilled"], row["shared"]))
        lines.append(f"{'':12}{row['registers']:>9}{spilled:>10}{shared:>10}{ms:>9}  {tile}")
    return "\n".join(lines)


def as_json(file: Path, outcome: Verdict, size: Size) -> dict[str, Any]:
    """The whole result for --json; what is not of JSON's types has the values in its vars()."""
    names = ("tried", "skipped", "finding", "backward", "memory", "library", "tiles", "right")
    known: dict[str, Any] = {
        **{name: getattr(outcome, name) for name in names},
        "file": str(file),
        "refused": outcome.refused or None,
        "at": outcome.at if outcome.wrong else None,
        "first_wrong": shown(*outcome.shown) if outcome.shown else None,
        "size": size,
        "simulated": read(file).simulated or None,
    }
    figures = outcome.figures
    if isinstance(figures, Finding):
        known["speed"] = {"kind": figures.kind, "note": figures.sentence}
    elif figures:
        known["speed"] = vars(figures) | {"share": figures.share}
        if not size.backward:
            what, page = hint(figures, size, joined(sources(file)))
            known["speed"]["place"] = place(figures)
            known["hint"] = {"text": what, "read": page}
    return known
