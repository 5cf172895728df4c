"""docs/figures/race.svg: scripts/make-race-svg.py shows the text and the times of a race."""

import re
import runpy
import xml.etree.ElementTree as ElementTree

import pytest
from support import ROOT

from shakespeare.attention_ext import PARTS

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "make-race-svg.py"))
SVG = "{http://www.w3.org/2000/svg}"


def columns(picture: str) -> dict[str, list[tuple[str, float]]]:
    """The lines of each part, its result first, each with the second of the race at which it appears."""
    root = ElementTree.fromstring(picture)
    style = root.findtext(f"{SVG}style")
    loop = float(re.search(r"animation:([\d.]+)s", style)[1])
    percents = dict(re.findall(r"@keyframes (\w+)\{0%\{opacity:0\}([\d.]+)%\{opacity:1\}\}", style))
    shown = {}
    for part in PARTS:
        for column in root.findall(f"{SVG}g[@id='{part}']"):
            texts = [column.find(f"{SVG}text[@class='place']"), *column.find(f"{SVG}svg").iter(f"{SVG}text")]
            names = [text.get("style", "").partition(":")[2] for text in texts]
            times = [float(percents.get(name, 0)) / 100 * loop - SCRIPT["START_SECONDS"] for name in names]
            shown[part] = list(zip((text.text or "" for text in texts), times))
    return shown


def test_a_race_is_drawn_as_it_was(extension, threads, capsys):
    picture = SCRIPT["run"]("shakes128", ["part0", "part4"], 100)
    printed = capsys.readouterr().out
    written = re.search(r"\n(ROMEO:.*)\n\nidentical", printed, re.S)[1]
    for part, ((result, end), *lines) in columns(picture).items():
        assert "".join("".join(line.split()) for line, _ in lines) == "".join(written.split())
        assert [at for _, at in lines] == sorted(at for _, at in lines) and lines[-1][1] <= end + 1e-3
        place, seconds = re.search(rf"^(\d) +{part} +\w+ +100 +([\d.]+)", printed, re.M).groups()
        assert result.startswith(place) and end == pytest.approx(float(seconds), abs=2e-3)


def test_the_picture_in_the_documents_is_complete():
    picture = SCRIPT["FIGURE"].read_text()
    results = [result[:3] for (result, _), *_ in columns(picture).values()]
    assert len(set(results)) == len(PARTS)
    assert "$ python gpt.py race -m shakes1024 " in picture and re.search(r"AMD|Intel|ARM|Apple", picture)
