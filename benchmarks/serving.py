"""The server against its own engine: throughput of 32 streams, one stream, and time to the first token.

    python benchmarks/serving.py [-m shakes256] [--rounds 5] [--streams 32] [--core N] [--client-core N]

The server and the engine are pinned to one core and take turns; the client has another. Tokens are counted by
`usage`. A ratio is that of two medians; on a machine that others use, the ratio per CPU second says more than
the one per second, and both are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first, where a module could hide a package.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from attention_ext import processor  # noqa: E402
from benchmarks.http_client import Connection, connect, cpu_seconds  # noqa: E402

PROMPT = "ROMEO:"
EACH = 6  # texts of a stream in a round
OTHERS, PROMPT_TOKENS, PROBES = 8, 200, 100
CORES = sorted(os.sched_getaffinity(0))
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contender:
    """A server that speaks OpenAI's API.

    command: of (model, port, streams), starts it; ready: what it prints when it answers, after its address.
    """

    name: str
    command: Callable[[str, int, int], Sequence[str]]
    ready: str


def own_command(model: str, port: int, slots: int) -> Sequence[str]:
    """gpt.py serve."""
    gpt = [sys.executable, str(ROOT / "gpt.py"), "serve", "-m", model, "--port", str(port)]
    return [*gpt, "--slots", str(slots), "--threads", "1"]


CONTENDERS = [Contender("gpt.py serve", own_command, "Ready")]


class Process:
    """A child process on one core."""

    def __init__(self, command: Sequence[str], core: int, ready: str) -> None:
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        self.said = ""
        self.read_until(ready)

    def read_until(self, text: str) -> str:
        """Read lines until one that contains a text; return it."""
        assert self.child.stdout
        for line in self.child.stdout:
            self.said += line
            if text in line:
                return line
        raise RuntimeError(f"the process ended: {self.said}")

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> int:
        """Its resident bytes."""
        return int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def ask(self, question: str) -> dict:
        """Send a line, read a line of JSON."""
        assert self.child.stdin
        self.child.stdin.write(question + "\n")
        self.child.stdin.flush()
        return json.loads(self.read_until("{"))

    def end(self) -> None:
        """End it as a service manager does."""
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(20)


def engine(model: str) -> None:
    """Answer each line 'STREAMS TEXTS TOKENS' by the engine's own time for so many texts in batches."""
    processor.let_waiting_threads_sleep()
    import torch

    from generation.engine import open_engine
    from generation.generate import complete
    from generation.sampling import Sampling
    from generation.writer import Request, Writer
    from model import load

    torch.set_num_threads(1)
    checkpoint = load(model)
    opened = open_engine(checkpoint.model, slots=33)
    ids, sampling = checkpoint.tokenizer.encode(PROMPT), Sampling(1.0, None)
    print("Ready", flush=True)
    for line in sys.stdin:
        streams, texts, tokens = map(int, line.split())
        requests = (Request(ids, seed, sampling, tokens) for seed in range(texts))
        start, used = time.perf_counter(), time.process_time()
        written = 0
        if streams == 1:  # as the command line writes one text
            for completion, piece in complete(Writer(opened, 1), checkpoint.tokenizer, requests):
                written += completion.new_tokens if not piece else 0
        else:
            writer = Writer(opened, streams)
            for _ in range(texts // streams):
                batch = [writer.join(next(requests)) for _ in range(streams)]
                while any(text.remaining for text in batch):
                    written += sum(len(new) for _, new in writer.step())
                for text in batch:
                    writer.leave(text)
        seconds, used = time.perf_counter() - start, time.process_time() - used
        print(json.dumps({"tokens": written, "seconds": seconds, "cpu": used}), flush=True)


async def streams(port: int, model: str, count: int, each: int, tokens: int) -> dict:
    """`each` texts in turn over each of `count` connections at once."""
    connections = [await connect(port) for _ in range(count)]

    async def one(number: int, connection: Connection) -> int:
        written = 0
        for i in range(each):
            body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": number + i * count}
            answer = await connection.stream("/v1/completions", body)
            if answer.status != 200 or answer.tokens != tokens:
                raise click.ClickException(f"a stream gave {answer.tokens} tokens: {answer.data[-300:]!r}")
            written += answer.tokens
        return written

    start, used = time.perf_counter(), cpu_seconds()
    written = sum(await asyncio.gather(*(one(i, c) for i, c in enumerate(connections))))
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    for connection in connections:
        assert connection.transport
        connection.transport.close()
    return {"tokens": written, "seconds": seconds, "client": used / seconds}


async def first_tokens(port: int, model: str, tokens: int) -> tuple[list[float], float]:
    """Seconds to the first token of PROBES prompts, one after the other, while OTHERS texts are written."""
    ending = asyncio.Event()
    characters = "abcdefghijklmnopqrstuvwxyz \n"

    async def other(number: int) -> None:
        connection = await connect(port)
        while not ending.is_set():
            body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": number}
            await connection.stream("/v1/completions", body)

    others = [asyncio.create_task(other(i)) for i in range(OTHERS)]
    await asyncio.sleep(0.3)
    connection, found = await connect(port), []
    start, used = time.perf_counter(), cpu_seconds()
    for i in range(PROBES):
        prompt = "".join(random.Random(i).choices(characters, k=PROMPT_TOKENS))
        answer = await connection.stream(
            "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 2}
        )
        found.append(answer.first)
        await asyncio.sleep(random.Random(i).uniform(0.005, 0.02))
    share = (cpu_seconds() - used) / (time.perf_counter() - start)
    ending.set()
    await asyncio.gather(*others)
    return found, share


def compare(
    own: Process, server: Process, port: int, model: str, count: int, rounds: int, tokens: int
) -> None:
    """Print a row: `count` streams against the engine's batch of as many."""
    each = EACH if count > 1 else 4 * EACH
    alone, served = [], []
    for _ in range(rounds + 1):  # the first one warms up
        alone.append(own.ask(f"{count} {count * each} {tokens}"))
        before = server.cpu_seconds()
        served.append(asyncio.run(streams(port, model, count, each, tokens)))
        served[-1]["cpu"] = server.cpu_seconds() - before

    def rate(runs: list[dict], by: str) -> float:
        return statistics.median(run["tokens"] / max(run[by], 1e-9) for run in runs[1:])

    ratios = [rate(served, by) / rate(alone, by) for by in ("seconds", "cpu")]
    client = statistics.median(run["client"] for run in served[1:])
    click.echo(
        f"| {count} | {rate(alone, 'seconds'):,.0f} | {rate(served, 'seconds'):,.0f} "
        f"| {ratios[0]:.0%} | {ratios[1]:.0%} | {client:.0%} |"
    )


@click.command()
@click.option("-m", "--model", default="shakes256", show_default=True)
@click.option("--streams", "count", type=click.IntRange(2, 512), default=32, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=240, show_default=True, help="Of each text.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--core", type=click.IntRange(0), default=CORES[0], help="Of server and engine; the first.")
@click.option("--client-core", type=click.IntRange(0), default=CORES[-1], help="The last, unless given.")
@click.option("--engine", "as_engine", is_flag=True, hidden=True)
def main(
    model: str, count: int, tokens: int, rounds: int, core: int, client_core: int, as_engine: bool
) -> None:
    """Print the server's speed relative to its engine's, and the time to the first token."""
    if as_engine:
        engine(model)
        return
    os.sched_setaffinity(0, {client_core})
    name = processor.microarchitecture() or processor.name()
    click.echo(f"{name}; {model}, texts of {tokens} tokens, load average {os.getloadavg()[0]:.1f}\n")
    command = [sys.executable, __file__, "--engine", "-m", model]
    own = Process(command, core, "Ready")
    for contender in CONTENDERS:
        server = Process(contender.command(model, 0, count), core, contender.ready)
        port = int(re.findall(r":(\d+)$", server.said, re.M)[0])
        click.echo(
            f"| {contender.name} | engine, tokens/s | server, tokens/s | ratio | per CPU second | client |"
        )
        click.echo("|---" * 6 + "|")
        compare(own, server, port, model, count, rounds, tokens)
        compare(own, server, port, model, 1, rounds, tokens)
        found, client = asyncio.run(first_tokens(port, model, tokens))
        median, late = statistics.median(found), sorted(found)[int(0.99 * len(found)) - 1]
        click.echo(
            f"\nFirst token with {OTHERS} others, prompt of {PROMPT_TOKENS}: median {1e3 * median:.1f} ms, "
            f"99th of {PROBES} {1e3 * late:.1f} ms, client {client:.0%}"
        )
        server.end()
    own.child.kill()
    own.child.wait()


if __name__ == "__main__":
    main()
