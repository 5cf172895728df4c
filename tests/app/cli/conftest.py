"""Fixtures for the tests of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture
def failed(cli):
    """Run a request that is wrong; gives its one line on stderr."""

    def run(*arguments, **settings) -> str:
        done = cli(*arguments, **settings)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("gpt.py: error: ")
        return done.stderr

    return run
