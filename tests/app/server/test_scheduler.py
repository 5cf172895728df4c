"""Lanes share the time, whatever their steps cost; a failure ends one lane only."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

from app.server.metrics import Metrics
from app.server.scheduler import Scheduler
from app.server.settings import Settings

from .conftest import MODEL, serving


class Steps:
    """A lane whose steps cost a fixed number of seconds."""

    opened = ready = True
    wanted = False

    def __init__(self, seconds: float) -> None:
        self.seconds, self.credit, self.used = seconds, 0.0, 0.0

    def step(self) -> float:
        self.used += self.seconds
        return self.seconds


def test_lanes_get_equal_time():
    scheduler = Scheduler({}, Settings(), Metrics())
    lanes = [Steps(seconds) for seconds in (0.0001, 0.001, 0.0035, 0.05)]
    for _ in range(5000):
        for lane in lanes:
            scheduler._turn(lane)
    used = [lane.used for lane in lanes]
    assert max(used) < 1.05 * min(used), used


def test_an_engine_that_fails_ends_its_texts_only(extension, monkeypatch):
    from generation.native import NativeEngine

    with serving(Settings((MODEL,))) as client:
        before = client.complete(seed=1).text()

        def fail(*arguments):
            raise ValueError("logits hold NaN")

        with monkeypatch.context() as patch:
            patch.setattr(NativeEngine, "write", fail)
            failed = client.complete(seed=1)
            assert failed.status == 500 and "logits hold NaN" in failed.json()["error"]["message"]
            streamed = client.complete(seed=1, stream=True).data
            assert b'"type": "server_error"' in streamed and b"[DONE]" not in streamed
        assert client.complete(seed=1).text() == before
        client.idle()


def test_a_part_that_cannot_be_opened(extension, monkeypatch):
    with serving(Settings((MODEL,))) as client:
        from app.server import scheduler

        def fail(*arguments, **options):
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "open_engine", fail)
            refused = client.complete(part="part2")
            assert refused.status == 500 and "no room" in refused.json()["error"]["message"]
            assert client.complete().status == 200
        assert client.complete(part="part2").status == 200


def test_models_that_cannot_be_opened(extension, monkeypatch):
    from app.server import running, scheduler
    from model import load

    def fail(*arguments, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(scheduler, "open_engine", fail)
    settings = Settings((MODEL,), port=0)
    server = running.make({MODEL: load(MODEL)}, settings)
    with pytest.raises(MemoryError, match="no room"):
        running.serve(server, running.bind(settings), lambda line: None)
