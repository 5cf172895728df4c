"""Who may call: Host, origins and keys. Plain ASGI, as BaseHTTPMiddleware's queue has no bound."""

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from shakespeare.app.hosts import host_of, is_loopback
from shakespeare.app.server import Settings
from shakespeare.app.server.requests import ApiError

OPEN = "/health"  # this path needs no key, and any name of the server will do: probes call by an address
NAME = re.compile(r"[A-Za-z0-9_.-]+")
ROOT = re.compile(r"(/[A-Za-z0-9_.~-]+)*/?")
ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]*))?")
DEFAULT_PORTS = (("http", "80"), ("https", "443"))  # browsers leave these out


def check_origin(origin: str) -> None:
    """Raise ValueError if no browser sends this Origin header; '*' stands for any."""
    matched = ORIGIN.fullmatch(origin)
    if origin != "*" and (not matched or matched.groups() in DEFAULT_PORTS):
        form = "scheme://host:port in lower case, without a path or the scheme's own port, or *"
        raise ValueError(f"--allow-origin is {origin!r}; it must be scheme://host or {form}")


def check_host(host: str) -> None:
    """Raise ValueError if no Host header has this name; '*' stands for any."""
    address = host.removeprefix("[").removesuffix("]").lower()
    with suppress(ValueError):
        if host == "*" or NAME.fullmatch(host) or str(ipaddress.IPv6Address(address)) == address:
            return
    raise ValueError(f"--allow-host is {host!r}; it must be a name or an address without a port, or *")


def checked_root(path: str) -> str:
    """A proxy's path for the server, without its last slash. Raises ValueError."""
    if not ROOT.fullmatch(path):
        raise ValueError(f"--root-path is {path!r}; it must be a path such as /texts")
    return path.rstrip("/")


def secured(app: ASGIApp, settings: Settings, refuse: Callable[[ApiError, Send], Awaitable[None]]) -> ASGIApp:
    """The application behind its checks of Host, origins (CORS) and keys. refuse: answers with an error."""
    unchecked = OPEN, settings.root_path + OPEN

    def checked(inner: ASGIApp, refusal: Callable[[Scope], ApiError | None]) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            is_checked = scope["type"] == "http" and scope["path"] not in unchecked
            error = refusal(scope) if is_checked else None
            if error:
                await refuse(error, send)
            else:
                await inner(scope, receive, send)

        return call

    if settings.api_keys:
        app = checked(app, partial(key_refusal, [key.encode() for key in settings.api_keys]))
    if settings.origins:
        app = CORSMiddleware(app, settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    if "*" not in settings.hosts:
        hosts = (settings.host, *settings.hosts)
        app = checked(app, partial(host_refusal, frozenset(host.strip("[].").lower() for host in hosts)))
    return app


def host_refusal(hosts: frozenset[str], scope: Scope) -> ApiError | None:
    """The refusal of another host name, as that of another site's page after DNS rebinding."""
    headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(headers) == 1:
        host = host_of(headers[0])
        if host in hosts or is_loopback(host):
            return None
    if not headers and scope["http_version"] != "1.1":  # no browser: HTTP/1.0 needs no Host
        return None
    shown = ascii(headers[0][:100]) if headers else "missing"
    message = f"The Host header is {shown}; the server must be started with --allow-host to admit it."
    return ApiError(403, message, code="host_not_allowed")


def key_refusal(keys: Sequence[bytes], scope: Scope) -> ApiError | None:
    """The refusal of a request without a key; its time tells nothing of the keys."""
    authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = authorization.partition(b" ")
    matches = [hmac.compare_digest(key.strip(), each) for each in keys]
    if scheme.lower() == b"bearer" and any(matches):
        return None
    # LiteLLM recognizes the error by OpenAI's first words.
    message = "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
