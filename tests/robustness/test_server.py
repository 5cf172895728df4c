"""The server among thousands of clients that read slowly or not at all, or leave."""

import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import struct
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import MODEL, WAIT_SECONDS, Client, Response, port_of, raw, until
from support import naming, resident

pytestmark = pytest.mark.full

running = pytest.importorskip("shakespeare.app.server.running", reason="pip install -e '.[serve]'")

REQUESTS = (10_000, 150)
LENGTH, SEEDS = 200, 24  # tokens beyond the block size of 128, so that the window slides
PROMPTS = ("ROMEO:", "\n", "A SERVER:\nThe requests have come, and I must answer them.\n\nALL:\n")
PARTS = ("part4",) * 14 + ("part2", "part0")  # others are slower, and would take most of the time
SLOTS, QUEUE, AT_ONCE, MOST_CHOICES = 16, 32, 56, 3
GROWTH = 1.05
DEAF_SECONDS = 4.0, 14.0  # the server drops a reader that takes nothing for ten
KINDS = {"whole": 25, "stream": 30, "leave": 20, "slow": 8, "deaf": 2, "hostile": 5}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Connection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ITEMS = b'{"model": "x", "prompt": [' + b"{}, " * 60_000 + b"{}]}"
# Inputs that once stopped the server, slowed it down or took memory.
HOSTILE = (
    b"CONNECT /x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * 100_000,
    CHUNKED + b"2\r\n{}\r\n0\r\nX: " + b"a" * 1_000_000,
    CHUNKED + b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n",
    HEAD + b"Content-Length: %d\r\n\r\n" % len(ITEMS) + ITEMS,
    HEAD + b"Content-Length: 10000\r\n\r\n" + b'{"prompt": ' + b"[" * 9989,
)


def received(connection: socket.socket, pause: float = 0.0) -> Response:
    """The response on a connection, read with pauses. Raises OSError or HTTPException if it is cut."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    data = b""
    while piece := answer.read1(1024 if pause else -1):
        data += piece
        time.sleep(pause)
    return Response(answer.status, {name.lower(): value for name, value in answer.getheaders()}, data)


class Soak:
    """The clients. texts: the command line's, by prompt and seed. outcomes: what became of the requests."""

    def __init__(self, client: Client, texts: dict[tuple[str, int], str]) -> None:
        self.client, self.texts = client, texts
        self.outcomes: Counter[str] = Counter()

    def run(self, numbers: range) -> None:
        """Send the requests with these numbers, AT_ONCE at a time. The first that is lost or wrong raises."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self.outcomes.update(pool.map(self.send, numbers))

    def send(self, number: int) -> str:
        draw = random.Random(number)
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        with naming(number, kind):
            return f"{kind}: {getattr(self, kind)(draw)}"

    def fields(self, draw: random.Random, **own) -> dict:
        """A random request whose texts are known."""
        n = own.get("n", draw.randint(1, MOST_CHOICES))
        fields = {"prompt": draw.choice(PROMPTS), "seed": draw.randrange(SEEDS - n), "n": n}
        return fields | {"max_tokens": draw.randint(1, LENGTH), "part": draw.choice(PARTS)} | own

    def answered(self, draw: random.Random, pause: float = 0.0, **own) -> str:
        """Ask until the queue has room; compare the texts."""
        fields = self.fields(draw, **own)
        for attempt in itertools.count():
            with raw(self.client, receive_buffer=4096 if pause else None, **fields) as connection:
                response = received(connection, pause)
            if response.status != 429:
                break
            time.sleep(draw.uniform(0.5, 1.5) * int(response.headers["retry-after"]))
        assert response.status == 200, response
        for number in range(fields["n"]):
            expected = self.texts[fields["prompt"], fields["seed"] + number][: fields["max_tokens"]]
            assert response.text(number) == expected
        return "right, after 429" if attempt else "right"

    whole = answered

    def stream(self, draw: random.Random) -> str:
        return self.answered(draw, stream=True, stream_options={"interval_ms": draw.choice([0, 16, 100])})

    def slow(self, draw: random.Random) -> str:
        options = {"interval_ms": 0}
        return self.answered(draw, draw.uniform(0.005, 0.05), stream=True, stream_options=options, n=1)

    def deaf(self, draw: random.Random) -> str:
        """Do not read a long stream for seconds; the server may drop it."""
        fields = {"prompt": "a" * 100, "max_tokens": 3000, "stream": True, "logprobs": 5, "context": "reset"}
        with raw(self.client, receive_buffer=4096, stream_options={"interval_ms": 0}, **fields) as connection:
            time.sleep(draw.uniform(*DEAF_SECONDS))
            try:
                response = received(connection)
            except (OSError, http.client.HTTPException):
                return "dropped"
        assert response.status == 429 or len(response.text()) == 3000
        return str(response.status)

    def hostile(self, draw: random.Random) -> str:
        """Send what is refused, and read what comes until the server closes the connection."""
        with self.client.connection() as connection, contextlib.suppress(OSError):
            connection.sendall(draw.choice(HOSTILE))
            answer = connection.recv(1 << 16)
            assert answer[:10] in (b"", b"HTTP/1.1 4"), answer
            while connection.recv(1 << 16):
                pass
        return "refused"

    def leave(self, draw: random.Random) -> str:
        """Leave in the middle of a request, at once, in the queue or later, in order or by a reset."""
        fields = self.fields(draw, stream=draw.random() < 0.6, max_tokens=draw.choice([LENGTH, 20_000]))
        with raw(self.client, sent=draw.choice([40, -5, None, None]), **fields) as connection:
            if draw.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(draw.choice([0, draw.uniform(0, 0.02), draw.uniform(0, 0.3)]))
        return "left"


def opened(client: Client, process: int) -> list[int]:
    """The numbers of a server's threads and open files, when its connections have ended.

    A connection stays for seconds after its client has closed it. If the page is built, threads look for its
    files: one that was idle for 10 s ends with the next look.
    """
    client.get("/v1/nothing")
    time.sleep(running.HEAD_SECONDS + 1)
    return [len(os.listdir(f"/proc/{process}/{name}")) for name in ("task", "fd")]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_nothing_is_lost_or_wrong_or_left_behind(process, cli, extension, full):
    texts = {}
    for prompt in PROMPTS:
        options = ("-m", MODEL, "--json", "--seed", 0, "--num-samples", SEEDS, "--temperature", 1)
        done = cli(*("part4", "--inference", *options, "--prompt", prompt, "--max-new-tokens", LENGTH))
        for sample in map(json.loads, done.stdout.splitlines()):
            texts[prompt, sample["seed"]] = sample["text"]
    child = process(*("serve", "-m", MODEL, "--port", 0, "--threads", 1, "--slots", SLOTS, "--queue", QUEUE))
    client = Client(port_of(child))
    soak, requests = Soak(client, texts), REQUESTS[0 if full else 1]
    soak.run(range(requests // 3))  # then as many connections were open at a time as ever
    for part in set(PARTS):  # PyTorch opens threads and files when a part is first used
        soak.answered(random.Random(0), part=part)
    client.idle()
    before, memory = opened(client, child.pid), resident(child.pid)
    soak.run(range(requests // 3, requests))
    client.idle()
    with naming("threads and files", before):
        until(lambda: all(now <= then for now, then in zip(opened(client, child.pid), before)))
    assert resident(child.pid) <= GROWTH * memory
    assert client.metric("attention_requests_refused_total", status="500") == 0
    assert client.metric("attention_streams_dropped_total") == soak.outcomes["deaf: dropped"]
    with raw(client, prompt="a" * 128, max_tokens=16_000, n=SLOTS, stream=True):
        until(lambda: client.metric("attention_texts_running") == SLOTS)
    client.idle()
    child.terminate()
    logged = child.communicate(timeout=WAIT_SECONDS)[1]
    assert child.returncode == 0 and logged == "", logged
    assert soak.outcomes.total() == requests and len(soak.outcomes) >= len(KINDS), soak.outcomes
