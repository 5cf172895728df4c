"""The time of each command from Enter to its first character or its result, with its memory and imports.

    python -m benchmarks.start [-r 11]

The commands take turns, round by round, each in a new process on one core, after a round that compiles and
fills the caches. A figure is the median of the rounds. CPU seconds are those of the whole process until it
ends; on a busy machine they are more reliable. The imports, by package, are those of one more start.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.measuring import attempt, show_table
from shakespeare.app.cli import options
from shakespeare.attention_ext import processor

ROOT = Path(__file__).resolve().parent.parent
TEXT = ("--inference", "-m", "shakes256", "--num-samples", "1", "--max-new-tokens", "20")
COMMANDS = {
    "--help": ("--help",),
    "part4 --inference": ("part4", *TEXT),
    "part0 --inference": ("part0", *TEXT),
    "race part1,part4": ("race", "part1,part4", "--max-new-tokens", "20"),
    "bulk": ("bulk", "--texts", "1", "--max-new-tokens", "20", "--workers", "1", "--out", "OUT"),
    "serve": ("serve", "--port", "0"),
    "part4": ("part4", "-br", "128", "-bc", "512"),
    "doctor": ("doctor",),
}
# The output that is waited for, if not the first character.
SIGNS = {"bulk": b"tokens in", "serve": b"Ready", "part4": b"speed-up over"}
SLOWEST = 4  # imports that are shown


class Start(NamedTuple):
    """A start's seconds until its output, CPU seconds, and MiB of memory at most."""

    seconds: float
    cpu_seconds: float
    memory: float


def start(name: str, *python: str) -> tuple[Start, str]:
    """A start of a command, and what it wrote to stderr, with a sign also to stdout.

    python: Python's options. Raises RuntimeError with the last line that a command wrote, if it failed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        words = [str(Path(folder, "texts")) if word == "OUT" else word for word in COMMANDS[name]]
        began, shown = time.perf_counter(), b""
        both = subprocess.STDOUT if name in SIGNS else errors
        process = subprocess.Popen(
            [sys.executable, *python, "gpt.py", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=both
        )
        assert process.stdout
        while more := os.read(process.stdout.fileno(), 1 << 16):
            shown += more
            if SIGNS.get(name, b"") in shown:
                break
        seconds = time.perf_counter() - began
        if name == "serve":
            process.send_signal(signal.SIGINT)
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read() or shown.decode()
    if not more or process.returncode not in (0, 130) and name != "doctor":
        raise RuntimeError(said.strip().rpartition("\n")[2])
    return Start(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024), said


def slowest_imports(name: str) -> str:
    """The packages whose modules take longest to import, with milliseconds."""
    packages: dict[str, int] = {}
    for line in re.finditer(r"import time: +(\d+) \| +\d+ \| +(\w+)", start(name, "-Ximporttime")[1]):
        packages[line[2]] = packages.get(line[2], 0) + int(line[1])
    order = sorted(packages, key=packages.__getitem__, reverse=True)
    return ", ".join(f"{package} {packages[package] / 1000:.0f}" for package in order[:SLOWEST])


@click.command()
@options.whole("-r", "--rounds", "Starts of each command.", default=11, show_default=True)
def main(rounds: int) -> None:
    """Start each command repeatedly."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    starts: dict[str, list[Start]] = {name: [] for name in COMMANDS}
    failed: dict[str, str] = {}
    for number in range(1 + rounds):
        for name, measured in starts.items():
            if name not in failed and (done := attempt(failed, name, start, name)) and number:
                measured.append(done[0])
    click.echo(f"{processor.name()}; one core, medians of {rounds} starts\n")

    def row(name: str) -> str:
        seconds, cpu_seconds, memory = map(statistics.median, zip(*starts[name]))
        return f"{name} | {seconds:.2f} | {cpu_seconds:.2f} | {memory:.0f} | {slowest_imports(name)}"

    show_table(
        "command | seconds | CPU seconds | MiB | slowest imports, ms",
        map(row, [name for name in starts if name not in failed]),
        failed,
    )


if __name__ == "__main__":
    main()
