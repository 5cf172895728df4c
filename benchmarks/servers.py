"""Processes, each on one core: servers of OpenAI's API, this project's and llama.cpp's; a cheap client."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shakespeare.model import load
from shakespeare.model.export import export

OWN, LLAMA = "gpt.py serve", "llama-server"
PROMPT = "ROMEO:"
CORES = sorted(os.sched_getaffinity(0))
ROOT = Path(__file__).resolve().parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 120.0
WRITTEN = re.compile(rb'"completion_tokens": ?(\d+)')
LENGTH = re.compile(rb"content-length: (\d+)", re.I)
TEXT = (b'"text":', b'"content":')


def llama_command(model: str, port: int, streams: int, folder: Path) -> list[str]:
    """llama.cpp's llama-server with the same weights in F32, and its continuous batching.

    The cache is F32, and flash attention is off, which is faster here (see benchmarks.peers). Its only
    sampler is the temperature, because gpt.py serve's defaults filter no tokens either.
    """
    checkpoint, file = load(model), folder / f"{Path(model).name}.gguf"
    export(checkpoint, "gguf", file)
    command = [LLAMA, "--model", str(file), "--port", str(port)]
    command += ["--parallel", str(streams), "--ctx-size", str(streams * checkpoint.config.block_size)]
    command += ["--cont-batching", "--threads", "1", "--threads-batch", "1", "--log-disable"]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    return [*command, "--samplers", "temperature", "--temp", "1"]


class Process:
    """A child process on one core. said: its line with `ready`, if one was asked for."""

    def __init__(self, command: Sequence[str], core: int, ready: str = "", port: int = 0) -> None:
        """Start it. Wait until it prints a line with `ready`, or until the server at the port is healthy."""
        self.port = port
        out, error = (subprocess.PIPE, subprocess.STDOUT) if ready else [subprocess.DEVNULL] * 2
        pipes: dict = {"stdin": subprocess.PIPE, "stdout": out, "stderr": error, "text": True}
        pipes |= {"start_new_session": True}  # see cpu_seconds()
        self.child = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {core}), **pipes)
        self.said = self.read_until(ready) if ready else self._wait_for_health()

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
        """CPU time so far of the processes of its session, which has the id of the first one."""
        total = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self.child.pid:
                total += int(fields[11]) + int(fields[12])
        return total / TICKS

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

    def _wait_for_health(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.child.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return ""
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        self.child.kill()
        raise RuntimeError(f"no server answers: {' '.join(map(str, self.child.args))}")  # type: ignore


def start(name: str, model: str, streams: int, core: int, folder: Path) -> Process:
    """Start OWN or LLAMA at a free port, with its files in the folder; wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    own = [sys.executable, str(ROOT / "gpt.py"), "serve", "-m", model, "--port", str(port), "--threads", "1"]
    own += ["--slots", str(streams)]
    return Process(own if name == OWN else llama_command(model, port, streams, folder), core, port=port)


@dataclass
class Answer:
    """What a server answered. tokens: as `usage` says. first: seconds to the first text."""

    status: int
    tokens: int
    first: float
    data: bytes


class Client:
    """Asks a server here, one request at a time on one connection. Raw bytes and `usage` keep it cheap."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: dict) -> Answer:
        """Send a request and read all of the answer."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        if self.connection:
            try:
                return await self._answer(*self.connection, request)
            except ConnectionError:  # some servers close it after a stream
                self.close()
        self.connection = await asyncio.open_connection("127.0.0.1", self.port)
        return await self._answer(*self.connection, request)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> Answer:
        start, first, data, whole = time.perf_counter(), 0.0, bytearray(), False
        writer.write(request)
        while not whole:
            if not (piece := await reader.read(2**16)):
                raise ConnectionError("closed")
            if not first and any(text in piece for text in TEXT):
                first = time.perf_counter() - start
            data += piece
            head = data.find(b"\r\n\r\n") + 4
            length = LENGTH.search(data, 0, head)
            whole = len(data) >= head + int(length[1]) if length else data.endswith(b"\r\n0\r\n\r\n")
        usage = WRITTEN.findall(data)
        return Answer(int(data[9:12]), int(usage[-1]) if usage else 0, first, bytes(data))

    async def stream(self, path: str, body: dict) -> Answer:
        """The same with a streaming request."""
        return await self.ask(path, body | {"stream": True, "stream_options": {"include_usage": True}})

    def close(self) -> None:
        """Close the connection."""
        if self.connection:
            self.connection[1].close()
