"""docs/figures/race.svg: scripts/make-race-svg.py shows the texts and the times of a race."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner
from support import ROOT

from shakespeare.attention_ext import PARTS

LARGEST_BYTES = 150_000
SVG = "{http://www.w3.org/2000/svg}"
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-race-svg.py"))
START = SCRIPT["START_SECONDS"]


class Picture:
    """A parsed picture: the elements of a part, and the times at which they appear."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.style = self.root.findtext(f"{SVG}style") or ""
        self.loop = float(re.search(r"animation:([\d.]+)s", self.style)[1])

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
        shown = self.column(part).find(f"{SVG}svg").iter(f"{SVG}text")
        return [(word.text, self.appears(word)) for word in shown]

    def finish(self, part: str) -> tuple[str, float]:
        """The text of place and seconds, and the time at which it appears."""
        texts = self.column(part).findall(f"{SVG}text")
        place = next(text for text in texts if "place" in text.get("class", "").split())
        return place.text, self.appears(place)


def test_a_race_is_written_as_it_was(extension, threads, tmp_path):
    out = tmp_path / "race.svg"
    options = ["-m", "shakes128", "--parts", "part0,part4", "--max-new-tokens", "100", "--out", str(out)]
    result = CliRunner().invoke(SCRIPT["main"], options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert out.stat().st_size < LARGEST_BYTES
    picture = Picture(out.read_text())
    written = re.search(r"\n(ROMEO:.*)\n\nidentical", result.output, re.S)[1]
    played = {}
    for part in "part0", "part4":
        assert "".join(word for word, _ in picture.words(part)) == "".join(written.split())
        times = [at for _, at in picture.words(part)]
        assert times == sorted(times)
        shown, at = picture.finish(part)
        place, seconds = re.search(rf"^(\d) +{part} +\w+ +100 +([\d.]+)", result.output, re.M).groups()
        assert shown.startswith(place)
        played[part] = at, float(seconds)
    (slow, of_slow), (fast, of_fast) = played.values()
    assert fast / slow * of_slow == pytest.approx(of_fast, abs=2e-3)  # the table rounds to a millisecond


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
