"""gpt.py race: several parts write the same text side by side, each timed alone."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle, islice
from typing import TYPE_CHECKING

from shakespeare.attention_ext.parts import able, check_part
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.texts import capacity_for
from shakespeare.generation.writer import Writer
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

# Seconds of a part's turn: after a single token the caches would hold another part's data.
TURN_SECONDS = 0.01
REDRAW_SECONDS = 1 / 15  # least time between two pictures
MAX_ROWS = 20  # lines of a column's text
WIDEST_COLUMN = 60
ENDINGS = {1: "st", 2: "nd", 3: "rd"}  # endings of the places up to 20

Echo = Callable[..., None]  # click.echo's signature


class Runner:
    """One part's growing text, without the prompt, and its seconds. writer: writes it. count: tokens."""

    def __init__(self, part: str, writer: Writer, tokenizer: Tokenizer, count: int) -> None:
        self.part = part
        self.engine = writer.engine
        self.count = count
        self.tokens: list[int] = []
        self.text = ""
        self._writer = writer
        self._decoder = tokenizer.decoder()

    @property
    def seconds(self) -> float:
        """Seconds of writing, including the reading of the prompt."""
        return self._writer.seconds

    @property
    def rate(self) -> float:
        """Tokens per second, including the reading of the prompt."""
        return len(self.tokens) / max(self.seconds, 1e-9)

    @property
    def done(self) -> bool:
        return all(text.ended for text in self._writer.texts)

    def turn(self) -> None:
        """Write for TURN_SECONDS, or a step if that takes longer."""
        end = self.seconds + TURN_SECONDS
        while not self.done and self.seconds < end:
            ((_, tokens),) = self._writer.step()
            self.tokens.extend(map(int, tokens))
            self.text += self._decoder.feed_all(tokens)
        if self.done:
            self.text += self._decoder.end()


def line_up(
    checkpoint: Checkpoint, parts: Sequence[str], request: Request, options: EngineOptions
) -> list[Runner]:
    """A runner for each part with a warm engine: kernels compiled, memory touched, threads started.

    parts: at least two of PARTS, each once, or ValueError is raised. options: their part, capacity, slots and
    draft are not used; a draft's token would not be one pass. device: runs the parts that it can; 'webgpu'
    leaves others on the CPU. Raises as open_engine().
    """
    if len(parts) < 2 or len(set(parts)) < len(parts):
        raise ValueError(f"parts is {','.join(parts)!r}; it must name two or more, each once")
    options = replace(options, capacity=capacity_for(checkpoint, request), slots=1, draft="off")
    runners = []
    for part in parts:
        kernel = options.kernel if check_part(part).operator else None
        device = options.device
        if device == "webgpu" and part not in able(device):
            device = "cpu"
        chosen = replace(options, part=part, kernel=kernel, device=device)
        writer = Writer(open_engine(checkpoint, chosen))
        writer.check(request)
        _warm_up(writer.engine, request)
        writer.join(request)
        runners.append(Runner(part, writer, checkpoint.tokenizer, request.max_new_tokens or 0))
    return runners


def _warm_up(engine: Engine, request: Request) -> None:
    """Write two tokens at the end of the longest context."""
    longest = list(islice(cycle(request.ids), max(1, min(engine.capacity, engine.config.block_size) - 1)))
    writer = Writer(engine)
    writer.join(replace(request, ids=longest, seed=0, max_new_tokens=2))
    for _ in range(2):
        writer.step(1)


def describe(runners: Sequence[Runner], use_cache: bool) -> str:
    """A description of the race; different engines are named."""
    lines = [f"{runners[0].count} tokens each, {'with' if use_cache else 'without'} a KV cache"]
    ours = (r.engine for r in runners if r.engine.device != "cpu" or check_part(r.part).operator)
    lines += dict.fromkeys(engine.description for engine in ours)
    names = dict.fromkeys(r.engine.name for r in runners)
    if len(names) > 1:
        parts_by_engine = {
            name: ", ".join(r.part for r in runners if r.engine.name == name) for name in names
        }
        named = "; ".join(f"{name} for {parts}" for name, parts in parts_by_engine.items() if name != "torch")
        lines.append(f"Engines differ, not attention alone: {named}")
    return "\n".join(lines)


def run(runners: Sequence[Runner], prompt: str, echo: Echo) -> bool:
    """Race, and echo the table, the texts and whether they are the same. False if they differ.

    On a terminal, and with rich, the texts grow in columns on stderr. After Ctrl-C the results so far are
    echoed, then KeyboardInterrupt is raised again.
    """
    seen = on_terminal()
    try:
        if seen and find_spec("rich"):
            _watch(runners, prompt)
        else:
            deque(race(runners), maxlen=0)
    finally:
        same = report(runners, prompt, echo, harmless if seen else str)
    return same


def on_terminal() -> bool:
    """Whether standard output and standard error are both a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def race(runners: Sequence[Runner]) -> Iterator[None]:
    """Let all write in turns: the next is the one that has used the least time. Yields after each turn."""
    while writing := [runner for runner in runners if not runner.done]:
        min(writing, key=lambda runner: runner.seconds).turn()
        yield


def places(runners: Sequence[Runner]) -> dict[str, int]:
    """The places of the finished parts that no other part can still overtake."""
    finished = sorted((r for r in runners if r.done), key=lambda r: r.seconds)
    fewest = min((r.seconds for r in runners if not r.done), default=math.inf)
    return {r.part: place for place, r in enumerate(finished, 1) if r.seconds <= fewest}


def _watch(runners: Sequence[Runner], prompt: str) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    drawn = -math.inf
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            for _ in race(runners):
                if time.monotonic() - drawn >= REDRAW_SECONDS:
                    live.update(columns(runners, prompt, console), refresh=True)
                    drawn = time.monotonic()
        finally:
            live.update(columns(runners, prompt, console), refresh=True)


def columns(runners: Sequence[Runner], prompt: str, console: Console) -> Group:
    """The race so far, fitted to the console: a column for each runner, with the end of its text."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    between = len(runners) - 1
    width = max(1, min(WIDEST_COLUMN, (console.width - between) // len(runners)))
    height = max(1, min(MAX_ROWS, console.height - 5))  # the head has four lines, the cursor one
    place = places(runners)
    table = Table(box=box.SQUARE, show_edge=False, padding=0)
    for r in runners:
        state = f"{len(r.tokens)} of {r.count}"
        if r.part in place:
            nth = place[r.part]
            state = f"{nth}{ENDINGS.get(nth, 'th')} in {r.seconds:.2f} s"
        head = f"{r.part} {r.engine.name}\n{r.rate:,.0f} tokens/s\n{state}"
        table.add_column(Text(head, no_wrap=True, overflow="crop"), width=width)
    table.add_row(*(tail(prompt + r.text, width, height, console) for r in runners))
    # The cursor's line stays empty: a terminal echoes ^C there, which would move the picture.
    return Group(table, "")


def tail(text: str, width: int, height: int, console: Console) -> Text:
    """The last `height` lines of a text wrapped to this width. Markup is not interpreted."""
    from rich.text import Text

    lines: list[Text] = []
    for paragraph in reversed(text.split("\n")):
        lines[:0] = Text(harmless(paragraph)).wrap(console, width, overflow="fold") or [Text()]
        if len(lines) >= height:
            break
    return Text("\n").join(lines[-height:])


def harmless(text: str) -> str:
    """The text without control characters: white space becomes a space, others '?'. Line ends stay."""
    return "".join(c if c == "\n" or c.isprintable() else " " if c.isspace() else "?" for c in text)


def report(runners: Sequence[Runner], prompt: str, echo: Echo, shown: Callable[[str], str] = str) -> bool:
    """Echo the table, the text (once if all are the same) and a last line. shown: applied to each text."""
    for line in table_lines(runners):
        echo(line)
    first = next((r for r in runners if r.part == "part0"), runners[0])
    found = {r.part: parting(first.tokens, r.tokens) for r in runners}
    differing = {part: at for part, at in found.items() if at is not None}
    for r in runners if differing else [max(runners, key=lambda r: len(r.tokens))]:
        echo()
        if differing:
            at = differing.get(r.part)
            echo(f"{r.part}, another text from token {at} on:" if at else f"{r.part}:")
        echo(shown(prompt + r.text))
    echo()
    complete = all(r.done for r in runners)
    if differing:
        differences = (f"{part} differs from {first.part} at token {at}" for part, at in differing.items())
        verdict = f"not identical: {', '.join(differences)}"
    elif complete:
        verdict = f"identical: all {len(runners)} texts of {len(first.tokens)} tokens are the same"
    else:
        common = min(len(r.tokens) for r in runners)
        verdict = f"identical so far: all {len(runners)} texts begin with the same {common} tokens"
    echo(verdict if complete else f"stopped; {verdict}")
    return not differing


def table_lines(runners: Sequence[Runner]) -> list[str]:
    """The table of speeds, the winner first."""
    base = next((r for r in runners if r.part == "part0"), min(runners, key=lambda r: r.rate))
    place = places(runners)
    form = "{:<6}{:7}{:8}{:>6}{:>10}{:>10}{:>12}"
    lines = [form.format("place", "part", "engine", "tokens", "seconds", "tokens/s", f"over {base.part}")]
    for r in sorted(runners, key=lambda r: (place.get(r.part, math.inf), -r.rate)):
        figures = len(r.tokens), f"{r.seconds:.3f}", f"{r.rate:,.0f}"
        over = f"{r.rate / base.rate:.2f}" if base.rate else "-"
        lines.append(form.format(place.get(r.part, "-"), r.part, r.engine.name, *figures, over))
    return lines


def parting(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The number, from 1, of the first different token; None if one text is the beginning of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b), 1) if x != y), None)
