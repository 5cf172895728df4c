"""Fixtures for all tests. Nothing here needs a network, a GPU or the corpus."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_ext import PARTS, BuildError, build

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def extension() -> None:
    """The compiled extension; without a compiler, tests of it are skipped."""
    try:
        build.find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    build.load()


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> str:
    """Each part in turn."""
    if PARTS[request.param].operator:
        request.getfixturevalue("extension")
    return request.param


@pytest.fixture(params=[name for name, part in PARTS.items() if part.operator])
def kernel(request: pytest.FixtureRequest, extension: None) -> str:
    """Each part that is a kernel of this repository, in turn."""
    return request.param


@pytest.fixture
def threads():
    """Set PyTorch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def cli(tmp_path: Path):
    """Run gpt.py in a process of its own; gives the finished process, its output as text."""

    def run(*args: str | Path, input: str | bytes | None = None, env: dict[str, str] | None = None):
        data = input.encode() if isinstance(input, str) else input
        done = subprocess.run(
            [sys.executable, str(ROOT / "gpt.py"), *map(str, args)],
            input=data if data is not None else b"",
            capture_output=True,
            cwd=tmp_path,
            env=os.environ | (env or {}),
            timeout=300,
        )
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run
