"""A shard of many texts: the settings that decide its bytes, and the Scribe that writes it.

Text i depends only on settings, prompt and seed: a shard's bytes are the same wherever the kernels are.
"""

import hashlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from shakespeare import __version__
from shakespeare.attention_ext import processor
from shakespeare.attention_ext.build import prebuilt
from shakespeare.attention_ext.checks import type_text
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import RANDOM, SETTINGS
from shakespeare.generation.texts import complete, slots_for
from shakespeare.generation.writer import Writer
from shakespeare.model.checkpoint import Checkpoint, loaded

MOST_NEW_TOKENS = 2**20  # limit for a line of a prompts file: an endless text would block its shard
WRITE_SECONDS = 1.0  # of a call of the engine: nobody waits for its tokens
LINE_OPTIONS = (*SETTINGS, "max_new_tokens", "seed", "stop", "context", "ignore_eos")


@dataclass(frozen=True)
class Settings:
    """All that decides the texts, besides their numbers.

    model: a name for load(), or what it gives; only `fingerprint` decides. request: of text 0; its ids and
    options are the defaults of a prompts file's lines. format: 'jsonl' or 'parquet'.
    """

    model: Any
    fingerprint: str
    engine: EngineOptions
    request: Request
    format: str


@dataclass(frozen=True)
class Task:
    """The texts first .. first + count - 1, for the file `name`.

    lines: of a prompts file, one for each text. Without them all texts continue the settings' prompt.
    """

    name: str
    first: int
    count: int
    lines: Sequence[bytes] = ()


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of a model's configuration, weights and vocabulary."""
    digest = hashlib.sha256(json.dumps(asdict(checkpoint.config)).encode())
    for name, array in sorted(checkpoint.weights.items()):
        digest.update(name.encode() + array.tobytes())
    tokenizer = checkpoint.tokenizer
    digest.update(json.dumps(getattr(tokenizer, "characters", None) or len(tokenizer)).encode())
    return digest.hexdigest()


def this_machine(engine: Engine, parquet: bool) -> dict[str, str]:
    """What else can change a file's bytes: engine with its GPU, processor, kernels' target, versions."""
    uses = {"pyarrow": parquet, "torch": engine.name == "torch"}
    return {
        "engine": f"{engine.name}: {engine.description}",
        "processor": processor.name(),
        "instructions": processor.instructions(),
        "kernels": prebuilt.level("decoder"),
        "shakespeare-attention": __version__,
        **{name: metadata.version(name) for name, used in uses.items() if used},
    }


def request_of_line(default: Request, checkpoint: Checkpoint, line: bytes) -> tuple[str | int, Request]:
    """(id, request) of a line: {"id": ..., "prompt": ..., "options": {...}}.

    options: any of LINE_OPTIONS; `default` has the others. The seed -1 is its seed, so that a line always has
    the same text. max_new_tokens -1 is the model's block size. Raises ValueError, TypeError or RecursionError
    for a malformed line.
    """
    entry = _object("the line", json.loads(line), ("id", "prompt", "options"))
    options = _object("options", entry.get("options", {}), LINE_OPTIONS)
    identity: Any = entry.get("id")
    prompt = entry.get("prompt")
    if type(identity) not in (str, int):  # a bool is an int
        raise TypeError("id must be a string or a whole number")
    str(identity).encode()  # raises for half of a surrogate pair
    if not isinstance(prompt, str):
        raise TypeError("prompt must be a string")
    endless = ("top_k", "max_new_tokens")  # for which null is a value
    chosen = {name: value for name, value in options.items() if value is not None or name in endless}
    if chosen.get("seed") == RANDOM:
        del chosen["seed"]
    if chosen.get("max_new_tokens") == -1:
        chosen["max_new_tokens"] = checkpoint.config.block_size
    sampling = replace(default.sampling, **{name: chosen.pop(name) for name in SETTINGS if name in chosen})
    ids = checkpoint.tokenizer.encode(prompt or "\n")
    request = replace(default, ids=ids, sampling=sampling, **chosen)
    limit = request.max_new_tokens
    if limit is None or limit > max(MOST_NEW_TOKENS, default.max_new_tokens or 0):
        raise ValueError(f"max_new_tokens must be a whole number of at most {MOST_NEW_TOKENS}")
    return identity, request


def _object(what: str, value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The value, if it is an object with some of these names. Raises TypeError or ValueError."""
    if not isinstance(value, dict):
        raise TypeError(f"{what} is {type_text(value)}; it must be an object")
    unknown = value.keys() - set(names)
    if unknown:
        raise ValueError(f"{what} has {min(unknown)!r}; it must be one of {', '.join(names)}")
    return value


class Scribe:
    """Writes shards with one model and engine. texts: the most of a shard; the engine gets no more slots.

    Raises ValueError if the model is not the one of the settings, and the errors of load() and open_engine().
    """

    def __init__(self, settings: Settings, texts: int = 2**31) -> None:
        self.checkpoint = loaded(settings.model)
        if fingerprint(self.checkpoint) != settings.fingerprint:
            raise ValueError(f"model {settings.model!r} is not the one that the job was started with")
        self.settings = settings
        self.at_once, slots = slots_for(texts, self.checkpoint.config, settings.engine)
        self.engine = open_engine(self.checkpoint, replace(settings.engine, slots=slots))

    def write(self, task: Task) -> tuple[bytes, dict[str, Any]]:
        """A task's texts as the bytes of a file, and their record in the manifest, with this machine's."""
        start = time.perf_counter()
        rows: list[dict[str, Any]] = []
        rejected: list[dict[str, Any]] = []
        requests = self._requests(task, rows, rejected)
        writer = Writer(self.engine, self.at_once, seconds=WRITE_SECONDS)
        for done, piece in complete(writer, self.checkpoint.tokenizer, requests):
            if not piece:
                rows[done.number].update(
                    seed=done.request.seed,
                    text=done.text,
                    new_tokens=done.new_tokens,
                    finish_reason=done.finish_reason,
                )
        parquet = self.settings.format == "parquet"
        data = in_parquet(rows) if parquet else in_jsonl(rows)
        record = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "texts": len(rows),
            "tokens": sum(row["new_tokens"] for row in rows),
            "rejected": rejected,
            "machine": this_machine(self.engine, parquet),
            "seconds": round(time.perf_counter() - start, 3),
        }
        return data, record

    def _requests(
        self, task: Task, rows: list[dict[str, Any]], rejected: list[dict[str, Any]]
    ) -> Iterator[Request]:
        """Each text's request, with its first fields in `rows`; a malformed line is in `rejected`."""
        first = self.settings.request
        for index in range(task.first, task.first + task.count):
            row: dict[str, Any] = {"index": index}
            request = first.with_seed(first.seed + index)
            if task.lines:
                line = task.lines[index - task.first]
                if not line.strip():
                    continue
                try:
                    row["id"], request = request_of_line(request, self.checkpoint, line)
                except (ValueError, TypeError, RecursionError) as error:
                    rejected.append({"line": index + 1, "error": str(error)})
                    continue
            rows.append(row)
            yield request


def in_jsonl(rows: Sequence[dict]) -> bytes:
    """A line of JSON for each row."""
    encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps() would make one for each row
    return "".join(f"{encode(row)}\n" for row in rows).encode()


def in_parquet(rows: Sequence[dict]) -> bytes:
    """The rows as a Parquet file. All ids become strings; without any there is no column of them."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "index": "int64",
        "id": "string",
        "seed": "uint64",
        "text": "string",
        "new_tokens": "int32",
        "finish_reason": "string",
    }
    if rows and "id" in rows[0]:
        rows = [row | {"id": str(row["id"])} for row in rows]
    else:
        del columns["id"]
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns)), out)
    return out.getvalue()
