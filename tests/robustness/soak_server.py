"""Thousands of requests from clients that behave badly, against one process of gpt.py serve.

    python tests/robustness/soak_server.py [--requests 10000] [--seed 0]

Some clients read all, some leave, some read slowly or not at all, some are killed, some send what is no
request. Every text that arrives is compared with the command line's. After a tenth of the requests, and at
the end, the server is idle; its memory, threads, open files and slots are compared. The exit code is 1 if
something was lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import io
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL, LENGTH, SEEDS = "shakes128", 200, 24  # beyond the block size of 128, so that the window slides
PROMPTS = ("ROMEO:", "\n", "A SERVER:\nThe requests have come, and I must answer them.\n\nALL:\n")
PARTS = ("part4",) * 14 + ("part2", "part0")  # others are slower, and would take most of the time
SLOTS, QUEUE, AT_ONCE, MOST_CHOICES = 16, 32, 56, 3
PATIENCE = 1200.0  # seconds after which an answer counts as lost, on any machine
RETRY_SECONDS = 1.0  # as the server's Retry-After says
GROWTH = 1.05
DEAF_SECONDS = 4.0, 14.0  # the server drops a reader that takes nothing for ten
SAID = "Invalid HTTP request received."  # by the server, of bytes that are no request
VICTIM_REQUESTS = 8
KINDS = {"whole": 25, "stream": 30, "leave": 20, "slow": 8, "deaf": 2, "bad": 14, "killed": 1}

# Bodies that are refused, each with its status.
BAD = [
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[]", 400),
    (b'{"model": "shakes128", "prompt": ""}', 400),
    (b'{"model": "shakes128", "max_tokens": -1}', 400),
    (b'{"model": "shakes128", "prompt": "\\u20ac"}', 400),
    (b'{"model": "shakes128", "no_such_field": 1}', 400),
    (b'{"model": "shakes128", "n": 100000}', 400),
    (b'{"model": "nothing"}', 404),
    (b" " * 300_000, 413),
]


def head(path: str, length: int, method: str = "POST", host: str = "localhost") -> bytes:
    """A request's head."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


NOTHING = head("/v1/nothing", 0, "GET")  # not even a file of the page


def request(fields: dict) -> bytes:
    """A request for a text."""
    body = json.dumps({"model": MODEL} | fields).encode()
    return head("/v1/completions", len(body)) + body


class Received:
    """In place of a socket from which `data` came."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


def parse(data: bytes) -> tuple[int, bytes]:
    """(status, body) of a whole answer; the status is 0 if nothing came. Raises ValueError if it was cut."""
    if not data:
        return 0, b""
    answer = http.client.HTTPResponse(Received(data))  # type: ignore[arg-type]
    try:
        answer.begin()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ValueError("cut") from error


def choices(body: bytes, stream: bool) -> dict[int, str]:
    """The texts in an answer. Raises ValueError if it has no end."""
    objects = [json.loads(body)] if not stream else []
    if stream:
        events = [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]
        if not events or events.pop() != "[DONE]":
            raise ValueError("cut")
        objects = [json.loads(event) for event in events]
    texts: dict[int, str] = {}
    for each in objects:
        for choice in each["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


class Server:
    """A process of gpt.py serve, and what the system says of it."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "gpt.py"), "serve", "-m", MODEL, "--port", "0"]
        command += ["--threads", "1", "--slots", str(SLOTS), "--queue", str(QUEUE)]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.child.stderr
        said = self.child.stderr.readline()
        found = re.search(r":(\d+)$", said, re.M)
        while line := self.child.stderr.readline():  # others tell that kernels are compiled
            said += line
            if "Ready" in line:
                break
        else:
            raise RuntimeError(said)
        assert found, said
        self.port = int(found[1])

    def state(self) -> dict[str, int]:
        """Its resident bytes, threads and open files."""
        folder = Path(f"/proc/{self.child.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        counts = {name: len(os.listdir(folder / name)) for name in ("task", "fd")}
        return {"bytes": pages * os.sysconf("SC_PAGE_SIZE")} | counts

    async def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's values."""
        data = await exchange(self.port, head("/metrics", 0, "GET"))
        lines = [line for line in parse(data)[1].decode().splitlines() if re.match(rf"{name}[{{ ]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)

    async def idle(self) -> None:
        """Wait until it writes nothing and no connection is left."""
        for _ in range(int(PATIENCE / 0.05)):
            left = await self.metric("attention_texts_running") + await self.metric("attention_texts_queued")
            if not left:
                await asyncio.sleep(0.5)  # until the connections are closed
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{left} texts are left")

    def end(self) -> str:
        """End it; what it said."""
        self.child.terminate()
        said = self.child.communicate(timeout=PATIENCE)[1]
        return said if self.child.returncode == 0 else f"{said}exit code {self.child.returncode}"


async def connect(port: int, buffer: int | None = None) -> socket.socket:
    """A connection."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def exchange(port: int, sent: bytes, pause: float = 0.0, buffer: int | None = None) -> bytes:
    """Send a request; read to the end, with pauses."""
    loop = asyncio.get_running_loop()
    with await connect(port, buffer) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer and close before it has read all
            await loop.sock_sendall(connection, sent)
        data = b""
        with contextlib.suppress(ConnectionError):
            while new := await loop.sock_recv(connection, 1024 if pause else 1 << 16):
                data += new
                if pause:
                    await asyncio.sleep(pause)
        return data


class Soak:
    """The clients and what became of their requests."""

    def __init__(self, server: Server, texts: dict[tuple[str, int], str]) -> None:
        self.server, self.port, self.texts = server, server.port, texts
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, numbers: range, seed: int, say) -> None:
        """The requests with these numbers, AT_ONCE at a time; say now and then how far it is."""
        waiting = iter(numbers)

        async def client() -> None:
            for number in waiting:
                if number and number % 1000 == 0:
                    say(f"request {number}: {self.server.state()['bytes'] >> 20} MiB")
                draw = random.Random(f"{seed} {number}")
                kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
                try:
                    async with asyncio.timeout(PATIENCE):
                        outcome = await getattr(self, kind)(draw)
                except (AssertionError, OSError, ValueError, TimeoutError) as error:
                    self.failures.append(f"request {number}, {kind}: {type(error).__name__}: {error}")
                    outcome = "lost or wrong"
                self.outcomes[f"{kind}: {outcome}"] += 1

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    def fields(self, draw: random.Random, **own) -> dict:
        """A random request whose texts are known."""
        n = draw.randint(1, MOST_CHOICES)
        fields = {"prompt": draw.choice(PROMPTS), "seed": draw.randrange(SEEDS - n), "n": n}
        return fields | {"max_tokens": draw.randint(1, LENGTH), "part": draw.choice(PARTS)} | own

    def check(self, fields: dict, body: bytes) -> None:
        """Compare the texts of an answer with the command line's."""
        found = choices(body, bool(fields.get("stream")))
        assert sorted(found) == list(range(fields["n"])), "a choice is missing"
        for number, text in found.items():
            expected = self.texts[fields["prompt"], fields["seed"] + number][: fields["max_tokens"]]
            assert text == expected, f"{text!r} is not {expected!r}"

    async def answered(self, draw: random.Random, fields: dict, **reading) -> str:
        """Ask until it is answered; compare the texts."""
        busy = False
        while True:
            status, body = parse(await exchange(self.port, request(fields), **reading))
            if status != 429:
                assert status == 200, f"status {status}: {body[:300]!r}"
                self.check(fields, body)
                return "right, after 429" if busy else "right"
            busy = True
            await asyncio.sleep(draw.uniform(0.5, 1.5) * RETRY_SECONDS)

    async def whole(self, draw: random.Random) -> str:
        """One answer."""
        return await self.answered(draw, self.fields(draw))

    async def stream(self, draw: random.Random) -> str:
        """A stream that is read as it comes."""
        options = {"interval_ms": draw.choice([0, 16, 100])}
        return await self.answered(draw, self.fields(draw, stream=True, stream_options=options))

    async def slow(self, draw: random.Random) -> str:
        """A stream that is read in small pieces, with pauses."""
        fields = self.fields(draw, stream=True, stream_options={"interval_ms": 0}, n=1)
        return await self.answered(draw, fields, pause=draw.uniform(0.005, 0.05), buffer=4096)

    async def deaf(self, draw: random.Random) -> str:
        """A long stream that nobody reads for seconds; the server may drop it."""
        fields = {"prompt": "a" * 100, "max_tokens": 3000, "stream": True, "logprobs": 5, "context": "reset"}
        loop = asyncio.get_running_loop()
        with await connect(self.port, 4096) as connection:
            await loop.sock_sendall(connection, request(fields | {"stream_options": {"interval_ms": 0}}))
            await asyncio.sleep(draw.uniform(*DEAF_SECONDS))
            data = b""
            try:
                while new := await loop.sock_recv(connection, 1 << 16):
                    data += new
                status, body = parse(data)
                if status == 429:
                    return "429"
                assert len(choices(body, True)[0]) == 3000
                return "right"
            except (ConnectionError, ValueError):
                return "dropped"

    async def leave(self, draw: random.Random) -> str:
        """Leave at once, in the queue or in the middle, in order or by a reset."""
        fields = self.fields(draw, stream=draw.random() < 0.6, max_tokens=draw.choice([LENGTH, 20_000]))
        sent = request(fields)
        loop = asyncio.get_running_loop()
        with await connect(self.port) as connection:
            end = draw.choice([40, len(sent) - 5, len(sent), len(sent)])
            await loop.sock_sendall(connection, sent[:end])
            if draw.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(draw.choice([0, draw.uniform(0, 0.02), draw.uniform(0, 0.3)]))
        return "left"

    async def bad(self, draw: random.Random) -> str:
        """What is refused, each by its own status."""
        body, expected = draw.choice(BAD)
        sent = head("/v1/completions", len(body)) + body
        wrong = [
            (sent, expected),
            (sent, expected),
            (NOTHING, 404),
            (head("/v1/completions", 0, "GET"), 405),
            (head("/v1/models", 0, "GET", "evil.example"), 403),
            (bytes(draw.randrange(128, 256) for _ in range(100)) + b"\r\n\r\n", 400),
        ]
        sent, expected = draw.choice(wrong)
        status, body = parse(await exchange(self.port, sent))
        assert status == expected, f"status {status} for {sent[:200]!r}"
        return f"refused by {status}"

    async def killed(self, draw: random.Random) -> str:
        """A process with several requests that is killed while it reads them."""
        command = [sys.executable, __file__, "--victim", str(self.port), "--seed", str(draw.randrange(10**6))]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout
        try:
            assert await child.stdout.readline() == b"sent\n"
            await asyncio.sleep(draw.uniform(0, 0.3))
        finally:
            child.kill()
            await child.wait()
        return "killed"


def victim(port: int, seed: int) -> None:
    """Send requests, and wait to be killed."""
    draw = random.Random(seed)
    connections = []
    for _ in range(VICTIM_REQUESTS):
        connections.append(socket.create_connection(("127.0.0.1", port)))
        fields = {"prompt": "a" * draw.randint(1, 128), "max_tokens": draw.choice([50, 20_000])}
        connections[-1].sendall(request(fields | {"stream": draw.random() < 0.6}))
    print("sent", flush=True)
    time.sleep(10)


def command_line_texts() -> dict[tuple[str, int], str]:
    """The texts of each prompt and seed, by gpt.py --inference with OpenAI's defaults."""
    texts = {}
    for prompt in PROMPTS:
        command = [sys.executable, str(ROOT / "gpt.py"), "part4", "--inference", "-m", MODEL, "--json"]
        command += ["--prompt", prompt, "--seed", "0", "--num-samples", str(SEEDS)]
        command += ["--max-new-tokens", str(LENGTH), "--temperature", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            sample = json.loads(line)
            texts[prompt, sample["seed"]] = sample["text"]
    return texts


def told(requests: int, state: dict[str, int]) -> str:
    size = state["bytes"] >> 20
    return f"after {requests} requests: {size} MiB, {state['task']} threads, {state['fd']} files"


async def soak(server: Server, requests: int, seed: int) -> list[str]:
    """Run the requests; return what is wrong."""
    say = functools.partial(print, flush=True)
    clients = Soak(server, command_line_texts())
    warm = max(requests // 10, 1)
    start = time.perf_counter()
    await clients.run(range(warm), seed, say)
    for part in set(PARTS):  # every engine is open from here on
        await clients.answered(random.Random(0), clients.fields(random.Random(0), part=part))
    await server.idle()
    await exchange(server.port, NOTHING)
    before = server.state()
    say(told(warm, before))
    await clients.run(range(warm, requests), seed, say)
    await server.idle()
    # A file of the last request may end a little later. If the page is built, threads of AnyIO look for its
    # files: one that was idle for 10 s ends with the next look.
    for _ in range(int(PATIENCE / 0.1)):
        await exchange(server.port, NOTHING)
        after = server.state()
        if all(after[name] <= before[name] for name in ("task", "fd")):
            break
        await asyncio.sleep(0.1)
    say(told(requests, after))
    seconds = time.perf_counter() - start
    for outcome, count in sorted(clients.outcomes.items()):
        say(f"{count:6} {outcome}")
    wrong = clients.failures
    if after["bytes"] > GROWTH * before["bytes"]:
        wrong.append(f"memory grew from {before['bytes']} to {after['bytes']} bytes")
    # PyTorch opens threads and files of its own when a part is first used
    for name in ("task", "fd"):
        if after[name] > before[name]:
            wrong.append(f"{name}: {before[name]} became {after[name]}")
    if failed := await server.metric("attention_requests_refused_total", 'status="500"'):
        wrong.append(f"{failed:.0f} answers were 500")
    counted = [await server.metric(f"attention_texts_{name}_total") for name in ("finished", "cancelled")]
    dropped = await server.metric("attention_streams_dropped_total")
    say("the server counts {:.0f} texts finished, {:.0f} cancelled".format(*counted))
    if dropped != (seen := clients.outcomes["deaf: dropped"]):
        wrong.append(f"{dropped:.0f} streams were dropped, {seen} clients saw it")
    wrong += await slots_left(server)
    say(f"{requests} requests in {seconds:.0f} s, {len(wrong)} lost or wrong")
    return wrong


async def slots_left(server: Server) -> list[str]:
    """Whether every slot can still be used at once."""
    fields = {"prompt": "a" * 128, "max_tokens": 16_000, "n": SLOTS, "stream": True}
    with await connect(server.port) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, request(fields))
        for _ in range(int(PATIENCE / 0.05)):
            running = await server.metric("attention_texts_running")
            if running == SLOTS:
                break
            await asyncio.sleep(0.05)
    await server.idle()
    return [] if running == SLOTS else [f"only {running:.0f} of {SLOTS} slots run"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--victim", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.victim:
        victim(given.victim, given.seed)
        return
    server = Server()
    try:
        wrong = asyncio.run(soak(server, given.requests, given.seed))
    finally:
        said = server.end()
    if unexpected := [line for line in said.splitlines() if line and SAID not in line]:
        wrong.append("the server said " + "\n".join(unexpected[-40:]))
    for each in wrong[:20]:
        print(each)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
