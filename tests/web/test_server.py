"""The page as `gpt.py serve` shows it: it also writes through the server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from generation import generate
from model import load

SECONDS = 60


@contextmanager
def served(model: str, page: Path) -> Iterator[str]:
    """The address of a server in a thread."""
    from app.server import running
    from app.server.settings import Settings

    settings = Settings((model,), port=0, page=page)
    server, listener = running.make({model: load(model)}, settings), running.bind(settings)
    said: SimpleQueue[str] = SimpleQueue()
    thread = threading.Thread(target=running.serve, args=(server, listener, said.put))
    thread.start()
    try:
        assert said.get(timeout=SECONDS).startswith("Ready")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        assert server.loop
        for _ in range(2):  # at once
            server.loop.call_soon_threadsafe(server.end)
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_the_server_and_the_browser_write_the_same_text(visit, page_folder, extension):
    pytest.importorskip("starlette", reason="the packages of serve are missing")
    if visit.browser == "firefox":
        pytest.skip("Firefox is tested without the page's policy, which the server's page has")
    query = {"model": "shakes256", "seed": "18446744073709", "length": 120, "weights": "fp32"}
    with served("shakes256", page_folder) as home:
        made = visit("server", query=query, home=home)
    expected = generate(
        load("shakes256"), "ROMEO:", 120, seed=18446744073709, temperature=0.8, top_k=65, weights="fp32"
    )
    assert made["server"] == made["browser"] == expected
    assert made["server status"].startswith("120 characters by the server") and not made["server bars"]
    assert made["browser status"].startswith("120 characters with part4") and made["browser bars"]
    assert made["choice"] == "server"
