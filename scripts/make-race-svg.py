"""Write docs/figures/race.svg: a race of the parts as a moving picture, with the times of a real run.

python scripts/make-race-svg.py

The picture is one SVG with CSS animations: no script and no font of its own, so it also plays inside <img>.
Without animations, or where the reader prefers reduced motion, it shows the end of the race.
"""

import re
import shlex
import sys
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shakespeare.app.cli.options import file, one_thread, option, set_threads, whole  # noqa: E402
from shakespeare.attention_ext import PARTS, processor  # noqa: E402

if TYPE_CHECKING:
    from shakespeare.lab.race import Runner

FIGURE = ROOT / "docs" / "figures" / "race.svg"
# The race is played in real time if the slowest part takes this long; else it is sped up or slowed down.
SHORTEST_SECONDS, LONGEST_SECONDS = 3.0, 12.0
START_SECONDS, PAUSE_SECONDS = 1.0, 5.0  # pauses before and after the race, in each loop
TICK_SECONDS = 0.25  # between two values of a number, as played

LINES, CHARACTERS = 14, 24  # of a column's text
FONT_SIZE, LINE_HEIGHT = 12, 16  # pixels, as all lengths here
ADVANCE, SMALL_ADVANCE = 7.2, 6.4  # from one character to the next
COLUMN_WIDTH, COLUMN_GAP, MARGIN = CHARACTERS * ADVANCE, 18, 20
TITLE_Y, HEAD_Y, RATE_Y, TEXT_Y = 30, 62, 109, 128  # the first three are base lines
TEXT_HEIGHT = LINES * LINE_HEIGHT + 4

STYLE = """\
text{font-family:SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:%dpx;fill:#d0d7de}
.frame{fill:#0d1117;stroke:#444c56}
.big{font-size:15px;font-weight:bold;fill:#fff}
.small{font-size:10.5px;fill:#9198a1}
.prompt{fill:#7ee787}
.place{font-weight:bold;fill:#f2cc60}
.right{text-anchor:end}
[style]{animation:%ss step-end infinite}
.track{fill:#30363d}
.bar{fill:#58a6ff;animation-timing-function:linear}
@media(prefers-reduced-motion:reduce){[style]{animation:none!important}}
"""


class Column(NamedTuple):
    """One part's race.

    place: '1st'. text: what it wrote, without the prompt, in printable characters and line ends. seconds,
    tokens, characters: its progress after each turn, the last one at the end of the text.
    """

    part: str
    engine: str
    place: str
    text: str
    seconds: Sequence[float]
    tokens: Sequence[int]
    characters: Sequence[int]


def words_of(prompt: str, text: str) -> Iterator[tuple[int, int, str, int]]:
    """The words of prompt + text in lines of CHARACTERS, wrapped between words; none spans both.

    Gives (line, column, word or the piece of one that fits a line, characters of the text up to its end).
    """
    line = column = at = 0
    for source in (prompt, text):
        for piece in re.findall(rf"\n|[^\S\n]|\S{{1,{CHARACTERS}}}", source):
            at += len(piece)
            if piece == "\n":
                line, column = line + 1, 0
                continue
            if not piece.isspace():
                if column + len(piece) > CHARACTERS:
                    line, column = line + 1, 0
                yield line, column, piece, at
            column += len(piece)


class Clock:
    """Places moments of the race in the loop, and collects the animations that start or end there.

    slowest: seconds of the race. stretch: seconds as played for one of them.
    """

    def __init__(self, slowest: float) -> None:
        length = min(max(slowest, SHORTEST_SECONDS), LONGEST_SECONDS)
        self.stretch = 1.0 if length == slowest else float(f"{length / slowest:.2g}")
        self.loop = START_SECONDS + slowest * self.stretch + PAUSE_SECONDS
        self.keyframes: list[str] = []

    def tempo(self) -> str:
        """The speed of the animation, in words."""
        if self.stretch > 1:
            return f"slowed down {self.stretch:g} times"
        return "in real time" if self.stretch == 1 else f"at {1 / self.stretch:.3g} times the real speed"

    def percent(self, seconds: float) -> str:
        """A moment of the race, as keyframes name it."""
        return f"{100 * (START_SECONDS + seconds * self.stretch) / self.loop:.3f}%"

    def ticks(self, end: float) -> list[float]:
        """The moments at which a number changes, from 0 to the end."""
        tick = TICK_SECONDS / self.stretch
        return [i * tick for i in range(int(end / tick) + 1) if i * tick < end] + [end]

    def animation(self, frames: str) -> str:
        """The attribute that plays these frames."""
        if not self.keyframes or self.keyframes[-1] != frames:  # words of one turn share an animation
            self.keyframes.append(frames)
        return f'style="animation-name:k{len(self.keyframes) - 1}"'

    def appear(self, seconds: float) -> str:
        """The attribute that hides an element until then."""
        return self.animation(f"0%{{opacity:0}}{self.percent(seconds)}{{opacity:1}}")

    def show(self, start: float, end: float) -> str:
        """The attributes that show an element between two moments; from 0: also before the race."""
        first = "0%{opacity:1}" if start == 0 else f"0%{{opacity:0}}{self.percent(start)}{{opacity:1}}"
        return f'opacity="0" {self.animation(f"{first}{self.percent(end)}{{opacity:0}}")}'

    def style(self) -> str:
        """The style sheet of all elements."""
        rules = "".join(f"@keyframes k{i}{{{frames}}}\n" for i, frames in enumerate(self.keyframes))
        return STYLE % (FONT_SIZE, f"{self.loop:.3f}") + rules


def picture(columns: Sequence[Column], prompt: str, title: str, foot: Sequence[str]) -> str:
    """The race as an SVG. title: what races; foot: lines of small print."""
    slowest = max(column.seconds[-1] for column in columns)
    clock = Clock(slowest)
    title = f"{title}, {clock.tempo()}"
    all_columns = len(columns) * (COLUMN_WIDTH + COLUMN_GAP) - COLUMN_GAP
    inner = max(all_columns, (len(title) + 12) * ADVANCE)  # the time is beside the title
    foot = [line for text in foot for line in textwrap.wrap(text, int(inner / SMALL_ADVANCE))]
    foot_y = TEXT_Y + TEXT_HEIGHT + 28
    width, height = inner + 2 * MARGIN, foot_y + (len(foot) - 1) * LINE_HEIGHT + 16

    times = [(at, f"{at:.2f} s") for at in clock.ticks(slowest)]
    body = [
        f'<rect class="frame" x=".5" y=".5" width="{width - 1:g}" height="{height - 1}" rx="8"/>',
        label(title, MARGIN, TITLE_Y),
        *numbers(clock, width - MARGIN, TITLE_Y, times),
    ]
    for i, column in enumerate(columns):
        x = MARGIN + i * (COLUMN_WIDTH + COLUMN_GAP)
        body += [f'<g id="{column.part}" transform="translate({x:g})">', *head(clock, column)]
        body += [*written(clock, column, prompt), "</g>"]
    body += [label(line, MARGIN, foot_y + i * LINE_HEIGHT, 'class="small"') for i, line in enumerate(foot)]

    results = "; ".join(f"{c.part} {c.place} in {c.seconds[-1]:.2f} s" for c in columns)
    first = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
        f'height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(". ".join([results, *foot]))}</desc>',
        f"<style>{clock.style()}</style>",
    ]
    return "\n".join([*first, *body, "</svg>", ""])


def label(text: str, x: float, y: float, attributes: str = "") -> str:
    """A text element; y is its base line."""
    return f'<text x="{x:.5g}" y="{y}" {attributes}>{escape(text)}</text>'


def numbers(clock: Clock, x: float, y: float, values: Sequence[tuple[float, str]]) -> list[str]:
    """A number that ends at x; it changes at each of these moments, and keeps its last value."""
    moments = [at for at, _ in values]
    animations = [clock.show(*span) for span in zip(moments, moments[1:])] + [clock.appear(moments[-1])]
    return [
        label(value, x, y, f'class="right" {animation}') for animation, (_, value) in zip(animations, values)
    ]


def head(clock: Clock, column: Column) -> list[str]:
    """A column's name, place, title, engine, speed and progress."""
    end = column.seconds[-1]
    titles = textwrap.wrap(PARTS[column.part].title, int(COLUMN_WIDTH / SMALL_ADVANCE))
    ticks = clock.ticks(end)
    tokens = [(0, *column.tokens)[bisect_right(column.seconds, at)] for at in ticks]
    rates = [(at, f"{count / at if at else 0:,.0f} tokens/s") for at, count in zip(ticks, tokens)]
    frames = "0%{transform:scaleX(0)}" + "".join(
        f"{clock.percent(at)}{{transform:scaleX({count / tokens[-1]:.3f})}}"
        for at, count in zip(ticks, tokens)
    )
    bar = f'y="{RATE_Y + 6}" width="{COLUMN_WIDTH:g}" height="3"'
    return [
        label(column.part, 0, HEAD_Y, 'class="big"'),
        label(
            f"{column.place} in {end:.2f} s", COLUMN_WIDTH, HEAD_Y, f'class="place right" {clock.appear(end)}'
        ),
        *(label(line, 0, HEAD_Y + 15 + 13 * i, 'class="small"') for i, line in enumerate(titles)),
        label(column.engine, 0, RATE_Y, 'class="small"'),
        *numbers(clock, COLUMN_WIDTH, RATE_Y, rates),
        f'<rect class="track" {bar}/><rect class="bar" {bar} {clock.animation(frames)}/>',
    ]


def written(clock: Clock, column: Column, prompt: str) -> list[str]:
    """A column's text, each word at its time; it scrolls when its window is full."""
    words, scrolls, bottom, top = [], ["0%{transform:translateY(0)}"], LINES - 1, 0
    for line, place, word, end in words_of(prompt, column.text):
        by_part = end - len(prompt)  # characters that the part has written when the word is there
        attributes = 'class="prompt"'
        if by_part > 0:
            seconds = column.seconds[bisect_left(column.characters, by_part)]
            attributes = clock.appear(seconds)
            if line > bottom:
                bottom = line
                top = (LINES - 1 - bottom) * LINE_HEIGHT
                scrolls.append(f"{clock.percent(seconds)}{{transform:translateY({top}px)}}")
        attributes += f' textLength="{len(word) * ADVANCE:.4g}"'  # fonts differ in their advance
        words.append(label(word, place * ADVANCE, (line + 1) * LINE_HEIGHT - 3, attributes))
    scroll = clock.animation("".join(scrolls))
    window = f'<svg y="{TEXT_Y}" width="{COLUMN_WIDTH:g}" height="{TEXT_HEIGHT}">'
    return [window, f'<g transform="translate(0 {top})" {scroll}>', *words, "</g></svg>"]


def watch(runners: Sequence["Runner"], turns: Iterator[None]) -> dict[str, list[tuple[float, int, int]]]:
    """Each part's (seconds, tokens, characters) after each of its turns. turns: race() over the runners."""
    seen: dict[str, list[tuple[float, int, int]]] = {runner.part: [] for runner in runners}
    for _ in turns:
        for runner in runners:
            now = (runner.seconds, len(runner.tokens), len(runner.text))
            if now[1] > (seen[runner.part][-1][1] if seen[runner.part] else 0):
                seen[runner.part].append(now)
    return seen


@click.command(context_settings={"show_default": True})
@option("-m", "--model", "Model, as in gpt.py race.", default="shakes1024")
@option("--parts", "Parts that race.", default=",".join(PARTS))
@option("--prompt", "Text to continue.", default="ROMEO:")
@whole("--max-new-tokens", "Tokens that each part writes.", default=500)
@option("--no-kv-cache/--kv-cache", "As in gpt.py race.", default=True)
@one_thread
@file("--out", "The picture.", default=FIGURE, show_default="docs/figures/race.svg")
def main(
    model: str, parts: str, prompt: str, max_new_tokens: int, no_kv_cache: bool, threads: int, out: Path
) -> None:
    """Run gpt.py race and write it as a moving picture."""
    set_threads(threads)
    from shakespeare.lab import race
    from shakespeare.model import load

    try:
        names = parts.split(",")
        settings = {"prompt": prompt, "max_new_tokens": max_new_tokens, "use_cache": not no_kv_cache}
        runners = race.line_up(load(model), names, **settings)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    progress = watch(runners, race.race(runners))
    if not race.report(runners, prompt, click.echo):
        raise click.ClickException("the texts differ, so there is no picture")

    place = race.places(runners)
    columns = [
        Column(
            r.part, r.engine.name, race.ordinal(place[r.part]), race.harmless(r.text), *zip(*progress[r.part])
        )
        for r in runners
    ]
    command = ["python", "gpt.py", "race", *[parts] * (names != list(PARTS)), "-m", model, "--prompt", prompt]
    command += ["--max-new-tokens", str(max_new_tokens), *["--no-kv-cache"] * no_kv_cache]
    command += ["-t", str(threads)] * (threads != 1)
    what, *conditions = race.describe(runners, "auto", not no_kv_cache).split("\n")
    foot = [f"$ {shlex.join(command)}", processor.name(), *conditions]
    title = f"{model}: the same text, {what}, each part timed alone"
    out.write_text(picture(columns, race.harmless(prompt), title, foot))


if __name__ == "__main__":
    main()
