"""docs/figures/race.svg: scripts/make-race-svg.py shows the texts and the times of a race."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner
from support import ROOT

from attention_ext import PARTS

LARGEST_BYTES = 150_000
SVG = "{http://www.w3.org/2000/svg}"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-race-svg.py"))
Column, Mark, START = SCRIPT["Column"], SCRIPT["Mark"], SCRIPT["START_SECONDS"]
TEXT = "First words,\nthen a line that is longer than a column is wide & <more>,\n\n" + "x\n" * 20 + "end"


class Picture:
    """A parsed picture: the elements of a part, and the times at which they appear."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.style = self.root.findtext(f"{SVG}style") or ""
        self.loop = float(re.search(r"animation:([\d.]+)s", self.style)[1])
        self.texts = [element.text for element in self.root.iter(f"{SVG}text")]

    def column(self, part: str) -> ElementTree.Element:
        return next(group for group in self.root.iter(f"{SVG}g") if group.get("id") == part)

    def appears(self, element: ElementTree.Element) -> float:
        """Seconds from the start of the race, as played; negative for an element that is always there."""
        name = re.search(r"animation-name:(\w+)", element.get("style", ""))
        if not name:
            return -START
        frames = re.search(rf"@keyframes {name[1]}\{{0%\{{opacity:0\}}([\d.]+)%\{{opacity:1\}}", self.style)
        return float(frames[1]) / 100 * self.loop - START

    def words(self, part: str) -> list[tuple[str, float]]:
        return [
            (word.text, self.appears(word)) for word in self.column(part).find(f"{SVG}svg").iter(f"{SVG}text")
        ]

    def finish(self, part: str) -> tuple[str, float]:
        """The text of place and seconds, and the time at which it appears."""
        texts = self.column(part).findall(f"{SVG}text")
        place = next(text for text in texts if "place" in text.get("class", "").split())
        return place.text, self.appears(place)


def column(part: str, place: str, seconds: float) -> Column:
    """A part that writes one character a token, at a steady speed."""
    count = len(TEXT)
    marks = [Mark(seconds * n / count, n, n) for n in range(1, count + 1)]
    return Column(part, "torch", place, TEXT, marks)


def draw(*seconds: float) -> Picture:
    columns = [column(part, "1st", each) for part, each in zip(PARTS, seconds)]
    return Picture(SCRIPT["picture"](columns, "Say: ", "A race", ["the command"]))


def test_each_word_appears_when_it_was_written():
    picture = draw(5.0, 10.0)
    assert "real time" in picture.root.findtext(f"{SVG}title")
    for part, seconds in ("part0", 5.0), ("part1", 10.0):
        words = picture.words(part)
        assert "".join(word for word, _ in words) == "".join(f"Say: {TEXT}".split())
        assert words[0] == ("Say:", -START)
        times = [at for _, at in words]
        assert times == sorted(times)
        first = seconds * len("First") / len(TEXT)
        assert [times[1], times[-1]] == pytest.approx([first, seconds], abs=0.01)
        assert picture.finish(part) == (f"1st in {seconds:.2f} s", pytest.approx(seconds, abs=0.01))


def test_a_race_is_written_as_it_was(extension, threads, tmp_path):
    out = tmp_path / "race.svg"
    options = ["-m", "shakes128", "--parts", "part0,part4", "--max-new-tokens", "100", "--out", str(out)]
    result = CliRunner().invoke(SCRIPT["main"], options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert out.stat().st_size < LARGEST_BYTES
    picture = Picture(out.read_text())
    written = re.search(r"\n(ROMEO:.*)\n\nidentical", result.output, re.S)[1]
    stretches = []
    for part in "part0", "part4":
        assert "".join(word for word, _ in picture.words(part)) == "".join(written.split())
        times = [at for _, at in picture.words(part)]
        assert times == sorted(times)
        shown, at = picture.finish(part)
        place, seconds = re.search(rf"^(\d) +{part} +\w+ +100 +([\d.]+)", result.output, re.M).groups()
        assert shown.startswith(place)
        stretches.append(at / float(seconds))  # the table rounds to a millisecond
    assert stretches[0] == pytest.approx(stretches[1], rel=0.1)


def test_the_picture_in_the_documents_is_complete():
    path = ROOT / "docs" / "figures" / "race.svg"
    assert path.stat().st_size < LARGEST_BYTES
    picture = Picture(path.read_text())
    places = [picture.finish(part)[0][:3] for part in PARTS]
    assert len(set(places)) == len(PARTS) and all(map(picture.words, PARTS))
    foot = [element.text for element in picture.root.findall(f"{SVG}text")][-4:]
    assert foot[0].startswith("$ python gpt.py race -m shakes1024 ")
    assert re.search(r"AMD|Intel|ARM|Apple|CPU", foot[1])
    assert {element.tag for element in picture.root.iter()} <= {
        SVG + tag for tag in ("svg", "title", "desc", "style", "rect", "text", "g")
    }
