"""A failure ends one lane or one request only."""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

import tiny
from serving import MODEL, serving

from shakespeare.app.server import Settings
from shakespeare.model import load
from shakespeare.model.checkpoint import save


def test_an_engine_that_fails_or_cannot_be_opened_ends_its_texts_only(extension, monkeypatch):
    from shakespeare.generation.engines.native import Decoder

    with serving(Settings((MODEL,))) as client:
        before = client.complete(seed=1).text()
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "write", Mock(side_effect=ValueError("logits hold NaN")))
            failed = client.complete(seed=1)
            assert failed.status == 500 and "logits hold NaN" in failed.json()["error"]["message"]
            streamed = client.complete(seed=1, stream=True).data
            assert b'"type": "server_error"' in streamed and b"[DONE]" not in streamed
        assert client.complete(seed=1).text() == before
        with monkeypatch.context() as patch:
            full = Mock(side_effect=MemoryError("no room"))
            patch.setattr("shakespeare.app.server.scheduler.open_engine", full)
            refused = client.complete(part="part2")
            assert refused.status == 500 and "no room" in refused.json()["error"]["message"]
            assert client.complete().status == 200
        assert client.complete(part="part2").status == 200
        client.idle()


def test_an_error_of_one_request_ends_that_request_only(extension, monkeypatch):
    with serving(Settings((MODEL,))) as client, ThreadPoolExecutor() as threads:
        from shakespeare.app.server.responses import Call

        before = client.complete(seed=1, max_tokens=60).text()
        event = Call.event

        def fail(call, choice):
            if call.body.user == "broken":
                raise KeyError("no such token")
            return event(call, choice)

        monkeypatch.setattr(Call, "event", fail)
        others = [threads.submit(client.complete, seed=1, max_tokens=60) for _ in range(2)]
        for _ in range(3):
            broken = client.complete(user="broken", n=3, stream=True).data
            assert b"no such token" in broken and b"[DONE]" not in broken
        assert {other.result().text() for other in others} == {before}
        client.idle()


def test_the_cuda_engine_serves_the_same_texts(emulated, extension, tmp_path, monkeypatch):
    save(tmp_path, tiny.gpt(), tiny.VOCABULARY, {})
    checkpoint = load(str(tmp_path))
    fields = [
        {"prompt": "ab", "max_tokens": 9, "seed": 1, "stream": True},
        {"prompt": "c" * 20, "max_tokens": 6, "seed": 2, "logprobs": 2},
    ]
    found = {}
    for device in ("cpu", "cuda"):
        if device == "cuda":
            emulated(monkeypatch, 32, (2,))
        settings = Settings(("tiny",), device=device, slots=3)
        with serving(settings, {"tiny": checkpoint}) as client, ThreadPoolExecutor() as threads:
            made = [threads.submit(client.complete, model="tiny", **each) for each in fields]
            found[device] = [each.result().text() for each in made]
            refused = client.complete(model="tiny", prompt="a", part="part2", max_tokens=1)
            assert (refused.status == 400) == (device == "cuda")
            if device == "cuda":
                assert refused.json()["error"]["param"] == "part"
            client.idle()
    assert found["cuda"] == found["cpu"]
