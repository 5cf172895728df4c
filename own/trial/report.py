"""What `gpt.py try` prints: the verdict, the first wrong case with a picture, the speed, and one hint."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.parts import SUFFIXES
from shakespeare.lab.text import counted, size_text
from shakespeare.own.kernel import BACKWARD, SIMULATORS, has_gpu, joined, read, sources
from shakespeare.own.trial.cases import CASES
from shakespeare.own.trial.diagnosis import Finding
from shakespeare.own.trial.speed import LADDER, Figures, Size, hint, place
from shakespeare.own.trial.tiles import Tiles
from shakespeare.own.trial.verdict import Verdict

WIDTH = 100
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
    return ", ".join(texts[:6]) + ", ..." * (len(texts) > 6)


def verdict(file: Path, outcome: Verdict) -> str:
    """Right or wrong, and what was found, in lines."""
    name = file.name + "'s backward pass" * outcome.backward
    if outcome.refused:
        return f"{outcome.output}{name} does not run: {outcome.refused}"
    if outcome.right:
        where = f", in {SIMULATORS[simulated][0]}" if (simulated := read(file).simulated) else ""
        lines = [f"{name} is right in {counted(outcome.tried, 'case')}{where}"]
        lines += [line("library", outcome.library)] if outcome.library else []
    else:
        at = line("first at" if outcome.shown else "at", outcome.at or "the start")
        lines = [f"{name} is wrong", at, *(_shown(outcome.shown) if outcome.shown else ())]
        lines.append(line("because", outcome.why or "no usual mistake gives this result"))
        lines += [line("read", MISTAKES)] if outcome.finding else []
    if outcome.skipped:
        many = counted(len(outcome.skipped), "case")
        lines.append(line("not tried", f"{many} that would take too long, such as {outcome.skipped[0]}"))
    return "\n".join(lines)


def _shown(shown: dict[str, Any]) -> list[str]:
    """The worst row of the first wrong case and the picture of its head."""
    b, h, i, _ = shown["at"]
    first, last = shown["first"], shown["first"] + len(shown["expected"]) - 1
    heads, rows, columns = (spans(shown[name]) for name in ("heads", "rows", "columns"))
    where = f"heads {heads}; in head {h} of batch {b} rows {rows}, columns {columns}"
    matrix = "" if shown["matrix"] == "out" else f" of {shown['matrix']}"
    expected, got = ("".join(f"{x:12.5g}" for x in shown[name]) for name in ("expected", "got"))
    return [
        line("", f"{shown['off']} of {shown['of']} numbers{matrix} are off: {where}"),
        f"{f'row {i}':12}expected {expected}  columns {first} to {last}",
        f"{'':12}got      {got}  ",
        "error       . right; - + # wrong, more than 100 and 10,000 times what is allowed; ? no number",
        *(f"{'':12}{row}" for row in shown["picture"]),
    ]


def memory(outcome: Verdict) -> str:
    """What the sanitizers say."""
    return "\n".join(line("memory" if i == 0 else "", text) for i, text in enumerate(outcome.memory))


def call(device: str, size: Size) -> str:
    """The timed call, in words."""
    mask = ("causal" if size.causal else "no mask") + ", backward" * size.backward
    case = f"{counted(size.heads, 'head')} of N = {size.N}, d = {size.d}, {mask}"
    return f"{case}, {counted(size.threads, 'thread')}" if device == "cpu" else case


def speed(figures: Figures | Finding, size: Size, file: Path) -> str:
    """Time, ladder, scratch, traffic and the hint, in lines."""
    if isinstance(figures, Finding):
        return line("speed", figures.sentence)
    mine = figures.ms["own"]
    rate = figures.flops / (1e-3 * mine) / 1e9
    lines = [line("speed", f"{mine:.3g} ms: {call(figures.device, size)}; {figures.cpu}")]
    lines.append(line("", f"{rate:.3g} GFLOP/s, {100 * figures.share:.2g} % of the FMA peak"))
    if mine < NEAR * figures.handing_ms:
        what = f"{figures.handing_ms:.2g} ms more were for handing each call over: larger calls are firmer"
        lines.append(line("", what))
    if sdpa := figures.ms.get("sdpa"):
        what = "SDPA" + "'s backward pass" * size.backward
        lines.append(line("", f"{sdpa / mine:.3g} times as fast as PyTorch's {what} ({sdpa:.3g} ms)"))
    if known := [(ms, name) for name, ms in figures.ms.items() if name in LADDER[figures.device]]:
        steps = ", ".join(f"{name} {ms:.3g}" for ms, name in sorted(known, reverse=True))
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
    return "\n".join([*lines, figures.busy] if figures.busy else lines)


def header(file: Path, said: dict[str, Any], size: Size) -> str:
    """What score_mod.tried() found, in lines."""
    if said["wrong"]:
        return f"{file.name} is wrong\n{line('at', said['at'])}\nbecause     {said['wrong']}"
    ms = dict(said["ms"])
    cost = f"part4 takes {ms['part4']:.3g} ms with it, {ms.pop('without'):.3g} without"
    none = "none, so no gradient: float slope(float s, At at) is score's derivative by s"
    lines = (
        f"{file.name} is right in {counted(len(CASES), 'case')}, in {', '.join(ms)}",
        line("slope", "as score's differences say; part4's gradients are right" if said["slope"] else none),
        line("speed", f"{cost}: {call('cpu', size)}; {said['cpu']}"),
        line("ladder", ", ".join(f"{name} {each:.3g}" for name, each in ms.items()) + " ms with it"),
    )
    return "\n".join(lines)


def tiles(rows: Tiles | Finding) -> str:
    """A row for each of Triton's tiles."""
    if isinstance(rows, Finding):
        return line("tiles", rows.sentence)
    what = f"compiled for {rows[0]['arch']}{', not timed' * (not has_gpu())}" if rows else ""
    lines = [f"tiles       registers   spilled    shared       ms  {what}"] * bool(rows)
    for row in rows:
        ms = f"{row['ms']:.3g}" if row["ms"] else "" if row["fits"] else "too big"
        sizes = "".join(f"{name} {n}, " for name, n in row["sizes"].items())
        tile = f"{row['kernel']}: {sizes}{row['warps']} warps, {row['stages']} stages"
        spilled, shared = map(size_text, (row["spilled"], row["shared"]))
        lines.append(f"{'':12}{row['registers']:>9}{spilled:>10}{shared:>10}{ms:>9}  {tile}")
    return "\n".join(lines)


def as_json(file: Path, outcome: Verdict, figures: Any, size: Size, rows: Tiles | Finding) -> dict[str, Any]:
    """The whole result for --json. figures: Figures, a Finding, or None."""
    names = ("tried", "skipped", "finding", "backward", "memory", "library")
    known: dict[str, Any] = {name: value for name, value in asdict(outcome).items() if name in names}
    known |= {"file": str(file), "right": outcome.right, "refused": outcome.refused or None}
    known |= {"at": outcome.at if outcome.wrong else None, "first_wrong": outcome.shown, "size": asdict(size)}
    known |= {"simulated": read(file).simulated or None}
    known["tiles"] = asdict(rows) if isinstance(rows, Finding) else rows
    if isinstance(figures, Figures):
        known["speed"] = asdict(figures) | {"share": figures.share}
        if not size.backward:
            what, page = hint(figures, size, joined(sources(file)))
            known["speed"]["place"], known["hint"] = place(figures), {"text": what, "read": page}
    elif figures:
        known["speed"] = {"kind": figures.kind, "note": figures.sentence}
    return known


def checked_name(file: Path, backward: bool = False) -> str:
    """A file's name. Raises ValueError if its suffix is none of a kernel's, or of a backward pass's."""
    if file.suffix not in (suffixes := [*BACKWARD] if backward else SUFFIXES):
        with_it = "with --backward " * backward
        raise ValueError(f"FILE is {str(file)!r}; {with_it}it must end with {', '.join(suffixes)}")
    return file.name
