"""Putting the page into a folder: over the page before, and a copy that ends in the middle."""

import shutil

import pytest

from shakespeare.web import build


def test_a_folder_holds_the_page_before_until_it_holds_the_new_one(page_folder, tmp_path, monkeypatch):
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text("the page before")
    build.write_stamp(folder)
    monkeypatch.setattr(build, "make", lambda: page_folder)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copytree", fail)
        build.put(folder)
    assert (folder / "index.html").read_text() == "the page before"
    for _ in range(2):
        build.put(folder)
        assert build.files(folder) == build.files(page_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
