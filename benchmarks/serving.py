"""The server against its own engine and llama.cpp's server: 32 streams, one stream, time to the first token.

    python -m benchmarks.serving [-m shakes256] [--rounds 5] [--streams 32]

llama-server must be in the PATH; scripts/build-llama-server.sh builds it. Without it, or if a server fails, a
row says so. The servers and the engine are pinned to the first core and take turns, round by round; the
client has the last one. `usage` counts the tokens. A ratio is that of two medians, printed per second and per
CPU second; on a shared machine the latter is more reliable.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shakespeare.attention_ext import processor

processor.let_waiting_threads_sleep()  # before torch is imported, for the engine's process

import torch  # noqa: E402

from benchmarks.measuring import attempt, show_table, write  # noqa: E402
from benchmarks.servers import CORES, LLAMA, OWN, PROMPT, Client, Process, start  # noqa: E402
from shakespeare.app.cli.options import option, whole  # noqa: E402
from shakespeare.generation.engines.table import open_engine  # noqa: E402
from shakespeare.generation.request import Request  # noqa: E402
from shakespeare.generation.sampling import Sampling  # noqa: E402
from shakespeare.generation.texts import complete  # noqa: E402
from shakespeare.generation.writer import Writer  # noqa: E402
from shakespeare.model import load  # noqa: E402

EACH = 6  # texts of a stream in a round
OTHERS, PROMPT_TOKENS, PROBES = 8, 200, 100


def engine(model: str) -> None:
    """Answer each line 'STREAMS TEXTS TOKENS' by the engine's own time for this many texts in batches."""
    torch.set_num_threads(1)
    checkpoint = load(model)
    opened = open_engine(checkpoint, slots=33)
    ids, sampling = checkpoint.tokenizer.encode(PROMPT), Sampling(1.0, None)
    print("Ready", flush=True)
    for line in sys.stdin:
        streams, texts, tokens = map(int, line.split())
        requests = [Request(ids, seed=i, sampling=sampling, max_new_tokens=tokens) for i in range(texts)]
        start, used = time.perf_counter(), time.process_time()
        if streams == 1:  # as the command line writes one text
            for _ in complete(Writer(opened, 1), checkpoint.tokenizer, requests):
                pass
        else:
            for at in range(0, texts, streams):
                write(opened, requests[at : at + streams])
        seconds, used = time.perf_counter() - start, time.process_time() - used
        print(json.dumps({"tokens": texts * tokens, "seconds": seconds, "cpu": used}), flush=True)


@dataclass(frozen=True)
class Asked:
    """What is asked of each server: texts of `tokens` tokens."""

    model: str
    tokens: int
    rounds: int
    streaming: bool

    def body(self, **settings: Any) -> dict[str, Any]:
        """A request for a text."""
        return {"model": self.model, "prompt": PROMPT, "max_tokens": self.tokens} | settings


async def ask(port: int, asked: Asked, count: int, texts: int) -> dict:
    """`texts` texts in turn over each of `count` connections at once."""

    async def one(number: int, client: Client) -> None:
        for i in range(texts):
            body = asked.body(seed=number + i * count)
            answer = await (client.stream if asked.streaming else client.ask)("/v1/completions", body)
            if answer.status != 200 or answer.tokens != asked.tokens:
                raise click.ClickException(f"a stream gave {answer.tokens} tokens: {answer.data[-300:]!r}")
        client.close()

    start, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number, Client(port)) for number in range(count)))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return {"tokens": count * texts * asked.tokens, "seconds": seconds, "client": used / seconds}


async def first_tokens(port: int, asked: Asked) -> tuple[list[float], float]:
    """Seconds to the first token of PROBES prompts, one after the other, while OTHERS texts are written."""
    ending = asyncio.Event()
    characters = "abcdefghijklmnopqrstuvwxyz \n"

    async def other(number: int) -> None:
        client = Client(port)
        while not ending.is_set():
            await client.stream("/v1/completions", asked.body(seed=number))
        client.close()

    others = [asyncio.create_task(other(i)) for i in range(OTHERS)]
    await asyncio.sleep(0.3)
    prober, seconds = Client(port), []
    start, used = time.perf_counter(), time.process_time()
    for i in range(PROBES):
        prompt = "".join(random.Random(i).choices(characters, k=PROMPT_TOKENS))
        answer = await prober.stream("/v1/completions", asked.body(prompt=prompt, max_tokens=2))
        seconds.append(answer.first)
        await asyncio.sleep(random.Random(i).uniform(0.005, 0.02))
    share = (time.process_time() - used) / (time.perf_counter() - start)
    prober.close()
    ending.set()
    await asyncio.gather(*others)
    return seconds, share


def compare(
    own: Process, servers: dict[str, Process], asked: Asked, count: int, failed: dict[str, str]
) -> Iterator[str]:
    """A row for each server: `count` texts at once over an engine's batch of them. failed: see attempt()."""
    texts = EACH if count > 1 else 4 * EACH
    alone: list[dict] = []
    served: dict[str, list[dict]] = {name: [] for name in servers}
    for _ in range(asked.rounds + 1):  # the first one warms up
        alone.append(own.ask(f"{count} {count * texts} {asked.tokens}"))
        for name, server in servers.items():
            if name in failed:
                continue
            before = server.cpu_seconds()
            if run := attempt(failed, name, lambda: asyncio.run(ask(server.port, asked, count, texts))):
                served[name].append(run | {"cpu": server.cpu_seconds() - before})

    def rate(runs: list[dict], by: str) -> float:
        return statistics.median(run["tokens"] / max(run[by], 1e-9) for run in runs[1:])

    for name, runs in served.items():
        if name in failed:
            continue
        over = [f"{rate(runs, by) / rate(alone, by):.0%}" for by in ("seconds", "cpu")]
        ours = runs if OWN in failed else served[OWN]
        faster = [rate(ours, by) / rate(runs, by) for by in ("seconds", "cpu")]
        client = statistics.median(run["client"] for run in runs[1:])
        yield (
            f"{name} | {count} | {rate(runs, 'seconds'):,.0f} | {' | '.join(over)} "
            f"| {faster[0]:.2f} ({faster[1]:.2f}) | {client:.0%}"
        )


@click.command()
@option("-m", "--model", "The model.", default="shakes256", show_default=True)
@whole("--streams", "Texts at once.", most=512, default=32, show_default=True)
@whole("--tokens", "Tokens of each text.", least=2, default=240, show_default=True)
@option("--stream/--no-stream", "streaming", "Stream the answers.", default=True)
@whole("--rounds", "Rounds of each.", default=5, show_default=True)
@option("--engine", "as_engine", "Be the engine's process.", is_flag=True, hidden=True)
def main(streams: int, as_engine: bool, **settings: Any) -> None:
    """Print the servers' speeds relative to the engine's, and their times to the first token."""
    asked = Asked(**settings)
    if as_engine:
        return engine(asked.model)
    core = CORES[0]  # the servers'
    os.sched_setaffinity(0, {CORES[-1]})
    name = processor.microarchitecture() or processor.name()
    load = f"load average {os.getloadavg()[0]:.1f}"
    click.echo(f"{name}; {asked.model}, texts of {asked.tokens} tokens, {load}")
    with contextlib.ExitStack() as ends, tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "benchmarks.serving", "--engine", "-m", asked.model]
        own = Process(program, core, "Ready")
        ends.callback(own.end)
        servers, failed = dict[str, Process](), dict[str, str]()
        for name in (OWN, LLAMA):
            if server := attempt(failed, name, start, name, asked.model, streams, core, Path(folder)):
                servers[name] = server
                ends.callback(server.end)
        click.echo()
        rows = (compare(own, servers, asked, count, failed) for count in (streams, 1))
        titles = "server | at once | tokens/s | of the engine's | per CPU second | own is | client"
        show_table(titles, itertools.chain.from_iterable(rows), failed)
        click.echo(f"\nFirst token with {OTHERS} others, prompt of {PROMPT_TOKENS}:")
        for name, server in servers.items():
            probed = attempt(failed, name, lambda: asyncio.run(first_tokens(server.port, asked)))
            if probed is None:
                click.echo(f"{name}: {failed[name]}")
                continue
            seconds, client = probed
            median, late = statistics.median(seconds), sorted(seconds)[int(0.99 * len(seconds)) - 1]
            times = f"median {1e3 * median:.1f} ms, 99th of {PROBES} {1e3 * late:.1f} ms"
            click.echo(f"{name}: {times}, client {client:.0%}")


if __name__ == "__main__":
    main()
