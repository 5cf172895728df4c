"""Many requests of all kinds at a server: none is lost, none is wrong, and nothing is left behind.

    python benchmarks/soak.py [--requests 10000] [--clients 40]

Of ten requests, five are read to the end and compared with what the server wrote alone; two clients leave in
the middle, one of them by a reset connection; one reads nothing for a while; two are no valid requests.
Memory and threads of the server are compared between the end of the first fifth and the end of all.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import sys
from collections import Counter
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first, where a module could hide a package.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from benchmarks.http_client import connect  # noqa: E402
from benchmarks.serving import CORES, Process, own_command  # noqa: E402

PATH = "/v1/completions"
WAYS = ("read",) * 5 + ("leave", "reset", "slow", "bad", "bad")
BAD: tuple[dict, ...] = (
    {"temperature": "hot"},
    {"prompt": "#"},
    {"x": 1},
    {"n": 0},
    {"model": "none"},
    {"prompt": []},
)
PROMPTS = [f"{name}:\n" for name in ("ROMEO", "JULIET", "DUKE VINCENTIO", "A")]
SAME = 40  # different texts that are read to the end
TEXT = re.compile(rb'"text":("(?:[^"\\]|\\.)*")')


def body(model: str, number: int) -> dict:
    """A request whose text is decided by number % SAME."""
    number %= SAME
    tokens = 5 + number * 7 % 150
    return {"model": model, "prompt": PROMPTS[number % len(PROMPTS)], "seed": number, "max_tokens": tokens}


def text_of(data: bytes) -> str:
    """The text of a stream."""
    return "".join(json.loads(found) for found in TEXT.findall(data))


def raw(fields: dict) -> bytes:
    """A streaming request's bytes."""
    content = json.dumps(fields | {"stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def one(port: int, model: str, number: int, expected: dict[int, str], found: Counter[str]) -> None:
    """A request of one of the ways; count its outcome."""
    draw = random.Random(number)
    way = draw.choice(WAYS)
    if way in ("read", "bad"):
        connection = await connect(port)
        assert connection.transport
        fields = body(model, number) | (draw.choice(BAD) if way == "bad" else {})
        answer = await connection.stream(PATH, fields)
        connection.transport.close()
        right = (
            answer.status in (400, 404) if way == "bad" else text_of(answer.data) == expected[number % SAME]
        )
        found[way if right else f"{way}, wrong"] += 1
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(raw(body(model, number) | {"max_tokens": 3000, "context": "reset"}))
    await asyncio.sleep(draw.random() * 0.05)
    if way == "slow":
        await asyncio.sleep(0.5)
    elif draw.random() < 0.5:
        await reader.read(100)
    if way == "reset":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()
    found[way] += 1


async def soak(
    port: int, model: str, first: int, last: int, clients: int, expected: dict[int, str]
) -> Counter:
    """Requests `first` to `last`, at most `clients` at a time; their outcomes."""
    found: Counter[str] = Counter()
    numbers = iter(range(first, last))

    async def client() -> None:
        for number in numbers:
            try:
                await asyncio.wait_for(one(port, model, number, expected, found), 60)
            except (OSError, TimeoutError) as error:
                found[f"lost: {error!r}"] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def alone(port: int, model: str) -> dict[int, str]:
    """The texts as the server writes them alone."""
    connection = await connect(port)
    return {i: text_of((await connection.stream(PATH, body(model, i))).data) for i in range(SAME)}


async def left(port: int) -> float:
    """Texts that run or wait, once that is 0 or ten seconds are over."""
    total = -1.0
    for _ in range(100):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        gauges = re.findall(r"^attention_texts_(?:running|queued)\{.*\} (\S+)$", page, re.M)
        if not (total := sum(map(float, gauges))):
            break
        await asyncio.sleep(0.1)
    return total


def threads(server: Process) -> int:
    """Threads of the server."""
    return len(list(Path(f"/proc/{server.child.pid}/task").iterdir()))


@click.command()
@click.option("-m", "--model", default="shakes128", show_default=True)
@click.option("--requests", type=click.IntRange(10), default=10_000, show_default=True)
@click.option("--clients", type=click.IntRange(1, 1000), default=40, show_default=True)
def main(model: str, requests: int, clients: int) -> None:
    """Print the outcomes, and the server's memory and threads. The exit code is 1 if one is wrong."""
    server = Process(own_command(model, 0, 32), CORES[0], "Ready")
    port = int(re.findall(r":(\d+)$", server.said, re.M)[0])
    expected = asyncio.run(alone(port, model))
    fifth = requests // 5
    found = asyncio.run(soak(port, model, 0, fifth, clients, expected))
    asyncio.run(left(port))
    memory, count = server.memory(), threads(server)
    found += asyncio.run(soak(port, model, fifth, requests, clients, expected))
    remaining = asyncio.run(left(port))
    growth = server.memory() / memory - 1
    for outcome, times in sorted(found.items()):
        click.echo(f"{outcome}: {times}")
    click.echo(
        f"memory {memory / 2**20:.0f} MiB, then {growth:+.1%}; threads {count}, then {threads(server)}"
    )
    click.echo(f"texts left in the server: {remaining:.0f}")
    wrong = [name for name in found if "," in name or "lost" in name]
    same = sum(found.values()) == requests and threads(server) <= count and not remaining
    server.end()
    if wrong or not same or growth > 0.05:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
