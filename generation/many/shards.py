"""A shard of many texts: the settings that decide its bytes, and the Scribe that writes it.

Text i depends only on settings, prompt and seed: a shard's bytes are the same wherever the kernels are.
"""

import codecs
import hashlib
import io
import json
import platform
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare import __version__
from shakespeare.attention_ext import default_tile, processor
from shakespeare.attention_ext.build import prebuilt
from shakespeare.attention_ext.checks import set_whole, type_text
from shakespeare.attention_ext.parts import PARTS, helpers_of
from shakespeare.generation.engines.engine import EngineOptions
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import RANDOM, SETTINGS, Sampling, Uniforms
from shakespeare.generation.texts import capacity_for, complete, slots_for
from shakespeare.generation.writer import Writer
from shakespeare.model.checkpoint import Checkpoint, loaded
from shakespeare.model.config import EMBEDDING, HEAD
from shakespeare.model.tokenizer import Tokenizer

MOST_NEW_TOKENS = 2**20  # limit for a line of a prompts file: an endless text would block its shard
WRITE_SECONDS = 1.0  # of a call of the engine: nobody waits for its tokens
LINE_OPTIONS = (*SETTINGS, "max_new_tokens", "seed", "stop", "context", "ignore_eos")


@dataclass(frozen=True)
class Settings:
    """All that decides the texts, besides their numbers.

    model: a name for load(), or what it gives; only `fingerprint` decides. prompt: None if each text has its
    own. engine, simd, br, bc: None or 'auto' if resolved() chooses.
    """

    model: str
    fingerprint: str
    part: str = "part4"
    engine: str | None = None
    simd: str = "auto"
    br: int | None = None
    bc: int | None = None
    weights: str = "fp32"
    kv_cache: str = "fp32"
    device: str = "cpu"
    prompt: str | None = "\n"
    max_new_tokens: int = 256
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    seed: int = 1337
    context: str = "slide"
    use_cache: bool = True
    ignore_eos: bool = False
    format: str = "jsonl"

    def __post_init__(self) -> None:
        set_whole(self, "br", "bc", "max_new_tokens", "seed")


@dataclass(frozen=True)
class Task:
    """The texts first .. first + count - 1. lines: line i is of text i; None for the settings' prompt."""

    first: int
    count: int
    lines: Sequence[bytes] | None = None


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of a model's configuration, weights and vocabulary."""
    digest = hashlib.sha256(json.dumps(asdict(checkpoint.config)).encode())
    for name, array in sorted({**checkpoint.weights, HEAD: checkpoint.weights[EMBEDDING]}.items()):
        digest.update(name.encode() + array.tobytes())
    tokenizer = checkpoint.tokenizer
    digest.update(json.dumps(getattr(tokenizer, "characters", None) or len(tokenizer)).encode())
    return digest.hexdigest()


def resolved(settings: Settings, checkpoint: Checkpoint, texts: int) -> dict[str, Any]:
    """The engine, SIMD helpers and tile that this machine chooses for 'auto'.

    They decide the last bits of the logits; tuned tiles differ between machines. The engine is opened once to
    compile what workers load. Raises as open_engine() does.
    """
    s = settings
    if s.device == "cuda":
        return {"engine": Scribe(s, texts).engine.name}
    engine = open_engine(checkpoint, EngineOptions.from_names(vars(s), threads=1)).name
    simd = helpers_of(s.part, s.simd) or "auto"
    br = s.br
    bc = s.bc
    if PARTS[s.part].tiled:
        tuned = default_tile.tile(
            simd, 1, checkpoint.config.head_dim, capacity_of(s, checkpoint), causal=True
        )
        br = br or tuned[0]
        bc = bc or tuned[1]
    return {"engine": engine, "simd": simd, "br": br, "bc": bc}


def capacity_of(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens of context that the longest text needs; the block size for prompts from a file."""
    if settings.prompt is None:
        return checkpoint.config.block_size
    return capacity_for(checkpoint, request_for(settings, checkpoint.tokenizer, 0))


def this_machine(device: str, kernels: str, *packages: str) -> dict[str, str]:
    """What else can change a text's bytes: processor, kernels' target, GPU if it is the device, versions."""
    gpu = {}
    if device == "cuda":
        from shakespeare.generation.engines import cuda

        gpu = {"gpu": cuda.gpu().name}
    features = hashlib.sha256(processor.capabilities().encode()).hexdigest()[:16]
    return {
        "device": device,
        **gpu,
        "processor": processor.name(),
        "instructions": processor.instructions(),
        "features": features,
        "kernels": kernels,
        "python": platform.python_version(),
        "shakespeare-attention": __version__,
        **{name: metadata.version(name) for name in packages},
    }


def request_for(settings: Settings, tokenizer: Tokenizer, index: int) -> Request:
    """The request of text `index` with the prompt of the settings. Raises as Request does."""
    same = ("sampling", "max_new_tokens", "stop", "context", "use_cache", "ignore_eos")
    ids = tokenizer.encode(settings.prompt or "\n")
    return Request(ids, seed=settings.seed + index, **{name: getattr(settings, name) for name in same})


def request_of_line(
    settings: Settings, checkpoint: Checkpoint, index: int, line: bytes
) -> tuple[str | int, Request]:
    """(id, request) of a line: {"id": ..., "prompt": ..., "options": {...}}.

    options: any of LINE_OPTIONS; the settings give the others. The seed is the settings' + index by default
    and for -1, so that a line always has the same text. max_new_tokens -1 is the model's block size.
    Raises ValueError, TypeError or RecursionError for a malformed line.
    """
    entry = json.loads(line.decode())
    if not isinstance(entry, dict):
        raise ValueError(f"the line is {type_text(entry)}; it must be an object")
    unknown = entry.keys() - {"id", "prompt", "options"}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is unknown; a line has id, prompt and options")
    identity = entry.get("id")
    prompt = entry.get("prompt")
    options = entry.get("options", {})
    if not isinstance(identity, (str, int)) or isinstance(identity, bool):
        raise TypeError("id must be a string or a whole number")
    str(identity).encode()  # raises for half of a surrogate pair
    if not isinstance(prompt, str):
        raise TypeError("prompt must be a string")
    if not isinstance(options, dict):
        raise TypeError("options must be an object")
    unknown = options.keys() - set(LINE_OPTIONS)
    if unknown:
        raise ValueError(f"option {min(unknown)!r} is unknown; it must be one of {', '.join(LINE_OPTIONS)}")
    endless = ("top_k", "max_new_tokens")  # for which null is a value
    chosen = {name: value for name, value in options.items() if value is not None or name in endless}
    if chosen.get("seed") == RANDOM:
        del chosen["seed"]
    if chosen.get("max_new_tokens") == -1:
        chosen["max_new_tokens"] = checkpoint.config.block_size
    tokenizer = checkpoint.tokenizer
    request = replace(request_for(settings, tokenizer, index), ids=tokenizer.encode(prompt or "\n"))
    sampling = replace(settings.sampling, **{name: chosen.pop(name) for name in SETTINGS if name in chosen})
    request = replace(request, sampling=sampling, **chosen)
    limit = request.max_new_tokens
    if limit is None or limit > max(MOST_NEW_TOKENS, settings.max_new_tokens):
        raise ValueError(f"max_new_tokens must be a whole number of at most {MOST_NEW_TOKENS}")
    return identity, request


class Scribe:
    """Writes shards with one model and engine. texts: the most of a shard; a GPU gets no more slots.

    Raises ValueError if the model is not the one of the settings, and the errors of load() and open_engine().
    """

    def __init__(self, settings: Settings, texts: int = 2**31) -> None:
        with warnings.catch_warnings(action="ignore"):  # the driver has shown them
            self.checkpoint = loaded(settings.model)
        if fingerprint(self.checkpoint) != settings.fingerprint:
            raise ValueError(f"model {settings.model!r} is not the one that the job was started with")
        self.settings = settings
        options = EngineOptions.from_names(
            vars(settings), threads=1, capacity=capacity_of(settings, self.checkpoint)
        )
        most = texts if settings.device == "cuda" else 2**31
        self.at_once, slots = slots_for(most, self.checkpoint.config, options)
        self.engine = open_engine(self.checkpoint, replace(options, slots=slots))

    def write(self, task: Task) -> tuple[bytes, dict[str, Any]]:
        """A task's texts as the bytes of a file, and their record in the manifest, with this machine's."""
        start = time.perf_counter()
        cpu_start = time.process_time()
        rejected: list[dict[str, Any]] = []
        written = self._together(task) or self._each(task, rejected)
        parquet = self.settings.format == "parquet"
        data = in_parquet(written, task.lines is not None) if parquet else in_jsonl(written)
        uses = {"pyarrow": parquet, "torch": self.engine.name == "torch"}
        packages = [name for name, used in uses.items() if used]
        record = {
            "first": task.first,
            "count": task.count,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "texts": len(written),
            "tokens": sum(row["new_tokens"] for row in written),
            "rejected": rejected,
            "machine": this_machine(self.settings.device, prebuilt.level("decoder"), *packages),
            "seconds": round(time.perf_counter() - start, 3),
            "cpu_seconds": round(time.process_time() - cpu_start, 3),
        }
        return data, record

    def _each(self, task: Task, rejected: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of texts that join and leave, each by itself. rejected: as in _requests()."""
        rows: list[dict[str, Any]] = []
        requests = self._requests(task, rows, rejected)
        writer = Writer(self.engine, self.at_once, seconds=WRITE_SECONDS)
        for done, piece in complete(writer, self.checkpoint.tokenizer, requests):
            if not piece:
                row = rows[done.number]
                row["seed"] = done.request.seed
                row["text"] = done.text
                row["new_tokens"] = done.new_tokens
                row["finish_reason"] = done.finish_reason
        return rows

    def _together(self, task: Task) -> list[dict[str, Any]]:
        """Rows of texts that begin and end together, else none. _each() takes 2.7 times as long (Zen 3)."""
        s = self.settings
        engine = self.engine
        tokenizer = self.checkpoint.tokenizer
        first = request_for(s, tokenizer, task.first)
        tokens = s.max_new_tokens
        slots = range(task.count)
        fit = task.count <= self.at_once and 0 < tokens <= engine.capacity + 1 - len(first.ids)
        may_end = s.stop or engine.config.eos_token_id and not s.ignore_eos
        if task.lines is not None or may_end or not s.use_cache or not fit:
            return []
        for slot in slots:
            engine.set_sampling(slot, s.sampling)
        engine.begin(0, first.ids)
        engine.read(0)
        engine.copy(0, *slots[1:])
        seeds = range(first.seed, first.seed + task.count)
        uniforms = np.array([Uniforms(seed)(tokens) for seed in seeds]).T  # (tokens, texts)
        written: list[NDArray[Any]] = []
        while (done := sum(map(len, written))) < tokens:
            written.append(engine.write(slots, uniforms[done:], WRITE_SECONDS))
        texts = tokenizer.decode_all(np.concatenate(written).T)
        same = {"new_tokens": tokens, "finish_reason": "length"}
        return [
            {"index": index, "seed": seed, "text": text} | same
            for index, (seed, text) in enumerate(zip(seeds, texts), task.first)
        ]

    def _requests(
        self, task: Task, rows: list[dict[str, Any]], rejected: list[dict[str, Any]]
    ) -> Iterator[Request]:
        """Each text's request, with its first fields in `rows`; a malformed line is in `rejected`."""
        if task.lines is None:
            first = request_for(self.settings, self.checkpoint.tokenizer, 0)
            for index in range(task.first, task.first + task.count):
                rows.append({"index": index})
                yield first.with_seed(self.settings.seed + index)
            return
        for index, line in enumerate(task.lines, task.first):
            line = line.removeprefix(codecs.BOM_UTF8)  # a file of joined ones has some
            if not line.strip():
                continue
            try:
                identity, request = request_of_line(self.settings, self.checkpoint, index, line)
            except (ValueError, TypeError, RecursionError) as error:
                rejected.append({"line": index + 1, "error": str(error)})
                continue
            rows.append({"index": index, "id": identity})
            yield request


def in_jsonl(rows: Sequence[dict]) -> bytes:
    """A line of JSON for each row; index is its first field."""
    # One call takes half the time of one for each row. In strings this border has escaped quotes.
    lines = json.dumps(rows, ensure_ascii=False)[1:-1].replace('}, {"index": ', '}\n{"index": ')
    return f"{lines}\n".encode() if rows else b""


def check_parquet() -> None:
    """Raise ValueError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        needs = "which needs pyarrow; install it (pip install -e '.[cluster]')"
        raise ValueError(f"format is 'parquet', {needs}") from None


def in_parquet(rows: Sequence[dict], with_id: bool) -> bytes:
    """The rows as a Parquet file. All ids become strings."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "index": pyarrow.int64(),
        **({"id": pyarrow.string()} if with_id else {}),
        "seed": pyarrow.uint64(),
        "text": pyarrow.string(),
        "new_tokens": pyarrow.int32(),
        "finish_reason": pyarrow.string(),
    }
    rows = [row | {"id": str(row["id"])} for row in rows] if with_id else rows
    out = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns)), out)
    return out.getvalue()
