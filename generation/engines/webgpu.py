"""The webgpu engine: a text a workgroup, a piece of it in a dispatch, csrc/webgpu/decoder.wgsl.

It needs the package wgpu and no PyTorch. A text's bits do not depend on what else is written.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build.structs import constants
from shakespeare.attention_ext.parts import CachePrecision, Precision
from shakespeare.attention_ext.webgpu.driver import LOCK, MOST_GROUPS, Adapter, Source, opened
from shakespeare.generation.engines.engine import EngineOptions, Floats, Unfit, check_plain
from shakespeare.generation.engines.slots import CONSTANTS, PLACES, ROW, Prompt, Slots
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.config import EMBEDDING, GPTConfig

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "webgpu"
FILES = ("decoder.wgsl", "sampling.wgsl")
DECODER = constants(SOURCES / "decoder.wgsl")
INVOCATIONS = DECODER["INVOCATIONS"]  # of a workgroup
TILES = (256, 128, 64, 32, 16)  # keys of attention's, the largest that fits
BUFFERS = 8  # of a shader; the portable least too
TEXT = np.dtype([(name, np.uint32) for name in ("slot", "length", "at", "count", "flags")])  # TEXT words
FIRST = DECODER["FIRST"]  # flags of a text
PROMPT = DECODER["PROMPT"]
LAST = DECODER["LAST"]
DISPATCH_SECONDS = 0.01  # of a dispatch: no watchdog ends it, and Ctrl-C takes effect
FIRST_STEP_SECONDS = 1e-3  # of one text, and of ten more: the guess before one was measured
MOST_OUT = 1 << 26  # bytes of the logits that a dispatch keeps
SHORT = 64  # tokens of prompts that are read together


@dataclass(frozen=True)
class Shape:
    """The sizes of decoder.wgsl, in quads of four numbers. heads: a row whose heads each begin a quad."""

    config: GPTConfig

    @property
    def width(self) -> int:
        return -(-self.config.n_embd // 4)

    @property
    def heads(self) -> int:
        return self.config.n_head * -(-self.config.head_dim // 4)

    @property
    def by_head(self) -> NDArray[np.int64]:
        """The places of a row's numbers, (n_embd,), where each head begins a quad."""
        number = np.arange(self.config.n_embd)
        d = self.config.head_dim
        return number // d * (-(-d // 4) * 4) + number % d

    def shared(self, tile: int) -> int:
        """Bytes of a workgroup's memory, at most."""
        c = self.config
        row = self.width + max(self.width, self.heads) + max(c.n_embd, self.heads) + INVOCATIONS
        numbers = max(c.n_head * tile, 2 * c.vocab_size, INVOCATIONS)
        return 16 * row + 4 * numbers + 4 * c.n_head + 192

    def pack(self, tensors: Mapping[str, Floats]) -> Floats:
        """The weights as decoder.wgsl describes them."""
        c = self.config
        W = self.width
        A = self.heads
        straight = np.arange(c.n_embd)
        hidden = np.arange(4 * c.n_embd)
        packed: list[Floats] = []

        def matrix(name: str, inputs: NDArray, K: int, outputs: NDArray, N: int) -> None:
            packed.append(np.zeros((4 * K, 4 * N), np.float32))
            packed[-1][inputs[:, None], outputs] = tensors[f"{name}.weight"].T
            if c.bias:
                vector(tensors[f"{name}.bias"], outputs, N)

        def vector(tensor: Floats, places: NDArray, N: int) -> None:
            packed.append(np.zeros(4 * N, np.float32))
            packed[-1][places] = tensor

        def norm(name: str) -> None:
            for field in ("weight", "bias")[: 1 + c.bias]:
                vector(tensors[f"{name}.{field}"], straight, W)

        def rows(tensor: Floats) -> Floats:
            return np.pad(tensor, ((0, 0), (0, 4 * W - c.n_embd)))

        qkv = np.concatenate([self.by_head + part * 4 * A for part in range(3)])
        packed.append(rows(tensors[EMBEDDING]))
        for i in range(c.n_layer):
            prefix = f"transformer.h.{i}"
            norm(f"{prefix}.ln_1")
            matrix(f"{prefix}.attn.c_attn", straight, W, qkv, 3 * A)
            matrix(f"{prefix}.attn.c_proj", self.by_head, A, straight, W)
            norm(f"{prefix}.ln_2")
            matrix(f"{prefix}.mlp.c_fc", straight, W, hidden, c.n_embd)
            matrix(f"{prefix}.mlp.c_proj", hidden, c.n_embd, straight, W)
        norm("transformer.ln_f")
        packed.append(np.pad(rows(tensors[EMBEDDING]), ((0, -c.vocab_size % 4), (0, 0))).T)
        packed.append(rows(tensors["transformer.wpe.weight"]))
        return np.concatenate([tensor.reshape(-1) for tensor in packed])

    def cached(self, kv_cache: CachePrecision, capacity: int) -> int:
        """Bytes of a slot's keys, and of its values."""
        return self.config.n_layer * self.heads * capacity * 4 * kv_cache.bytes


def source_for(
    config: GPTConfig, weights: Precision, kv_cache: CachePrecision, capacity: int, on: Adapter
) -> Source:
    """The shader for a model. Raises Unfit, in a sentence, if the engine or the adapter does not take it."""
    shape = Shape(config)
    limits = on.limits
    if weights is not Precision.FP32:
        raise Unfit(f"the webgpu engine has weights in fp32, not {weights}")
    if shape.heads > INVOCATIONS:
        takes = f"the webgpu engine takes rows of {4 * INVOCATIONS} numbers"
        raise Unfit(f"{takes}, not {4 * shape.heads} in all heads")
    if limits["max-storage-buffers-per-shader-stage"] < BUFFERS:
        raise Unfit(f"the webgpu engine needs {BUFFERS} buffers in a shader; {on.name} has fewer")
    room = limits["max-compute-workgroup-storage-size"]
    limit = limits["max-storage-buffer-binding-size"]
    tiles = [tile for tile in TILES if shape.shared(tile) <= room]
    if not tiles:
        needed = shape.shared(TILES[-1])
        raise Unfit(f"the webgpu engine needs {needed:,} bytes of workgroup memory; {on.name} has {room:,}")
    size = shape.cached(kv_cache, capacity)
    if size > limit:
        raise Unfit(f"the keys of a text take {size:,} bytes; {on.name} has buffers of {limit:,}")
    constants = {
        **CONSTANTS,
        "LAYERS": config.n_layer,
        "HEADS": config.n_head,
        "HEAD_DIM": config.head_dim,
        "VOCAB": config.vocab_size,
        "BIAS": int(config.bias),
        "TILE": next((tile for tile in reversed(tiles) if tile >= config.block_size), tiles[0]),
    }
    files = (SOURCES / name for name in (f"cache_{kv_cache}.wgsl", *FILES))
    return Source(tuple(files), tuple(constants.items()))


@dataclass
class Chunk:
    """Buffers of neighbouring slots. held: 2 to 6, with a slot's bytes. work, out: 7 and 8, which grow."""

    first: int
    slots: int
    params: Any
    buffers: dict[str, tuple[Any, int]]
    work: Any
    out: Any


class Pieces(NamedTuple):
    """Tokens of texts to be read, and then chosen.

    at: the slots, (texts,). cached: the tokens in their caches. counts: how many of tokens (texts, most) each
    reads. flags: of each text. numbers: uniform ones, (rows, texts). every: keep the logits of each row, or
    without numbers those after each token.
    """

    at: NDArray[np.int64]
    cached: NDArray[np.int64]
    counts: NDArray[np.int64]
    flags: NDArray[np.int64]
    tokens: NDArray[np.int32]
    numbers: NDArray[np.float64]
    every: bool

    @property
    def kept(self) -> int:
        """The logits of each text that are wanted."""
        return (len(self.numbers) or int(self.counts.max())) if self.every else 0

    def select(self, places: NDArray[np.int64]) -> "Pieces":
        """Those of some of the texts."""
        chosen: dict[str, Any] = {name: getattr(self, name)[places] for name in self._fields[:5]}
        return self._replace(**chosen, numbers=self.numbers[:, places])


class WebGpuEngine(Slots):
    """An Engine on the first adapter of WebGPU. The arguments and errors are open_engine()'s, and Unfit."""

    name = device = "webgpu"

    def __init__(self, model: "Checkpoint | GPT", options: EngineOptions) -> None:
        check_plain("webgpu", model.config)
        gpu = self._gpu = opened()
        c = model.config
        slots = options.slots
        capacity = options.context(c)
        source = source_for(c, options.weights, options.kv_cache, capacity, gpu.adapter)
        self._pipeline = gpu.pipeline(source, "decode")
        super().__init__(c, slots, capacity)
        self._lock = LOCK  # all engines share the device
        self._at_once = SHORT
        self._step_seconds: dict[int, float] = {}  # of so many texts in a dispatch
        self._scale = math.log2(math.e) / math.sqrt(c.head_dim)
        self._weights = gpu.buffer(Shape(c).pack(model.weights))
        V = c.vocab_size
        cached = Shape(c).cached(options.kv_cache, capacity)
        sizes = {
            "keys": cached,
            "values": cached,
            "logits": 4 * V,
            "counts": 8 * V,
            "settings": 4 * (ROW + V),
        }
        limit = min(MOST_GROUPS, gpu.adapter.limits["max-storage-buffer-binding-size"] // max(sizes.values()))
        self._chunks = []
        for first in range(0, slots, limit):
            n = min(limit, slots - first)
            buffers = {name: (gpu.buffer(n * size), size) for name, size in sizes.items()}
            params = gpu.buffer(32, uniform=True)
            self._chunks.append(Chunk(first, n, params, buffers, gpu.buffer(1 << 12), gpu.buffer(1 << 12)))

    @property
    def description(self) -> str:
        """What computes the texts, in a line for people."""
        adapter = self._gpu.adapter
        return f"A text a workgroup, part 4's attention, on {adapter.name} by {adapter.backend}"

    def _read_piece(self, slot: int, prompt: Prompt) -> tuple[int, Floats | None]:
        every = prompt.top is not None
        done, logits = self._read_on({slot: prompt}, prompt.done, every)
        return done, logits[:, 0] if every else None

    def _read_on(self, prompts: dict[int, Prompt], done: int, every: bool = False) -> tuple[int, Floats]:
        """Read a piece of these prompts, of each of which `done` tokens are read, or all if it has fewer.

        Returns the tokens that are read then, and the logits as _run().
        """
        count = self._steps(len(prompts), DISPATCH_SECONDS)
        if every:
            count = min(count, max(1, MOST_OUT // (4 * self.config.vocab_size)))
        lengths = np.array([len(prompt.ids) for prompt in prompts.values()], np.int64)
        begins = np.array([done == 0 and not prompt.continues for prompt in prompts.values()])
        counts = np.minimum(lengths - done, count)
        tokens = np.zeros((len(prompts), counts.max()), np.int32)
        for row, prompt in zip(tokens, prompts.values()):
            piece = prompt.ids[done : done + count]
            row[: len(piece)] = piece
        flags = PROMPT + FIRST * begins + LAST * (done + counts == lengths)
        none = np.empty((0, len(prompts)))
        pieces = Pieces(np.array([*prompts]), 0 * counts + done, counts, flags, tokens, none, every)
        return done + int(counts.max()), self._run(pieces)[1]

    def _read_prompts(self) -> None:
        waiting = self._prompts
        self._prompts = {}
        done = 0
        while waiting:
            done, _ = self._read_on(waiting, done)
            waiting = {slot: prompt for slot, prompt in waiting.items() if len(prompt.ids) > done}

    def _write(
        self, at: NDArray[np.int64], numbers: NDArray[np.float64], seconds: float | None, scored: bool
    ) -> tuple[NDArray[np.int32], Floats]:
        end = time.monotonic() + (DISPATCH_SECONDS if seconds is None else seconds)
        cached = self._lengths[at].astype(np.int64)
        pending = self._pending[at, None]
        found: list[tuple[NDArray[np.int32], Floats]] = []
        while len(numbers):
            rows = self._steps(len(at), min(DISPATCH_SECONDS, end - time.monotonic()))
            if scored:
                rows = min(rows, max(1, MOST_OUT // (4 * len(at) * self.config.vocab_size)))
            unread = (pending[:, 0] >= 0).astype(np.int64)
            tokens, every = self._run(Pieces(at, cached, unread, 0 * at, pending, numbers[:rows], scored))
            found.append((tokens, every))
            cached = cached + unread + len(tokens) - 1
            pending = tokens[-1, :, None]
            numbers = numbers[rows:]
            if scored or time.monotonic() >= end or (tokens < 0).any():
                break  # logits take much memory
        chosen, logits = zip(*found)
        return np.concatenate(chosen), np.concatenate(logits)

    def _copy(self, source: int, at: NDArray[np.int64]) -> None:
        self._read_prompts()
        copies = []
        for name in ("keys", "values", "logits", "counts"):
            buffer, offset, size = self._place(source, name)
            between = self._gpu.buffer(size)  # no buffer is copied to itself
            copies.append((buffer, offset, between, 0, size))
            copies += [(between, 0, *self._place(slot, name)) for slot in at.tolist()]
        self._gpu.copy(copies)

    def _logits_of(self, slot: int) -> Floats:
        self._read_prompts()
        buffer, offset, _ = self._place(slot, "logits")
        return self._gpu.read(buffer, np.float32, self.config.vocab_size, offset)

    def _place(self, slot: int, name: str) -> tuple[Any, int, int]:
        """The buffer that has a slot's bytes of a name, their offset there, and how many they are."""
        chunk = self._chunks[slot // self._chunks[0].slots]
        buffer, size = chunk.buffers[name]
        return buffer, (slot - chunk.first) * size, size

    def _steps(self, texts: int, seconds: float) -> int:
        """The tokens of each of so many texts that are worth a dispatch of so many seconds."""
        guess = FIRST_STEP_SECONDS * (1 + texts / 10)
        return max(1, int(seconds / self._step_seconds.get(texts, guess)))

    def _run(self, pieces: Pieces) -> tuple[NDArray[np.int32], Floats]:
        """Read tokens that follow those in the caches, then choose a row for each row of numbers.

        Returns the tokens (rows, texts) and, with `every`, the logits that they were chosen from, or without
        numbers those after each token: (tokens, texts, V).
        """
        rows = len(pieces.numbers)
        texts = len(pieces.at)
        longest = int(pieces.counts.max())
        steps = max(1, rows + longest - (rows > 0 and longest > 0))
        start = time.perf_counter()
        chosen = np.empty((rows, texts), np.int32)
        logits = np.empty((pieces.kept, texts, self.config.vocab_size), np.float32)
        # Where a token of all texts takes too long, groups of texts write in turn.
        together = texts if steps > 1 else self._steps(texts, DISPATCH_SECONDS * texts)
        numbers = pieces.at // self._chunks[0].slots  # of the slots' chunks
        for number in np.unique(numbers):
            chunk = self._chunks[number]
            places = np.flatnonzero(numbers == number)
            for first in range(0, len(places), together):
                group = places[first : first + together]
                chosen[:, group], logits[:, group] = self._dispatch(chunk, pieces.select(group), pieces.kept)
        self._step_seconds[texts] = (time.perf_counter() - start) / steps
        return chosen, logits

    def _dispatch(self, chunk: Chunk, pieces: Pieces, kept: int) -> tuple[NDArray[np.int32], Floats]:
        """_run() for slots of one chunk, in one dispatch. kept: rows of logits."""
        at, cached, counts, flags, tokens, numbers, _ = pieces
        gpu = self._gpu
        texts = len(at)
        rows = len(numbers)
        V = self.config.vocab_size
        self._upload_settings()
        words = np.zeros(texts, TEXT)
        words["slot"] = at - chunk.first
        words["length"] = cached
        words["count"] = counts
        words["flags"] = flags
        words["at"] = texts * TEXT.itemsize // 4 + np.cumsum(counts) - counts
        parts = [words, tokens[np.arange(tokens.shape[1]) < counts[:, None]], halves(numbers).reshape(-1)]
        work = np.concatenate([part.view(np.uint32) for part in parts])
        if work.nbytes > chunk.work.size:
            chunk.work = gpu.buffer(2 * work.nbytes)
        size = rows * texts + kept * texts * V
        if 4 * size > chunk.out.size:
            chunk.out = gpu.buffer(4 * size if kept else 8 * size)
        sizes = [texts, rows, self.capacity, chunk.slots, len(work) - 2 * rows * texts, int(kept > 0), 0, 0]
        params = np.array(sizes, np.uint32)
        params[6:7] = np.array([self._scale], np.float32).view(np.uint32)
        gpu.write(chunk.params, params)
        gpu.write(chunk.work, work)
        buffers = [buffer for buffer, _ in chunk.buffers.values()]
        gpu.run(self._pipeline, [chunk.params, self._weights, *buffers, chunk.work, chunk.out], (texts,))
        out = gpu.read(chunk.out, np.uint32, max(1, size))[:size]
        chosen = out[: rows * texts].view(np.int32).reshape(rows, texts)
        return chosen, out[rows * texts :].view(np.float32).reshape(kept, texts, V)

    def _upload_settings(self) -> None:
        """Write the settings that the device has not got."""
        for chunk in self._chunks if self._stale else ():
            buffer, _ = chunk.buffers["settings"]
            slots = slice(chunk.first, chunk.first + chunk.slots)
            numbers = np.clip(self._settings["sampling"][slots], -1e30, 1e30)
            temperature = numbers[:, PLACES["TEMPERATURE"]]  # one above 0 stays above 0
            temperature[:] = np.where(temperature > 0, np.maximum(temperature, 1e-30), 0)
            self._gpu.write(buffer, numbers.astype(np.float32))
            if "bias" in self._stale:
                bias = self._settings["bias"][slots].astype(np.float32)
                self._gpu.write(buffer, bias, 4 * ROW * chunk.slots)
        self._stale.clear()


def halves(numbers: NDArray[np.float64]) -> Floats:
    """Each number as the nearest float32 below it, and the rest: (..., 2)."""
    upper = numbers.astype(np.float32)
    upper = np.where(upper > numbers, np.nextafter(upper, np.float32(-1)), upper)
    return np.stack([upper, (numbers - upper).astype(np.float32)], -1)
