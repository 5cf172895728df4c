"""What a server is told once, when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """A server's models, its address and its limits.

    models: names as model.checkpoint.load() takes them; the first one is the page's example. part: of
    requests that name none. slots: texts that each model and part writes at once. queue: texts that may wait
    for each. threads: of the engines. api_keys: none of them needed if empty. origins: those of browsers'
    pages that may call. hosts: further names in the Host header; '*' admits any. grace: seconds that running
    requests have when the server ends. page: the folder of the page at /, if it is built.
    most_texts: of one request. most_tokens: of one text. most_request_tokens: of all texts of a request.
    most_scores: tokens of a request, echoed ones too, that log-probabilities are sent of. body_bytes: of a
    request. body_seconds: in which it must arrive. buffer_bytes: of a stream's events that its reader may
    leave for behind_seconds. stall_seconds: in which a reader must take something. connections: at once;
    fewer if the process may not open as many files.
    """

    models: tuple[str, ...] = ("shakes256",)
    part: str = "part4"
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 32
    queue: int = 256
    threads: int = 1
    weights: str = "fp32"
    kv_cache: str = "fp32"
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    grace: float = 10.0
    page: Path | None = None
    most_texts: int = 128
    most_tokens: int = 65_536
    most_request_tokens: int = 262_144
    most_scores: int = 4_096
    body_bytes: int = 262_144
    body_seconds: float = 10.0
    buffer_bytes: int = 65_536
    behind_seconds: float = 2.0
    stall_seconds: float = 10.0
    connections: int = 1024
