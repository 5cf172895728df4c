"""Fixtures that try a user's file."""

import contextlib

import pytest
from planted import SECONDS

from shakespeare.judge import sanitizers
from shakespeare.judge.verdict import Checker


@pytest.fixture(scope="module")
def checker(extension):
    with contextlib.closing(Checker()) as checker:
        yield checker


@pytest.fixture
def tried(checker, tmp_path, monkeypatch):
    """The verdict on a text in a file of this name, by the cases and, where it is searched, by sanitizers."""
    monkeypatch.setattr(sanitizers, "SECONDS", SECONDS)

    def call(name, text, *, seconds=SECONDS, searched=True, **asked):
        (tmp_path / name).write_text(text)
        found = checker.check(tmp_path / name, seconds, **asked)
        if searched:
            found.sanitize(tmp_path / name)
        return found

    return call
