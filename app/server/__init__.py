"""`gpt.py serve`: an OpenAI-compatible server over the engines of generation/.

Its packages are the extra [serve]. A request passes running (its connection), security, app, requests (its
body) and scheduler (a Writer for each model and part). Its events come back through responses and app.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """A server's models, its address and its limits, fixed when it starts.

    models: their names in requests; the first one is the page's example. part: the default part.
    device, weights, kv_cache, draft: of the engines. host: 'localhost' is 127.0.0.1 and ::1.
    slots: texts that each model and part writes at once. queue: texts that may wait for each. threads: of
    the engines. api_keys: if empty, no key is needed. origins: origins whose pages may call. hosts:
    additional names in the Host header; '*' admits any. root_path: where a proxy has the server, as "/texts";
    a request's path may begin with it or not. grace: seconds for running requests when the server
    ends. page: the folder of the page at /, if it is built.
    Limits: most_texts in a request, most_tokens of a text, most_request_tokens of all its texts, most_scores
    (tokens of a request, echoed ones included, with log-probabilities), body_bytes of a request, body_seconds
    for its arrival. A reader may leave buffer_bytes of a stream unread for behind_seconds, and must take
    64 KiB within stall_seconds.
    """

    models: tuple[str, ...] = ("shakes256",)
    part: str = "part4"
    device: str = "cpu"
    host: str = "localhost"
    port: int = 8000
    slots: int = 32
    queue: int = 256
    threads: int = 1
    weights: str = "fp32"
    kv_cache: str = "fp32"
    draft: str = "auto"
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    root_path: str = ""
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
