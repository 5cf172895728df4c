"""serve: an OpenAI-compatible server."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from shakespeare.app.cli import options
from shakespeare.app.cli.terminal import notice
from shakespeare.app.server import Settings
from shakespeare.attention_ext import PARTS, BuildError, processor
from shakespeare.attention_ext.build import prebuilt

PACKAGES = ("hypercorn", "prometheus_client", "pydantic", "starlette")

MAX_SLOTS = 4096
SHOWN = f"{Settings.slots}; what an eighth of a GPU's memory holds, at most {MAX_SLOTS}"
TEXTS = "Texts written at once for each model and part."
MODEL = f"{options.MODEL}; NAME=PATH gives it a name in the API. May be repeated."
KEY_FILE = "File with a key in each line; other users cannot see it in a list of processes."
ORIGIN = "Let pages of this origin call from a browser; may be repeated."
HOST = "Admit this name in the Host header too, or * for any; may be repeated."
ROOT = "Where a proxy has the server, as /texts; the proxy may leave it in a request's path or take it away."
GRACE = "Seconds that running requests have to finish after SIGTERM or Ctrl-C."
MANY = {"multiple": True}
# The options whose values the server's settings take as they are.
SETTINGS = ("part", "device", "port", "queue", "weights", "kv_cache", "draft", "root_path", "grace")

serve_options = options.all_of(
    options.option("-m", "--model", "models", MODEL, default=Settings.models, **MANY, metavar="[NAME=]PATH"),
    options.choice("--part", "Attention of requests that name no part.", choices=PARTS, default="part4"),
    options.cpu_or_cuda,
    options.option("--host", "Address to listen at; localhost is 127.0.0.1 and ::1.", default=Settings.host),
    options.integer(
        "--port", "Port to listen at; 0 takes a free one.", minimum=0, maximum=65535, default=Settings.port
    ),
    options.size("--slots", TEXTS, maximum=MAX_SLOTS, show_default=SHOWN),
    options.size(
        "--queue", "Texts that may wait for each model and part.", maximum=10**6, default=Settings.queue
    ),
    options.threads,
    options.weights,
    options.kv_cache,
    options.draft,
    options.option("--api-key", "api_keys", "A key that clients must send; may be repeated.", **MANY),
    options.file("--api-key-file", KEY_FILE),
    options.option("--allow-origin", "origins", ORIGIN, **MANY, metavar="URL"),
    options.option("--allow-host", "hosts", HOST, **MANY, metavar="NAME"),
    options.option("--root-path", ROOT, default="", show_default=False, metavar="PATH"),
    options.flag("--insecure", "Listen beyond this machine without a key."),
    options.number("--grace", GRACE, maximum=86_400, default=Settings.grace),
)


def paths_by_name(models: Iterable[str]) -> dict[str, str]:
    """The models of -m, each PATH or NAME=PATH, by their names. Raises ValueError."""
    paths: dict[str, str] = {}
    for argument in dict.fromkeys(models):
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            name = path = argument
        if not (name and path and name.isprintable()):
            raise ValueError(f"--model is {argument!r}; it must be [NAME=]PATH in printable characters")
        if name in paths:
            raise ValueError(f"--model is {argument!r}; {name} is the name of {paths[name]} already")
        paths[name] = path
    return paths


@click.command()
@serve_options
@options.gathered("settings", Settings, SETTINGS)
def serve(
    settings: Settings,
    models: tuple[str, ...],
    host: str,
    threads: int | None,
    slots: int | None,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    insecure: bool,
    origins: tuple[str, ...],
    hosts: tuple[str, ...],
) -> None:
    """Serve models through OpenAI's API.

    It needs more packages: pip install -e '.[serve]'. A request with a seed gets the text that --inference
    writes with that seed, alone or among others. Sampling has OpenAI's defaults: temperature 1, all tokens.
    """
    options.check()
    processor.let_waiting_threads_sleep()  # before torch is imported
    try:
        from shakespeare.app.hosts import is_loopback
        from shakespeare.app.server import running  # which imports all of them
        from shakespeare.app.server.security import check_host, check_origin, checked_root
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name not in PACKAGES:
            raise
        raise BuildError(f"serve needs {name}: pip install {' '.join(PACKAGES)}") from None
    from shakespeare.generation.engines.engine import EngineOptions
    from shakespeare.generation.texts import slots_for
    from shakespeare.model import corpus, load
    from shakespeare.web import build

    found: list[str] = []
    if api_key_file:
        lines = corpus.decode(api_key_file.read_bytes(), str(api_key_file)).splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ValueError(f"--api-key-file {api_key_file} has no key; it must have one in a line")
    for option, keys in (("--api-key", api_keys), (f"--api-key-file {api_key_file}", found)):
        if not all(key and key.isascii() and key.isprintable() and key == key.strip() for key in keys):
            raise ValueError(f"{option}: keys must be of printable ASCII characters, without spaces around")
    host = host.strip("[].").lower()
    if not (is_loopback(host) or api_keys or found or insecure):
        remedy = "give --api-key or --api-key-file, or --insecure"
        raise ValueError(f"--host {host} can be reached by others; {remedy}")
    for origin in origins:
        check_origin(origin)
    for name in hosts:
        check_host(name)
    root_path = checked_root(settings.root_path)
    page = None
    with contextlib.suppress(BuildError):  # a server needs no page
        page = build.path()
        if prebuilt.page(next(iter(build.BUILDS))).is_file():  # nothing is to be compiled
            build.make()
    checkpoints = {name: load(path) for name, path in paths_by_name(models).items()}
    if slots is None and settings.device == "cuda":
        engine_options = options.made(EngineOptions, settings, slots=MAX_SLOTS, threads=None)
        configs = (checkpoint.config for checkpoint in checkpoints.values())
        slots = min(slots_for(MAX_SLOTS, config, engine_options)[0] for config in configs)
    settings = replace(
        settings,
        models=tuple(checkpoints),
        root_path=root_path,
        host=host,
        slots=slots or Settings.slots,
        threads=options.threads_for(threads),
        page=page,
        api_keys=(*api_keys, *found),
        origins=origins,
        hosts=hosts,
    )
    shown = ", ".join(settings.models)
    try:
        server = running.Server(checkpoints, settings)
        try:
            listener = running.bind(settings)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"--host {host}, --port {settings.port}") from None
        address, port = listener.getsockname()[:2]
        notice(f"Loading {shown}; http://{f'[{address}]' if ':' in address else address}:{port}")
        running.serve(server, listener, notice)
    except MemoryError:
        needed = f"{shown} with --slots {settings.slots}"
        raise ValueError(f"memory does not suffice for {needed}; fewer slots need less") from None
