"""Putting the page into a folder: over the page before, and a copy that ends in the middle."""

import shutil
from unittest.mock import Mock

import pytest

from shakespeare.web import build


def test_a_browser_gets_its_build_whole_from_those_that_are_mixed(node, tmp_path):
    """Of lengths around a piece's; a build is a module of custom sections."""
    for counts in ((1, 4100), (4100, 1), (8188, 8190), (4091, 4092)):
        builds = [b"\0asm\1\0\0\0" + (b"\0\2\1" + name) * n for name, n in zip((b"s", b"r"), counts)]
        (tmp_path / "mixed").write_bytes(build.mixed(builds))
        made = node("chosen", path=str(tmp_path / "mixed"))
        assert made.encode("latin1").startswith(dict(zip(build.BUILDS, builds))[node("build")])


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
