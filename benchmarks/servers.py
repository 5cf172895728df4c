"""Processes that speak OpenAI's API, each on one core: this project's server, and llama.cpp's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from app.cli.options import all_of
from model import load

PROMPT = "ROMEO:"
CORES = sorted(os.sched_getaffinity(0))
ROOT = Path(__file__).resolve().parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 120.0


core_options = all_of(
    click.option("--core", type=click.IntRange(0), default=CORES[0], help="Server's.  [default: first]"),
    click.option(
        "--client-core", type=click.IntRange(0), default=CORES[-1], help="Its client's.  [default: last]"
    ),
)


def own_command(model: str, port: int, streams: int, folder: Path) -> Sequence[str]:
    """gpt.py serve."""
    gpt = [sys.executable, str(ROOT / "gpt.py"), "serve", "-m", model, "--port", str(port)]
    return [*gpt, "--slots", str(streams), "--threads", "1"]


def llama_command(model: str, port: int, streams: int, folder: Path) -> Sequence[str]:
    """llama.cpp's llama-server with the same weights in F32, and its continuous batching.

    The cache is F32, and flash attention is off, which is faster here (see benchmarks.peers). Its only
    sampler is the temperature, because gpt.py serve's defaults filter no tokens either.
    """
    from benchmarks.peers.llama import write_gguf  # a package of its own

    checkpoint, file = load(model), folder / f"{Path(model).name}.gguf"
    tokenizer = checkpoint.tokenizer
    tokens = [tokenizer.decoder().feed(token) for token in range(checkpoint.model.config.vocab_size)]
    write_gguf(file, checkpoint.model, tokens=tokens)
    command = [shutil.which("llama-server") or "llama-server", "--model", str(file), "--port", str(port)]
    command += ["--parallel", str(streams), "--ctx-size", str(streams * checkpoint.model.config.block_size)]
    command += ["--cont-batching", "--threads", "1", "--threads-batch", "1", "--log-disable"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    return [*command, "--samplers", "temperature", "--temp", "1"]


# Each gives its command line from (model, port, streams, folder), and may write files into the folder.
OWN, LLAMA = "gpt.py serve", "llama-server"
SERVERS: dict[str, Callable[[str, int, int, Path], Sequence[str]]] = {OWN: own_command, LLAMA: llama_command}


class Process:
    """A child process on one core."""

    def __init__(self, command: Sequence[str], core: int, ready: str = "", port: int = 0) -> None:
        """Start it. Wait until it prints a line with `ready`, or until the server at the port is healthy."""
        self.port = port
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if ready else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if ready else subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        if ready:
            self.read_until(ready)
        else:
            self._wait_for_health()

    def read_until(self, text: str) -> str:
        """Read lines until one that contains a text; return it."""
        assert self.child.stdout
        said = ""
        for line in self.child.stdout:
            said += line
            if text in line:
                return line
        raise RuntimeError(f"the process ended: {said}")

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def ask(self, question: str) -> dict:
        """Send a line, read a line of JSON."""
        assert self.child.stdin
        self.child.stdin.write(question + "\n")
        self.child.stdin.flush()
        return json.loads(self.read_until("{"))

    def end(self) -> None:
        """End it as a service manager does."""
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def _wait_for_health(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.child.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        self.child.kill()
        raise RuntimeError(f"no server answers: {' '.join(map(str, self.child.args))}")  # type: ignore


def start(name: str, model: str, streams: int, core: int, folder: Path) -> Process:
    """Start a server at a free port; wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    return Process(SERVERS[name](model, port, streams, folder), core, port=port)
