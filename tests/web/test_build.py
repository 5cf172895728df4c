"""Making the page: builds at once, builds that are killed, a page that is out of date."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from web import build


@pytest.fixture
def quick(page_folder, monkeypatch):
    """Let a build copy the weights that another has converted, which takes seconds."""
    monkeypatch.setattr(build, "write_models", lambda to: shutil.copytree(page_folder / "models", to))


def test_two_builds_at_once_make_one_page(quick, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(build.make, [tmp_path / "page"] * 2))
    assert sorted(made) == [False, True] and build.is_whole(tmp_path / "page", build.fingerprint())
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_build_that_ends_in_the_middle_leaves_the_page_before(quick, tmp_path, monkeypatch):
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text("the page before")
    build.write_stamp(folder, "of older sources")

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "write_models", fail)
        build.make(folder)
    assert (folder / "index.html").read_text() == "the page before" and build.is_whole(folder)
    left = tmp_path / f".page-{build.STAMP}-killed"  # as a killed process leaves it
    left.mkdir()
    assert build.make(folder) and not left.exists() and not build.make(folder)
    (folder / "models" / "models.json").unlink()
    assert build.make(folder) and (folder / "models" / "models.json").is_file()
