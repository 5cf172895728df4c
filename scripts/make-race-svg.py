"""Write docs/figures/race.svg: a race of the parts as a moving picture, in real time.

python scripts/make-race-svg.py

The picture is one SVG with CSS animations: no script and no font of its own, so it also plays inside <img>.
Without animations, or where the reader prefers reduced motion, it shows the end of the race.
"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from shakespeare.app.cli.options import set_threads  # noqa: E402
from shakespeare.attention_ext import PARTS, processor  # noqa: E402

FIGURE = ROOT / "docs" / "figures" / "race.svg"
PROMPT = "ROMEO:"
START_SECONDS, PAUSE_SECONDS = 1.0, 5.0  # before and after the race, in each loop
ROWS, CHARACTERS = 14, 24  # of a column's text
LINE, ADVANCE = 16, 7.2  # pixels, as all lengths here: from one line and one character to the next
WIDTH, GAP, MARGIN = CHARACTERS * ADVANCE, 18, 20  # of a column
TITLE_Y, HEAD_Y, TEXT_Y = 30, 62, 116  # the first two are base lines

STYLE = """\
text{font-family:SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12px;fill:#d0d7de}
.frame{fill:#0d1117;stroke:#444c56}
.big{font-size:15px;font-weight:bold;fill:#fff}
.small{font-size:10.5px;fill:#9198a1}
.place{font-weight:bold;fill:#f2cc60;text-anchor:end}
[style]{animation:%.3fs step-end infinite}
@media(prefers-reduced-motion:reduce){[style]{animation:none!important}}
"""


class Column(NamedTuple):
    """One part's race. lines: of its text, each with the seconds at which its end was there."""

    part: str
    engine: str
    result: str
    seconds: float
    lines: list[tuple[str, float]]


class Loop:
    """Places moments of the race in the loop, and collects the animations that change something there."""

    def __init__(self, slowest: float) -> None:
        self.seconds = START_SECONDS + slowest + PAUSE_SECONDS
        self.frames: dict[str, int] = {}

    def change(self, first: str, *others: tuple[float, str]) -> str:
        """The attribute that applies the first rule, and from each moment on the one beside it."""
        percents = [f"{100 * (START_SECONDS + at) / self.seconds:.3f}%{{{rule}}}" for at, rule in others]
        number = self.frames.setdefault("".join([f"0%{{{first}}}", *percents]), len(self.frames))
        return f'style="animation-name:k{number}"'

    def style(self) -> str:
        """The style sheet of all elements."""
        rules = [f"@keyframes k{number}{{{frames}}}\n" for frames, number in self.frames.items()]
        return STYLE % self.seconds + "".join(rules)


def picture(columns: Sequence[Column], title: str, foot: Sequence[str]) -> str:
    """The race as an SVG. title: what races; foot: lines of small print."""
    loop = Loop(max(column.seconds for column in columns))
    foot_y = TEXT_Y + ROWS * LINE + 32
    width = max(len(columns) * (WIDTH + GAP) - GAP, len(title) * ADVANCE) + 2 * MARGIN
    height = foot_y + (len(foot) - 1) * LINE + 16
    body = [
        f'<rect class="frame" x=".5" y=".5" width="{width - 1:g}" height="{height - 1}" rx="8"/>',
        label(title, MARGIN, TITLE_Y),
        *(drawn(loop, column, MARGIN + i * (WIDTH + GAP)) for i, column in enumerate(columns)),
        *(label(line, MARGIN, foot_y + i * LINE, 'class="small"') for i, line in enumerate(foot)),
    ]
    results = "; ".join(f"{c.part} {c.result}" for c in columns)
    first = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
        f'height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(". ".join([results, *foot]))}</desc>',
        f"<style>{loop.style()}</style>",
    ]
    return "\n".join([*first, *body, "</svg>", ""])


def label(text: str, x: float, y: float, attributes: str = "") -> str:
    """A text element; y is its base line."""
    return f'<text x="{x:.5g}" y="{y}" {attributes}>{escape(text)}</text>'


def drawn(loop: Loop, column: Column, x: float) -> str:
    """A column: its head, then the text, each line at its time; a full window scrolls."""
    hidden, shown = "opacity:0", "opacity:1"
    appears = loop.change(hidden, (column.seconds, shown))
    small = [*textwrap.wrap(PARTS[column.part].title, CHARACTERS + 3), column.engine]
    head = [
        label(column.part, 0, HEAD_Y, 'class="big"'),
        label(column.result, WIDTH, HEAD_Y, f'class="place" {appears}'),
        *(label(line, 0, HEAD_Y + 15 + 13 * i, 'class="small"') for i, line in enumerate(small)),
    ]
    lines = [
        label(text, 0, (i + 1) * LINE - 3, loop.change(hidden, (seconds, shown)) if seconds else "")
        for i, (text, seconds) in enumerate(column.lines)
    ]
    scrolls = [
        (seconds, f"transform:translateY({(ROWS - i) * LINE}px)")
        for i, (_, seconds) in enumerate(column.lines, 1)
        if i > ROWS
    ]
    last = min(0, ROWS - len(lines)) * LINE
    window = f'<svg y="{TEXT_Y}" width="{WIDTH:g}" height="{ROWS * LINE + 4}">'
    text = f'<g transform="translate(0 {last})" {loop.change("transform:translateY(0)", *scrolls)}>'
    group = f'<g id="{column.part}" transform="translate({x:g})">'
    return "\n".join([group, *head, window, text, *lines, "</g></svg></g>"])


def run(model: str, parts: Sequence[str], tokens: int) -> str:
    """Race without a KV cache on one thread; the picture. Raises ValueError if texts differ."""
    set_threads(1)
    from shakespeare.lab import race
    from shakespeare.model import load

    runners = race.line_up(load(model), parts, prompt=PROMPT, max_new_tokens=tokens, use_cache=False)
    progress: dict[str, list[tuple[float, int]]] = {part: [] for part in parts}  # seconds, characters
    for _ in race.race(runners):
        for r in runners:
            progress[r.part].append((r.seconds, len(r.text)))
    if not race.report(runners, PROMPT, print):
        raise ValueError("the texts differ, so there is no picture")
    columns = []
    for r in runners:
        lines, text, end = [], PROMPT + race.harmless(r.text), 0
        for paragraph in text.split("\n"):
            for line in textwrap.wrap(paragraph, CHARACTERS) or [""]:
                end = text.index(line, end) + len(line)
                seconds = next(at for at, count in progress[r.part] if len(PROMPT) + count >= end)
                lines.append((line, seconds * (end > len(PROMPT))))
            end += 1  # the line end
        result = f"{race.ordinal(race.places(runners)[r.part])} in {r.seconds:.2f} s"
        columns.append(Column(r.part, r.engine.name, result, r.seconds, lines))
    described, *conditions = race.describe(runners, use_cache=False).split("\n")
    names = "" if list(parts) == list(PARTS) else f"{','.join(parts)} "
    command = f"race {names}-m {model} --prompt {PROMPT} --max-new-tokens {tokens} --no-kv-cache"
    foot = [f"$ python gpt.py {command}", processor.name(), *conditions]
    return picture(columns, f"{model}: the same text, {described}, each part timed alone, in real time", foot)


if __name__ == "__main__":
    FIGURE.write_text(run("shakes1024", list(PARTS), 500))
