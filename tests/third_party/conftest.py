"""A server's process with a key, and one whose queue is full."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import port_of
from support import ROOT

MODEL, KEY = "shakes128", "a-key"
STREAM = {"model": MODEL, "prompt": "a" * 128, "max_tokens": 60_000, "stream": True}


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[int]:
    """A server's process; gives its port."""
    command = [sys.executable, str(ROOT / "gpt.py"), "serve", "-m", MODEL, "--port", "0", "--threads", "1"]
    child = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        yield port_of(child)
    finally:
        child.terminate()
        said = child.communicate()[1]
    assert "Traceback" not in said, said


@pytest.fixture(scope="session")
def environments() -> Path:
    """The folder with an environment for each client."""
    folder = os.environ.get("CLIENTS")
    if not folder:
        pytest.skip("scripts/try-clients.sh installs the clients and runs these tests")
    return Path(folder)


@pytest.fixture(scope="session")
def server(environments, extension) -> Iterator[str]:
    """The address of a server that asks for the key KEY."""
    with serving("--api-key", KEY) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def full(environments, extension) -> Iterator[str]:
    """The address of a server whose slot and queue are taken."""
    with serving("--api-key", KEY, "--slots", "1", "--queue", "1", "--grace", "0") as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/completions", json.dumps(STREAM | {"n": 2}), headers)
        assert connection.getresponse().status == 200
        yield f"http://127.0.0.1:{port}/v1"
        connection.close()
