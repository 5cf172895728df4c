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
from functools import partial
from pathlib import Path

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
        requests = [
            Request(ids, seed=seed, sampling=sampling, max_new_tokens=tokens) for seed in range(texts)
        ]
        start, used = time.perf_counter(), time.process_time()
        if streams == 1:  # as the command line writes one text
            for _ in complete(Writer(opened, 1), checkpoint.tokenizer, requests):
                pass
        else:
            for at in range(0, texts, streams):
                write(opened, requests[at : at + streams])
        seconds, used = time.perf_counter() - start, time.process_time() - used
        print(json.dumps({"tokens": texts * tokens, "seconds": seconds, "cpu": used}), flush=True)


async def ask(port: int, model: str, count: int, each: int, tokens: int, streaming: bool) -> dict:
    """`each` texts in turn over each of `count` connections at once."""

    async def one(number: int, client: Client) -> None:
        for i in range(each):
            body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": number + i * count}
            answer = await (client.stream if streaming else client.ask)("/v1/completions", body)
            if answer.status != 200 or answer.tokens != tokens:
                raise click.ClickException(f"a stream gave {answer.tokens} tokens: {answer.data[-300:]!r}")
        client.close()

    start, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number, Client(port)) for number in range(count)))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return {"tokens": count * each * tokens, "seconds": seconds, "client": used / seconds}


async def first_tokens(port: int, model: str, tokens: int) -> tuple[list[float], float]:
    """Seconds to the first token of PROBES prompts, one after the other, while OTHERS texts are written."""
    ending = asyncio.Event()
    characters = "abcdefghijklmnopqrstuvwxyz \n"

    async def other(number: int) -> None:
        client = Client(port)
        while not ending.is_set():
            body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": number}
            await client.stream("/v1/completions", body)
        client.close()

    others = [asyncio.create_task(other(i)) for i in range(OTHERS)]
    await asyncio.sleep(0.3)
    prober, found = Client(port), []
    start, used = time.perf_counter(), time.process_time()
    for i in range(PROBES):
        prompt = "".join(random.Random(i).choices(characters, k=PROMPT_TOKENS))
        answer = await prober.stream("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 2})
        found.append(answer.first)
        await asyncio.sleep(random.Random(i).uniform(0.005, 0.02))
    share = (time.process_time() - used) / (time.perf_counter() - start)
    prober.close()
    ending.set()
    await asyncio.gather(*others)
    return found, share


def compare(
    own: Process,
    servers: dict[str, Process],
    model: str,
    count: int,
    rounds: int,
    tokens: int,
    streaming: bool,
    failed: dict[str, str],
) -> Iterator[str]:
    """A row for each server: `count` texts at once, relative to the engine's batch of as many.

    failed: servers that take no part, see attempt(); it gets more.
    """
    each = EACH if count > 1 else 4 * EACH
    alone: list[dict] = []
    served: dict[str, list[dict]] = {name: [] for name in servers}
    for _ in range(rounds + 1):  # the first one warms up
        alone.append(own.ask(f"{count} {count * each} {tokens}"))
        for name, server in servers.items():
            if name in failed:
                continue
            before = server.cpu_seconds()
            asked = (server.port, model, count, each, tokens, streaming)
            if run := attempt(failed, name, lambda: asyncio.run(ask(*asked))):
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
def main(
    model: str,
    streams: int,
    tokens: int,
    streaming: bool,
    rounds: int,
    as_engine: bool,
) -> None:
    """Print the servers' speeds relative to the engine's, and their times to the first token."""
    if as_engine:
        return engine(model)
    core = CORES[0]  # the servers'
    os.sched_setaffinity(0, {CORES[-1]})
    name = processor.microarchitecture() or processor.name()
    click.echo(f"{name}; {model}, texts of {tokens} tokens, load average {os.getloadavg()[0]:.1f}")
    with contextlib.ExitStack() as ends, tempfile.TemporaryDirectory() as folder:
        own = Process([sys.executable, "-m", "benchmarks.serving", "--engine", "-m", model], core, "Ready")
        ends.callback(own.end)
        servers, failed = dict[str, Process](), dict[str, str]()
        for each in (OWN, LLAMA):
            if server := attempt(failed, each, start, each, model, streams, core, Path(folder)):
                servers[each] = server
                ends.callback(server.end)
        click.echo()
        asked = (rounds, tokens, streaming, failed)
        rows = (compare(own, servers, model, each, *asked) for each in (streams, 1))
        titles = "server | at once | tokens/s | of the engine's | per CPU second | own is | client"
        show_table(titles, itertools.chain.from_iterable(rows), failed)
        click.echo(f"\nFirst token with {OTHERS} others, prompt of {PROMPT_TOKENS}:")
        for name, server in servers.items():
            probe = partial(first_tokens, server.port, model, tokens)
            probed = attempt(failed, name, lambda: asyncio.run(probe()))
            if probed is None:
                click.echo(f"{name}: {failed[name]}")
                continue
            found, client = probed
            median, late = statistics.median(found), sorted(found)[int(0.99 * len(found)) - 1]
            click.echo(
                f"{name}: median {1e3 * median:.1f} ms, 99th of {PROBES} {1e3 * late:.1f} ms, "
                f"client {client:.0%}"
            )


if __name__ == "__main__":
    main()
