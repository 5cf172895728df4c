"""Clients that leave, read slowly, come in crowds, or do not send requests."""

import asyncio
import itertools
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("starlette", reason="pip install -e '.[serve]'")

from serving import MODEL, WAIT_SECONDS, raw, serving, until

from shakespeare.app.server import Settings

IDLE = 1000  # connections
LONG = {"prompt": "a" * 128, "max_tokens": 60_000}  # each token reads a window
PATIENT = dict.fromkeys(("body_seconds", "behind_seconds", "stall_seconds"), WAIT_SECONDS)


@pytest.fixture(scope="module")
def small(extension):
    limits = {"body_bytes": 10_000, "buffer_bytes": 20_000, "most_scores": 10**6} | PATIENT
    with serving(Settings((MODEL,), slots=1, queue=2, **limits)) as client:
        yield client


@pytest.fixture
def hasty(small, monkeypatch):
    server = small.server.application
    return lambda **limits: monkeypatch.setattr(server, "settings", replace(server.settings, **limits))


def texts(client, what: str, count: int) -> None:
    """Wait until so many texts are `running` or `queued`."""
    until(lambda: client.metric(f"attention_texts_{what}") == count)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_or_its_place(small, stream):
    small.idle()
    cancelled = small.metric("attention_texts_cancelled_total")
    with raw(small, **LONG, stream=stream) as connection:
        texts(small, "running", 1)
        with raw(small, **LONG) as waiting:
            texts(small, "queued", 1)
            waiting.close()
            texts(small, "queued", 0)
        texts(small, "running", 1)
        connection.close()
        texts(small, "running", 0)  # LONG would take minutes
    assert small.metric("attention_texts_cancelled_total") == cancelled + 2


def test_a_full_queue_answers_429(small):
    small.idle()
    with raw(small, **LONG), raw(small, **LONG), raw(small, **LONG):
        texts(small, "queued", 2)
        refused = small.complete()
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    small.idle()
    assert small.complete().status == 200
    assert small.complete(n=4).json()["error"]["param"] == "n"  # more than ever fit


@pytest.mark.full
def test_a_slow_reader_is_dropped(small, hasty):
    small.idle()
    hasty(behind_seconds=0.2)
    dropped = small.metric("attention_streams_dropped_total")
    fields = {"prompt": "a", "logprobs": 5, "stream_options": {"interval_ms": 0}}
    with raw(small, receive_buffer=4096, stream=True, **LONG | fields):
        until(lambda: small.metric("attention_streams_dropped_total") == dropped + 1)
        small.idle()
    assert small.complete().status == 200


@pytest.mark.full
def test_a_stalled_reader_is_dropped(extension, caplog):
    """The reader of a stream, of a whole response, and of responses without a text."""
    limits = PATIENT | {"stall_seconds": 0.3, "buffer_bytes": 10**9, "most_scores": 10**6}
    whole = {"prompt": "a" * 5000, "n": 16, "max_tokens": 0, "echo": True, "logprobs": 5}
    stream = {"prompt": "a", "logprobs": 5, "stream": True, "stream_options": {"interval_ms": 0}}
    with serving(Settings((MODEL,), **limits)) as client:
        for number, fields in enumerate((stream, whole), 1):
            with raw(client, receive_buffer=4096, **LONG | fields):
                until(lambda number=number: client.metric("attention_streams_dropped_total") == number)
            client.idle()
        with client.connection(4096) as connection:
            with suppress(OSError):  # dropped already
                for _ in range(300):
                    connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            until(lambda: client.metric("attention_streams_dropped_total") == 3)
    assert caplog.records == []


@pytest.mark.full
def test_a_fast_reader_is_not_dropped(extension):
    """It stays even if a piece is larger than the buffer."""
    echo = {"prompt": "a" * 30_000, "echo": True, "max_tokens": 10, "n": 8}
    with serving(Settings((MODEL,), buffer_bytes=2000, **PATIENT)) as client:
        for fields, characters in (
            ({"logprobs": 5, "max_tokens": 200}, 200),
            ({"logprobs": 5, "max_tokens": 100, "n": 8}, 100),
            ({"max_tokens": 5000, "context": "reset", "stream_options": {"interval_ms": 10_000}}, 5000),
            (echo, 30_010),
        ):
            assert len(client.complete(stream=True, **fields).text(0)) == characters
            answer = client.complete(**fields | {"stream_options": None})
            assert len(answer.json()["choices"][-1]["text"]) == characters
        assert client.metric("attention_streams_dropped_total") == 0


def test_what_is_no_request(small):
    assert small.send("POST", "/v1/completions", b"{}").json()["error"]["code"] == "unsupported_media_type"
    assert small.send("POST", "/v1/completions", b"{}", content_type="text/plain").status == 415
    long = small.complete(prompt="a" * 10_001)
    assert long.status == 413 and long.json()["error"]["code"] == "body_too_large"
    chunks = iter([b"a" * 6000, b"a" * 6000])
    assert small.send("POST", "/v1/completions", chunks, content_type="application/json").status == 413  # type: ignore
    for data in (b"", b"\xff\xfe", b"[]", b"{" * 9000):
        assert small.send("POST", "/v1/completions", data, content_type="application/json").status == 400


@pytest.fixture(scope="module")
def short(extension):
    """A server that waits a second for a head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shakespeare.app.server.running.HEAD_SECONDS", 1.0)
        with serving(Settings((MODEL,), **PATIENT)) as client:
            yield client


@pytest.mark.full
def test_a_head_that_does_not_come(short):
    for data in (b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nHost: loc"):
        with short.connection() as connection:
            connection.sendall(data)
            with suppress(ConnectionResetError):
                assert connection.recv(1000) == b""


def test_a_head_is_limited(small):
    with small.connection() as connection, pytest.raises(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(30_000):
            connection.sendall(b"X-Header: " + b"a" * 1000 + b"\r\n")


def test_what_only_proxies_answer_is_refused(small):
    for target in ("/x", "localhost:80"):
        with small.connection() as connection:
            connection.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: localhost\r\n\r\nmore".encode())
            assert b"".join(iter(partial(connection.recv, 1000), b"")).startswith(b"HTTP/1.1 400 ")
    assert small.get("/health").status == 200


@pytest.mark.parametrize("trailer", [b"X: a\r\n" * 10_000, b"X: " + b"a" * 60_000])
def test_headers_after_a_body_are_limited(small, trailer):
    """Whether the request was refused, or its answer waits for them."""
    for kind in (b"text/plain", b"application/json"):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        with small.connection() as connection, pytest.raises(OSError):
            connection.sendall(head + b"Content-Type: " + kind + b"\r\n\r\n2\r\n{}\r\n0\r\n")
            for _ in range(1000):
                connection.sendall(trailer)
    assert small.get("/health").status == 200


@pytest.mark.full
def test_a_body_that_does_not_come(small, hasty):
    hasty(body_seconds=0.5)
    with small.connection() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in connection.recv(10_000).partition(b"\r\n")[0]


@pytest.mark.full
def test_a_connection_does_not_stay_after_a_refusal(short):
    """The connection ends whether or not the client sends the rest, for which it has little time."""
    long = "Host: localhost\r\nContent-Length: 1000000000\r\n\r\n{"
    get = "GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for sent, later in (
        (f"POST /v1/completions HTTP/1.1\r\n{long}", "a"),  # 415
        (f"POST /nothing HTTP/1.1\r\n{long}", "a"),  # 404
        (f"GET /health HTTP/1.1\r\n{long}", "a"),
        (f"{get}\r\n", "\r\n"),  # a line end begins no request
        (f"{get}Content-Length: 9\r\n\r\n", "a" * 9),
    ):
        with short.connection() as connection:
            connection.sendall(sent.encode())
            assert connection.recv(10_000).startswith(b"HTTP/1.1 ")
            with suppress(OSError):
                connection.sendall(later.encode())
                while connection.recv(10_000):
                    pass


def test_a_body_of_many_chunks_lets_others_have_their_turn(small):
    """Each chunk has one byte. No turn of the server's loop takes most of the time."""
    answered = threading.Event()

    async def longest_turn() -> float:
        times = [time.monotonic()]
        while not answered.is_set():
            await asyncio.sleep(0)
            times.append(time.monotonic())
        return max(after - before for before, after in itertools.pairwise(times))

    turn = asyncio.run_coroutine_threadsafe(longest_turn(), small.server.loop)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with small.connection() as connection:
        began = time.monotonic()
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 9000 + b"0\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
        seconds = time.monotonic() - began
    answered.set()
    assert turn.result() < seconds / 2


@pytest.mark.full
def test_idle_connections_keep_nobody_waiting(small):
    resource = pytest.importorskip("resource")
    if 0 < resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3 * IDLE:
        pytest.skip("this process may not open as many files")
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(small.connection())
        assert small.get("/health").status == 200
        assert len(small.complete(max_tokens=5).text()) == 5
