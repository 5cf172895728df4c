"""The page in Chromium against the native engine compiled for SSE: tokens per second of one text.

    npm install --prefix tests/web && python -m benchmarks.web

Both run on one core and take turns, after their texts have been compared: they must be the same. The page's
time includes the messages of its worker with all logits. WebAssembly has vectors of 128 bits, as SSE has.
A figure is the median of the rounds.
"""

import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from benchmarks.measuring import QUIET, percent, quiet, show_table, take_turns, write
from benchmarks.servers import Process
from shakespeare.app.cli.options import choice, set_threads, whole
from shakespeare.attention_ext import processor
from shakespeare.attention_ext.build import toolchain
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.model import load
from shakespeare.model.checkpoint import SHIPPED
from shakespeare.web import build, serve

TEXTS = 8  # of one measurement
MARCH = "x86-64-v2"  # of the native engine: SSE4.2, whose vectors are as wide as WebAssembly's


def compile_for(march: str) -> None:
    """Let this process compile its extension for the processor that -march names."""
    flags = (f"-march={march}" if flag == toolchain.NATIVE else flag for flag in toolchain.FLAGS)
    setattr(toolchain, "FLAGS", tuple(flags))


@click.command(context_settings={"show_default": True})
@choice("-m", "--model", "The model.", of=SHIPPED, default="shakes256")
@choice("--weights", "Precision of the weights.", of=("fp32", "bf16"))
@whole("--core", "Core of both.", least=0, default=0)
@whole("--rounds", "Rounds of each.", least=2, default=15)
def main(model: str, weights: str, core: int, rounds: int) -> None:
    """Print tokens per second of the page and of the native engine."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not program or not shutil.which("node"):
        raise click.ClickException("chromium and node are needed; CHROMIUM can name the browser")
    folder = build.make()
    compile_for(MARCH)
    os.sched_setaffinity(0, {core})  # the browser's processes inherit it
    set_threads(1)
    engine = open_engine(load(model), "native", simd="portable", weights=weights, draft="off")
    count = engine.config.block_size - 1

    def own(seed: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        (tokens,) = write(engine, [Request([0], seed=seed, max_new_tokens=count)])
        return time.perf_counter() - start, tokens

    def mean_seconds(run: Callable[[int], tuple[float, list[int]]]) -> float:
        run(0)  # wakes it
        return statistics.mean(run(seed)[0] for seed in range(TEXTS))

    native = f"native engine, {MARCH}"
    with serve.server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = {"program": program, "model": model, "weights": weights}
        asked["home"] = f"http://127.0.0.1:{server.server_address[1]}/"
        page = Process(["node", str(Path(__file__).with_suffix(".mjs")), json.dumps(asked)], core, ready="{")
        facts = json.loads(page.said)

        def by_page(seed: int) -> tuple[float, list[int]]:
            written = page.ask(json.dumps({"seed": seed}))
            return written["seconds"], written["ids"]

        if any(by_page(seed)[1] != own(seed)[1] for seed in range(TEXTS)):
            raise click.ClickException("the page writes another text, so nothing is timed")
        contenders = {"page": partial(mean_seconds, by_page), native: partial(mean_seconds, own)}
        failed: dict[str, str] = {}
        seconds = take_turns(contenders, rounds, failed)
        page.end()
        server.shutdown()
    browser = f"{facts['browser']}, {facts['build']} build"
    click.echo(f"{processor.name()}; {browser}; {model}, {weights}, texts of {count} tokens, one core\n")
    medians = {name: times.median for name, times in seconds.items()}
    lines = (
        f"{name} | {count / median:,.0f} | {percent(seconds[name].spread)} "
        f"| {percent(medians[native] / median) if native in medians else ''} | {quiet(seconds[name])}"
        for name, median in medians.items()
    )
    show_table(f"engine | tokens/s | spread | of the native engine | {QUIET}", lines, failed)


if __name__ == "__main__":
    main()
