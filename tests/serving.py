"""A server in a thread of this process, and a client that needs only the standard library."""

import http.client
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shakespeare.model import load

MODEL = "shakes128"
WAIT_SECONDS = 600.0  # ends what hangs


@dataclass
class Response:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    data: bytes

    def json(self):
        return json.loads(self.data)

    @property
    def events(self) -> list[dict]:
        """The events of a stream, without the last one, which must be [DONE]."""
        lines = [line for line in self.data.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", lines
        return [json.loads(line[6:]) for line in lines[:-1]]

    def text(self, index: int = 0) -> str:
        """A choice's text, streamed or not."""
        streamed = self.headers["content-type"].startswith("text/event-stream")
        objects = self.events if streamed else [self.json()]
        choices = [c for each in objects for c in each["choices"] if c["index"] == index]
        held = (c.get("message") or c.get("delta") or {"content": c.get("text", "")} for c in choices)
        return "".join(each.get("content", "") for each in held)


@dataclass
class Client:
    """Calls the server at a port."""

    port: int
    server: object = None
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
        """Send a request; the names of headers are written with _."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        shown = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, shown)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, found, response.read())
        finally:
            connection.close()

    def connection(self, receive_buffer: int | None = None) -> socket.socket:
        made = socket.socket()
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(WAIT_SECONDS)
        made.connect(("127.0.0.1", self.port))
        return made

    def get(self, path: str, **headers: str) -> Response:
        return self.send("GET", path, **headers)

    def post(self, path: str, /, **fields) -> Response:
        return self.send("POST", path, json.dumps(fields).encode(), content_type="application/json")

    def complete(self, **fields) -> Response:
        return self.post("/v1/completions", **{"model": MODEL, "prompt": "ROMEO:"} | fields)

    def chat(self, *messages: dict, **fields) -> Response:
        return self.post("/v1/chat/completions", **{"model": MODEL, "messages": list(messages)} | fields)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.get("/metrics").data.decode().splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(label in line for label in wanted))

    def idle(self) -> None:
        until(lambda: self.metric("attention_texts_running") + self.metric("attention_texts_queued") == 0)


def written(cli, prompt: str, seed: int, tokens: int, *arguments: str | int, part: str = "part4") -> str:
    """The command line's text, without the prompt."""
    given = ("--prompt", prompt, "--seed", seed, "--num-samples", 1, "--max-new-tokens", tokens)
    return json.loads(cli(part, "--inference", "-m", MODEL, *given, "--json", *arguments).stdout)["text"]


def until(holds) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.002)


def port_of(child: subprocess.Popen) -> int:
    """The port of a server's process, once it is ready. Fails with what it said if it ends before."""
    said = ""
    for line in child.stderr or ():
        said += line
        if line.startswith("Ready") and (port := re.search(r"http://127\.0\.0\.1:(\d+)$", said, re.M)):
            return int(port[1])
    raise AssertionError(said)


@contextmanager
def raw(
    client: Client, receive_buffer: int | None = None, sent: int | None = None, **fields
) -> Iterator[socket.socket]:
    """A request for a text on a raw connection, which is closed at the end. sent: the end of what is sent."""
    body = json.dumps({"model": MODEL} | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with client.connection(receive_buffer) as connection:
        connection.sendall((f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)[:sent])
        yield connection


@contextmanager
def serving(settings, checkpoints=None) -> Iterator[Client]:
    from shakespeare.app.server import running

    settings = replace(settings, port=0)
    server = running.Server(checkpoints or {name: load(name) for name in settings.models}, settings)
    listener = running.bind(settings)
    client = Client(listener.getsockname()[1], server)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            running.serve(server, listener, lambda line: None)
        except BaseException as error:  # shown by the assertion below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: failures or client.get("/health").status == 200)
        yield client
    finally:
        if thread.is_alive() and server.loop:
            server.loop.call_soon_threadsafe(server.end)
            server.loop.call_soon_threadsafe(server.end)  # at once
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive() and not failures, failures
