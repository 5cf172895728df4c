"""--watch: a command that runs again at each save of a source."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from shakespeare.app.cli.terminal import notice

POLL_SECONDS = 0.05
TIME = re.compile(r"^(?:Manual Execution Time|part\d backward time): +([\d.]+) ?(m?s)", re.M)


def tests(folder: Path) -> NoReturn:
    """Run this command without --watch in a fresh process, again at each save below the folder, until Ctrl-C.

    A save ends a running test. A right result is one line; of a wrong one all output is printed.
    """
    from shakespeare.attention_ext.build.cache import saves

    command = [sys.executable, *(word for word in sys.orig_argv[1:] if word != "--watch")]
    last: float | None = None
    while True:
        before = saves(folder.rglob("*.*"))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as child:
            output = None
            while output is None:
                try:
                    output, _ = child.communicate(timeout=POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if saves(folder.rglob("*.*")) != before:
                        child.kill()
        timed = TIME.search(output)
        if child.returncode == 0 and timed:
            seconds = float(timed[1]) / (1000 if timed[2] == "ms" else 1)
            change = f", {(seconds / last - 1):+.0%} of {1e3 * last:.3g} ms before" if last else ""
            click.echo(f"right, {1e3 * seconds:.3g} ms{change}")
            last = seconds
        elif child.returncode > 0:
            click.echo(output, nl=False)
        notice("waiting for a source to be saved (Ctrl-C ends)")
        while saves(folder.rglob("*.*")) == before:
            time.sleep(POLL_SECONDS)
