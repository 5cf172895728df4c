"""How much the tests here try: a part that takes seconds, or with ROBUSTNESS=full all of it."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("ROBUSTNESS") == "full"


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether this run is to try everything."""
    return FULL
