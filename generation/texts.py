"""Text from a model: generate() writes one text, complete() writes many through a Writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shakespeare.attention_ext.checks import none_is_default, truth
from shakespeare.attention_ext.parts import BuildError, CachePrecision
from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Request, Text, Writer
from shakespeare.model.checkpoint import Checkpoint, loaded
from shakespeare.model.config import GPTConfig
from shakespeare.model.tokenizer import Tokenizer

AT_ONCE = 32  # texts that are written together, for each thread
# Of a GPU's memory, for the caches of an engine. To read so much takes any GPU 3 ms or more, a hundred times
# the latencies of a step, so that more texts at once would gain a percent.
GPU_SHARE = 8
MOST_CACHE_BYTES = 2**31  # of all texts together, unless AT_ONCE texts for one thread need more


def slots_for(
    texts: int,
    threads: int,
    config: GPTConfig,
    capacity: int,
    kv_cache: CachePrecision,
    device: str = "cpu",
) -> tuple[int, int]:
    """(texts at once, slots of the engine) for this number of texts with one prompt.

    capacity: tokens of context of each text. If not all texts are written at once, one more slot keeps the
    prompt for texts that join later. Raises BuildError if there is no GPU for device 'cuda'; 'webgpu' is as
    'cpu' then.
    """
    cache_bytes = kv_cache.bytes * 2 * config.n_layer * config.n_embd * capacity  # K and V of a text
    if device == "cuda":
        from shakespeare.generation.engines import cuda

        at_once = min(texts, max(1, cuda.gpu().memory // GPU_SHARE // cache_bytes))
    elif device == "webgpu" and has_gpu():
        at_once = min(texts, max(AT_ONCE, MOST_CACHE_BYTES // cache_bytes))
    else:
        at_once = min(texts, AT_ONCE * threads, max(AT_ONCE, MOST_CACHE_BYTES // cache_bytes))
    return at_once, at_once + (texts > at_once)


def has_gpu() -> bool:
    """Whether WebGPU finds a GPU that is not the CPU."""
    from shakespeare.attention_ext.webgpu.gpu import opened

    try:
        return not opened().adapter.is_cpu
    except BuildError:
        return False


class StopFilter:
    """Passes text on until a stop string appears. Text that may begin a stop string is held back.

    stop: non-empty strings; Request checks them.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop, self._held = tuple(stop), ""
        self.found: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """Take more text; return what may be shown now. Sets `found` at a stop string."""
        if not self.stop:
            return text
        self._held += text
        found = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.found = min(found)
            return self._release(at)
        longest = max(
            (
                n
                for s in self.stop
                for n in range(1, min(len(s), len(self._held) + 1))
                if self._held.endswith(s[:n])
            ),
            default=0,
        )
        return self._release(len(self._held) - longest)

    def end(self) -> str:
        """Return the text held back, as no stop string follows; empty after a stop string."""
        return "" if self.found else self._release(len(self._held))

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released


class Completion:
    """The text of a request, without the prompt, with its number of tokens and its times.

    number: the request's, from 0. pieces: of the text; a caller that streams them clears the list, so that
    an endless text takes no memory. finish_reason: 'length' or 'stop'; '' while the text grows. stopped_by:
    the stop string that ended the text; the text ends before it. The seconds are those of writer.Text.
    """

    def __init__(self, request: Request, number: int, tokenizer: Tokenizer) -> None:
        self.request, self.number = request, number
        self.pieces: list[str] = []
        self.finish_reason = self.stopped_by = ""
        self.new_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._decoder = tokenizer.decoder()
        self._filter = StopFilter([tokenizer.normal(text) for text in request.stop])

    @property
    def text(self) -> str:
        """The whole text, or the part since `pieces` was cleared."""
        return "".join(self.pieces)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding."""
        return self.new_tokens / max(self.decode_seconds, 1e-9)

    @property
    def ended(self) -> bool:
        """Whether a stop string was found or max_new_tokens is reached."""
        return bool(self._filter.found) or self.new_tokens == self.request.max_new_tokens

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens, up to one that completes a stop string."""
        if not self.request.stop:
            self.new_tokens += len(tokens)
            return self._show(self._decoder.feed_all(tokens))
        for token in map(int, tokens):
            self.new_tokens += 1
            self._show(self._filter.feed(self._decoder.feed(token)))
            if self._filter.found:
                return

    def end(self) -> None:
        """Append what was held back. The decoder's last characters may complete a stop string."""
        if not self._filter.found:
            self._show(self._filter.feed(self._decoder.end()) + self._filter.end())
        self.finish_reason = "stop" if self._filter.found else "length"
        self.stopped_by = self._filter.found or ""

    def _show(self, text: str) -> None:
        if text:
            self.pieces.append(text)


def complete(
    writer: Writer, tokenizer: Tokenizer, requests: Iterable[Request]
) -> Iterator[tuple[Completion, str]]:
    """Write all requests, as many at once as the writer has slots. Yield each completion with its new text.

    A request joins as soon as a slot is free; with an engine that is `fast_in_step`, when all slots are free.
    Pieces of different completions alternate. A finished completion is yielded once more, with an empty text.
    After any end the writer holds no text.
    Raises TypeError if writer is no Writer, ValueError if it holds other texts, and as Writer.join() does.
    """
    if not isinstance(writer, Writer):
        raise TypeError(f"writer is a {type(writer).__name__}; it must be Writer(open_engine(model))")
    if writer.texts:
        raise ValueError(f"writer holds {len(writer.texts)} texts; it must hold none")
    waiting = enumerate(requests)
    growing: dict[Text, Completion] = {}

    def grown(text: Text, tokens: Sequence[int] | NDArray[Any]) -> Iterator[tuple[Completion, str]]:
        """Append tokens. At its end, let the text leave."""
        done = growing[text]
        before = len(done.pieces)
        done.add(tokens)
        ended = done.ended
        if ended:
            done.end()
            done.prefill_seconds, done.decode_seconds = text.prefill_seconds, text.decode_seconds
            del growing[text]
            writer.leave(text)
        if piece := "".join(done.pieces[before:]):
            yield done, piece
        if ended:
            yield done, ""

    try:
        while True:
            may_join = not (growing and writer.engine.fast_in_step)
            while may_join and writer.free and (following := next(waiting, None)):
                number, request = following
                text = writer.join(request)
                growing[text] = Completion(request, number, tokenizer)
                if growing[text].ended:  # max_new_tokens is 0
                    yield from grown(text, [])
            if not growing:
                return
            for text, tokens in writer.step():
                # A text that is alone is streamed token by token. In a batch this would cost too much.
                for some in (tokens,) if len(growing) > 1 else ([token] for token in tokens.tolist()):
                    yield from grown(text, some)
                    if text not in growing:
                        break
    finally:
        for text in list(writer.texts):
            writer.leave(text)


# The arguments that generate() passes to open_engine().
ENGINE_OPTIONS = ("part", "simd", "br", "bc", "weights", "kv_cache", "device", "kernel", "threads", "draft")


@none_is_default
def generate(
    checkpoint: Checkpoint | str | Path,
    prompt: str = "\n",
    max_new_tokens: int | None = None,
    *,
    engine: str | Engine | None = None,
    seed: int = 1337,
    stop: str | Sequence[str] = (),
    context: str = "slide",
    use_cache: bool = True,
    stream: bool = False,
    **options: Any,
) -> str | Iterator[str]:
    """The text that continues `prompt`, without the prompt. With stream=True an iterator over its pieces.

    checkpoint: a loaded model, or a name for load(), which then loads it at each call.
    max_new_tokens: the most tokens to write; the model's block size by default.
    engine: a name, or an engine that open_engine() opened for this model. An open engine serves many texts,
    with the options that it was opened with.
    seed: 0 to 2**64 - 1. The same seed gives the same text with every part and engine of a device, unless
        kv_cache is 'bf16', which rounds their results.
    stop: a string or several; the text ends before the first one that appears.
    context, use_cache: see writer.Request.
    options: ENGINE_OPTIONS as in open_engine(), and those of Sampling. None stands for each default.
    Raises ValueError or TypeError naming the wrong argument, before anything is written, and BuildError if
    the kernels cannot be compiled.
    """
    chosen = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
    settings = {each.name for each in fields(Sampling)}
    if unknown := [name for name in options if name not in settings]:
        raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
    checkpoint, sampling = loaded(checkpoint), Sampling(**options)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is a {type(prompt).__name__}; it must be a string")
    if max_new_tokens is None:
        max_new_tokens = checkpoint.config.block_size
    ids, stream = checkpoint.tokenizer.encode(prompt), truth("stream", stream)
    request = Request(ids, seed, sampling, max_new_tokens, stop, context, use_cache)
    if engine is None or isinstance(engine, str) or not hasattr(engine, "config"):
        capacity = capacity_for(checkpoint, request)
        engine = open_engine(checkpoint, engine, capacity=capacity, **chosen)  # type: ignore[arg-type]
    if engine.config != checkpoint.config:
        raise ValueError("engine was opened for another model; it must be one for the checkpoint's")
    writer = Writer(engine)
    writer.check(request)

    def pieces() -> Iterator[str]:
        for completion, piece in complete(writer, checkpoint.tokenizer, [request]):
            completion.pieces.clear()
            if piece:
                yield piece

    return pieces() if stream else "".join(pieces())


def capacity_for(checkpoint: Checkpoint, request: Request) -> int:
    """Tokens of context that a request needs, at most the model's block size."""
    longest = checkpoint.config.block_size
    most = longest if request.max_new_tokens is None else request.max_new_tokens
    return min(longest, max(1, len(request.ids) + most))
