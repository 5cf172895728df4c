"""What `gpt.py try` prints: the verdict, the first wrong case with a picture, the speed, and one hint."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shakespeare.attention_ext.parts import SUFFIXES
from shakespeare.lab.text import counted, size_text
from shakespeare.own.trial.checking import Verdict
from shakespeare.own.trial.speed import LADDER, PAGES, Figures, Size, hint, place

WIDTH = 100
MISTAKES = "docs/use/try.md#mistakes"


def line(title: str, text: str) -> str:
    """A titled text, wrapped."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{title:12}", subsequent_indent=" " * 12)


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as '0 to 2, 5'; long lists are cut."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    texts = [f"{a} to {b}" if b > a else f"{a}" for a, b in parts]
    return ", ".join(texts[:6]) + ", ..." * (len(texts) > 6)


def verdict(file: Path, found: Verdict) -> str:
    """Right or wrong, and what was found, in lines."""
    if found.refused:
        return f"{found.output}{file.name} does not run: {found.refused}"
    if found.right:
        lines = [f"{file.name} is right in {counted(found.tried, 'case')}"]
    else:
        lines = [f"{file.name} is wrong"]
        lines.append(line("first at" if found.shown else "at", found.at or "the start"))
        if found.shown:
            lines += _shown(found.shown)
        if found.finding:
            lines.append(line("because", found.finding.sentence))
            lines.append(line("read", MISTAKES))
        else:
            lines.append(line("because", "no usual mistake gives this result"))
    if found.skipped:
        many = counted(len(found.skipped), "case")
        lines.append(line("not tried", f"{many} that would take too long, such as {found.skipped[0]}"))
    return "\n".join(lines)


def _shown(shown: dict[str, Any]) -> list[str]:
    """The worst row of the first wrong case and the picture of its head."""
    b, h, i, _ = shown["at"]
    first, count = shown["first"], len(shown["expected"])
    heads = f"heads {spans(shown['heads'])}; in head {h} of batch {b} "
    lines = [
        line(
            "",
            f"{shown['off']} of {shown['of']} numbers are off: {heads}rows {spans(shown['rows'])}, "
            f"columns {spans(shown['columns'])}",
        )
    ]
    title = f"row {i}"
    columns = f"columns {first} to {first + count - 1}"
    for what in ("expected", "got"):
        lines.append(f"{title:12}{what:9}" + "".join(f"{x:12.5g}" for x in shown[what]) + f"  {columns}")
        title = columns = ""
    key = ". right; - + # wrong, more than 100 and 10,000 times what is allowed; ? no number"
    lines.append(f"{'error':12}{key}")
    lines += [f"{'':12}{row}" for row in shown["picture"]]
    return lines


def memory(found: Verdict) -> str:
    """What the sanitizers say."""
    return "\n".join(line("memory" if i == 0 else "", text) for i, text in enumerate(found.memory))


def speed(figures: Figures | str, size: Size, file: Path) -> str:
    """Time, ladder, scratch, traffic and the hint, in lines."""
    if isinstance(figures, str):
        return line("speed", figures)
    mine = figures.ms["own"]
    mask, threads = "causal" if size.causal else "no mask", counted(size.threads, "thread")
    case = f"{counted(size.heads, 'head')} of N = {size.N}, d = {size.d}, {mask}"
    case += f", {threads}" if figures.device == "cpu" else ""
    rate = figures.flops / (1e-3 * mine) / 1e9
    lines = [
        line("speed", f"{mine:.3g} ms: {case}; {figures.cpu}"),
        line("", f"{rate:.3g} GFLOP/s, {100 * figures.share:.2g} % of the FMA peak"),
    ]
    if sdpa := figures.ms.get("sdpa"):
        lines.append(line("", f"{sdpa / mine:.3g} times as fast as PyTorch's SDPA ({sdpa:.3g} ms)"))
    known = {name: figures.ms[name] for name in LADDER[figures.device] if name in figures.ms}
    steps = ", ".join(f"{name} {ms:.3g}" for name, ms in sorted(known.items(), key=lambda kv: -kv[1]))
    lines.append(line("ladder", f"{place(figures)} ({steps} ms)"))
    if figures.scratch is not None:
        lines.append(line("scratch", size_text(figures.scratch)))
    if figures.moved:
        each = ", ".join(f"{size_text(count)} into {cache}" for cache, count in figures.moved.items())
        lines.append(line("moved", f"for one head {each}; at least {size_text(figures.least)} (cachegrind)"))
    what, page = hint(figures, size, file.read_text(errors="replace"))
    lines += [line("what now", what), line("read", PAGES[page])]
    if figures.busy:
        lines.append(figures.busy)
    return "\n".join(lines)


def as_json(file: Path, found: Verdict, figures: Figures | str | None, size: Size) -> dict[str, Any]:
    """The whole result for --json."""
    made: dict[str, Any] = {"file": str(file), "right": found.right, "refused": found.refused or None}
    made |= {"tried": found.tried, "skipped": list(found.skipped), "at": found.at if found.wrong else None}
    made["finding"] = asdict(found.finding) if found.finding else None
    made |= {"first_wrong": found.shown, "memory": found.memory, "size": asdict(size)}
    if isinstance(figures, Figures):
        what, page = hint(figures, size, file.read_text(errors="replace"))
        made["speed"] = asdict(figures) | {"share": figures.share, "place": place(figures)}
        made["hint"] = {"text": what, "read": PAGES[page]}
    elif figures:
        made["speed"] = {"note": figures}
    return made


def checked_name(file: Path) -> str:
    """A file's name. Raises ValueError if its suffix is none of a kernel's."""
    if file.suffix not in SUFFIXES:
        raise ValueError(f"FILE is {str(file)!r}; it must end with {', '.join(SUFFIXES)}")
    return file.name
