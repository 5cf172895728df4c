"""The size of the stress tests: a share that takes seconds, or with ROBUSTNESS=full all of them."""

import os

import pytest

CHOSEN = os.environ.get("ROBUSTNESS", "")
FULL = CHOSEN == "full"


def pytest_configure() -> None:
    if CHOSEN not in ("", "full"):
        raise pytest.UsageError(f"ROBUSTNESS is {CHOSEN!r}; it must be 'full' or not set")


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether to run the stress tests in full."""
    return FULL
