"""The page in Chromium against the native engine compiled for SSE: tokens per second of one text.

    npm install --prefix tests/web && python -m benchmarks.web [--march x86-64]

Both run on one core and take turns, after their texts have been compared: they must be the same. The page's
time includes the messages of its worker with all logits. WebAssembly has vectors of 128 bits, as SSE has.
A figure is the median of the rounds. At the end, Chromium emulates first visits over slow lines, with bf16.
The time that the line alone needs for their bytes stands beside them; both are medians.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from app.cli.options import choice, set_threads
from attention_ext import processor
from attention_ext.build import toolchain
from benchmarks.measuring import percent, show_table, spread, take_turns, write
from generation.engine import open_engine
from generation.writer import Request
from model import load
from model.checkpoint import SHIPPED
from web import build, serve

TEXTS = 8  # of one measurement
VISITS = 5  # over each line
# Mbit/s, and milliseconds of a round trip: a mobile line, and Lighthouse's slow 4G.
LINES = ((10, 40), (1.6, 150))


class Page:
    """The page in Chromium, by web.mjs."""

    def __init__(self, home: str, program: str, model: str, weights: str) -> None:
        asked = {"home": home, "program": program, "model": model, "weights": weights}
        given = json.dumps(asked | {"lines": LINES, "visits": VISITS})
        script = str(Path(__file__).with_suffix(".mjs"))
        self.process = subprocess.Popen(
            ["node", script, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self.answer()

    def answer(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("the page did not answer; its error is above")
        return json.loads(line)

    def write(self, seed: int) -> tuple[float, list[int]]:
        """Seconds, and the tokens of a text of a whole block."""
        assert self.process.stdin
        print(json.dumps({"seed": seed}), file=self.process.stdin, flush=True)
        made = self.answer()
        return made["seconds"], made["ids"]


def compile_for(march: str) -> None:
    """Let this process compile its extension for the processor that -march names."""
    native = toolchain.NATIVE
    flags = (f"-march={march}" if flag == native else flag for flag in toolchain.FLAGS)
    setattr(toolchain, "FLAGS", tuple(flags))


@click.command(context_settings={"show_default": True})
@choice("-m", "--model", "The model.", of=SHIPPED, default="shakes256")
@choice("--weights", "Precision of the weights.", of=("fp32", "bf16"))
@click.option("--march", default="x86-64-v2", help="-march of the native engine.")
@click.option("--core", type=click.IntRange(0), default=0, help="Core of both.")
@click.option(
    "--out", type=click.Path(file_okay=False), help="Folder of the page.", show_default="in the build cache"
)
@click.option("--rounds", type=click.IntRange(2), default=15, help="Rounds of each.")
def main(model: str, weights: str, march: str, core: int, out: str | None, rounds: int) -> None:
    """Print tokens per second of the page and of the native engine."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not program or not shutil.which("node"):
        raise click.ClickException("chromium and node are needed; CHROMIUM can name the browser")
    folder = Path(out) if out else build.default_folder()
    build.make(folder)
    compile_for(march)
    os.sched_setaffinity(0, {core})  # the browser's processes inherit it
    set_threads(1)
    engine = open_engine(load(model).model, "native", simd="portable", weights=weights)
    count = engine.config.block_size - 1

    def own(seed: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        (tokens,) = write(engine, [Request([0], seed, max_new_tokens=count)])
        return time.perf_counter() - start, tokens

    def mean_seconds(run: Callable[[int], tuple[float, list[int]]]) -> float:
        run(0)  # wakes it
        return statistics.mean(run(seed)[0] for seed in range(TEXTS))

    native = f"native engine, {march}"
    with serve.server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = Page(f"http://127.0.0.1:{server.server_address[1]}/", program, model, weights)
        if any(page.write(seed)[1] != own(seed)[1] for seed in range(TEXTS)):
            raise click.ClickException("the page writes another text, so nothing is timed")
        seconds = take_turns(
            {"page": partial(mean_seconds, page.write), native: partial(mean_seconds, own)}, rounds
        )
        page.process.communicate()
        server.shutdown()
    facts = f"{page.facts['browser']}, {page.facts['build']} build"
    click.echo(f"{processor.name()}; {facts}; {model}, {weights}, texts of {count} tokens, one core\n")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    show_table(
        "engine | tokens/s | spread | of the native engine",
        (
            f"{name} | {count / median:,.0f} | {percent(spread(seconds[name]))} "
            f"| {percent(medians[native] / median)}"
            for name, median in medians.items()
        ),
    )
    click.echo()
    titles = "a first visit's line | bytes | the line alone | until text shows"
    show_table(titles, map(visit_row, LINES, page.facts["first"]))


def visit_row(line: tuple[float, float], visits: list[dict]) -> str:
    """A row of the table of first visits."""
    speed, delay = line
    size, first = (statistics.median(visit[name] for visit in visits) for name in ("bytes", "milliseconds"))
    alone = 8 * size / (speed * 1e6)
    return f"{speed} Mbit/s, {delay} ms | {size:,.0f} | {alone:.2f} s | {first / 1e3:.2f} s"


if __name__ == "__main__":
    main()
