"""The page in Chromium against the native engine compiled for SSE: tokens per second of one text.

    npm install --prefix tests/web && python benchmarks/web.py [--march x86-64]

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
import sys
import threading
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
# A script's own folder comes first on the path; a file there would hide a package of its name.
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "benchmarks"))]

from app.cli.options import set_threads  # noqa: E402
from attention_ext import processor  # noqa: E402
from attention_ext.build import toolchain  # noqa: E402
from generation.engine import Engine, open_engine  # noqa: E402
from generation.writer import Request, Writer  # noqa: E402
from model import load  # noqa: E402
from model.checkpoint import SHIPPED  # noqa: E402
from web import build, serve  # noqa: E402

TEXTS = 8  # of one measurement
VISITS = 5  # over each line
LINES = (
    (10, 40),
    (1.6, 150),
)  # Mbit/s, and milliseconds of a round trip: a mobile line, and Lighthouse's slow 4G


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


def write(engine: Engine, seed: int) -> tuple[float, list[int]]:
    """Seconds, and the tokens of a text of a whole block."""
    start, tokens = time.perf_counter(), []
    writer = Writer(engine, 1)
    writer.join(Request([0], seed, max_new_tokens=engine.config.block_size - 1))
    while written := writer.step():
        tokens += [token for _, each in written for token in each]
    return time.perf_counter() - start, tokens


def compile_for(march: str) -> None:
    """Let this process compile its extension for the processor that -march names."""
    native = toolchain.NATIVE
    flags = (f"-march={march}" if flag == native else flag for flag in toolchain.FLAGS)
    setattr(toolchain, "FLAGS", tuple(flags))


@click.command()
@click.option("-m", "--model", type=click.Choice(SHIPPED), default="shakes256", show_default=True)
@click.option("--weights", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--march", default="x86-64-v2", show_default=True, help="-march of the native engine.")
@click.option("--core", type=click.IntRange(0), default=0, show_default=True, help="Core of both.")
@click.option(
    "--out", type=click.Path(file_okay=False), help="Folder of the page.  [default: in the build cache]"
)
@click.option("--rounds", type=click.IntRange(2), default=15, show_default=True, help="Rounds of each.")
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
    with serve.server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = Page(f"http://127.0.0.1:{server.server_address[1]}/", program, model, weights)
        if any(page.write(seed)[1] != write(engine, seed)[1] for seed in range(TEXTS)):
            raise click.ClickException("the page writes another text, so nothing is timed")
        contenders = {"page": page.write, f"native engine, {march}": lambda seed: write(engine, seed)}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                run(0)  # wakes it
                seconds[name].append(statistics.mean(run(seed)[0] for seed in range(TEXTS)))
        page.process.communicate()
        server.shutdown()
    count = engine.config.block_size - 1
    facts = f"{page.facts['browser']}, {page.facts['build']} build"
    click.echo(f"{processor.name()}; {facts}; {model}, {weights}, texts of {count} tokens, one core\n")
    click.echo("| engine | tokens/s | spread | of the native engine |\n|---|---|---|---|")
    base = statistics.median(seconds[f"native engine, {march}"])
    for name, each in seconds.items():
        median, (low, _, high) = statistics.median(each), statistics.quantiles(each, n=4)
        spread = f"{100 * (high - low) / median:.0f} %"
        click.echo(f"| {name} | {count / median:,.0f} | {spread} | {100 * base / median:.0f} % |")
    click.echo("\n| a first visit's line | bytes | the line alone | until text shows |\n|---|---|---|---|")
    for (speed, delay), visits in zip(LINES, page.facts["first"]):
        count, first = (
            statistics.median(visit[name] for visit in visits) for name in ("bytes", "milliseconds")
        )
        alone = 8 * count / (speed * 1e6)
        click.echo(f"| {speed} Mbit/s, {delay} ms | {count:,.0f} | {alone:.2f} s | {first / 1e3:.2f} s |")


if __name__ == "__main__":
    main()
