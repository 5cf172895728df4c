"""Putting the page into a folder, over the page before and with a copy that ends in the middle; its list."""

import re
import shutil
from unittest.mock import Mock

import pytest

from shakespeare.web import build


def test_the_page_lists_its_modules_for_the_browser_to_load_at_once():
    """A browser that finds them by their imports waits for the network once for each of them in a row."""
    modules = {path.name: path.read_text() for path in (build.WEB / "js").glob("*.js")}
    listed = re.findall(
        r'<link rel="modulepreload" href="js/([^"]*)">', (build.WEB / "index.html").read_text()
    )
    assert listed == sorted([*modules, "facts.js"])
    assert [name for name, text in modules.items() if not text.startswith("// @ts-check\n//")] == []


def test_colours_that_mean_different_things_differ_in_brightness():
    """Red and blue are what is written and read; WCAG's contrast, 1 for colours of the same brightness."""
    style = (build.WEB / "style.css").read_text()
    pairs = [re.search(rf"--{name}: light-dark\((#\w+), (#\w+)\)", style) for name in ("red", "blue")]
    for red, blue in zip(*(pair.groups() for pair in pairs if pair), strict=True):
        contrast = (luminance(red) + 0.05) / (luminance(blue) + 0.05)
        assert max(contrast, 1 / contrast) > 1.8


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def test_a_folder_holds_the_page_before_until_it_holds_the_new_one(tmp_path, monkeypatch):
    folder, cached = tmp_path / "page", tmp_path / "cache"
    for place, text in ((folder, "the page before"), (cached, "the new page")):
        place.mkdir()
        (place / "index.html").write_text(text)
        build.write_stamp(place)
    monkeypatch.setattr(build, "make", lambda: cached)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", Mock(side_effect=KeyboardInterrupt))
        build.put(folder)
    assert (folder / "index.html").read_text() == "the page before"
    for _ in range(2):
        build.put(folder)
        assert (folder / "index.html").read_text() == "the new page"
        assert build.files(folder) == build.files(cached)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "page"]
