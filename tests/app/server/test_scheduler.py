"""Lanes share the time, whatever their steps cost; a failure ends one lane only."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

from app.server.lanes import STEP_SECONDS, STEP_TOKENS, Lane
from app.server.metrics import Metrics
from app.server.scheduler import Scheduler
from app.server.settings import Settings
from generation.writer import TOKENS_AT_ONCE

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


def test_commands_that_come_all_the_time_change_no_share(monkeypatch):
    scheduler = Scheduler({}, Settings(), Metrics())
    scheduler._commands.put(("cancel", None, None))
    done = []
    monkeypatch.setattr(scheduler, "_obey", lambda: bool(done.append(1)) or True)
    lanes = [Steps(seconds) for seconds in (0.0005, 0.0035, 0.05)]
    for _ in range(2000):
        assert all(scheduler._turn(lane) for lane in lanes)
    used = [lane.used for lane in lanes]
    assert max(used) < 1.05 * min(used), used
    assert len(done) > 2000  # not only once a turn


def test_a_lane_that_waits_for_its_engine_is_not_kept_waiting():
    """Its call may have come in the middle of another lane's turn: no command follows."""
    scheduler, lane = Scheduler({}, Settings(), Metrics()), Steps(0.001)
    lane.ready, lane.wanted = False, True
    scheduler._lanes[MODEL, "part1"] = lane
    thread = threading.Thread(target=scheduler._obey, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_a_step_of_slow_texts_is_short():
    lane = Lane(MODEL, "part1", 32, Metrics(), lambda *piece: None)
    assert lane._rows(4) == 1  # nothing is known yet
    lane._row_seconds = 1e-4
    assert (lane._rows(4), lane._rows(128), lane._rows(5000)) == (TOKENS_AT_ONCE, STEP_TOKENS // 128, 1)
    lane._row_seconds = STEP_SECONDS / 3.5
    assert lane._rows(4) == 3
    lane._row_seconds = 1.0
    assert lane._rows(4) == 1


def test_an_idle_lane_saves_no_time():
    scheduler = Scheduler({}, Settings(), Metrics())
    idle, busy = Steps(0.001), Steps(0.001)
    idle.ready = False
    for _ in range(100):
        scheduler._turn(idle)
        scheduler._turn(busy)
    idle.ready, before = True, busy.used
    for _ in range(10):
        scheduler._turn(idle)
        scheduler._turn(busy)
    assert idle.used <= 1.2 * (busy.used - before)


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
