"""Text from a model: generate() writes one text, complete() writes many through a Writer."""

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from shakespeare.attention_ext import processor
from shakespeare.attention_ext.checks import none_is_default, truth, type_text, whole_number
from shakespeare.attention_ext.parts import BuildError
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import NONE, Request, Text
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Writer
from shakespeare.model.checkpoint import Checkpoint, loaded
from shakespeare.model.config import GPTConfig
from shakespeare.model.tokenizer import Tokenizer

# What generate() passes on to the engine.
ENGINE_OPTIONS = {field.name for field in fields(EngineOptions)} - {"engine", "slots", "capacity"}
AT_ONCE = 32  # texts that are written together, for each thread
# A share of a GPU's memory, for caches. Reading it dwarfs a step's latencies: more texts gain a percent.
GPU_SHARE = 8
MOST_CACHE_BYTES = 2**31  # of all texts together, unless AT_ONCE texts for one thread need more


def slots_for(texts: int, config: GPTConfig, options: EngineOptions) -> tuple[int, int]:
    """(texts at once, slots of the engine) for this number of texts with one prompt.

    If not all texts fit at once, one more slot keeps the prompt. 'webgpu' is as 'cpu'. Raises BuildError
    without a GPU for 'cuda'.
    """
    tokens = 3 * config.window if config.window else options.context(config)  # of an endless text at most
    numbers = 2 * config.n_layer * config.n_embd * tokens  # K and V of a text
    cache_bytes = options.kv_cache.bytes * numbers
    limit = max(AT_ONCE, MOST_CACHE_BYTES // cache_bytes)
    if options.device == "cuda":
        from shakespeare.attention_ext.cuda import driver

        limit = max(1, driver.gpu().memory // GPU_SHARE // cache_bytes)
    elif options.device == "cpu" or not has_gpu():
        limit = min(limit, AT_ONCE * (options.threads or processor.threads()))
    at_once = min(texts, limit)
    return at_once, at_once + (texts > at_once)


def has_gpu() -> bool:
    """Whether WebGPU finds a GPU that is not the CPU."""
    from shakespeare.attention_ext.webgpu.driver import opened

    try:
        return not opened().adapter.is_cpu
    except BuildError:
        return False


class StopFilter:
    """Passes text on until a stop string; holds back its possible beginning. stop: non-empty strings."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self._pending = ""
        self.found: str | None = None  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """Take more text; return what may be shown now. Sets `found` at a stop string."""
        if not self.stop:
            return text
        self._pending += text
        places = [(self._pending.find(s), s) for s in self.stop if s in self._pending]
        if places:
            at, self.found = min(places)
            return self._release(at)
        begun = range(max(0, len(self._pending) + 1 - max(map(len, self.stop))), len(self._pending))
        kept = (at for at in begun if any(s.startswith(self._pending[at:]) for s in self.stop))
        return self._release(next(kept, len(self._pending)))

    def end(self) -> str:
        """Return the text held back, as no stop string follows; empty after a stop string."""
        return "" if self.found else self._release(len(self._pending))

    def _release(self, length: int) -> str:
        released = self._pending[:length]
        self._pending = self._pending[length:]
        return released


class Completion(Text):
    """A text of a Writer in characters, without the prompt.

    number: the request's, from 0. shown_tokens: those that add() took. pieces: of the text; a caller that
    streams may clear the list to save memory. finish_reason: 'length' or 'stop'; '' while the text grows.
    stopped_by: the stop string that ended the text; the text ends before it.
    """

    def __init__(self, request: Request, number: int, tokenizer: Tokenizer) -> None:
        super().__init__(request)
        self.number = number
        self.shown_tokens = 0
        self.pieces: list[str] = []
        self.finish_reason = ""
        self.stopped_by = ""
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

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Show the Writer's new tokens up to one that completes a stop string; return the added text."""
        if not self.request.stop:
            self.shown_tokens += len(tokens)
            return self._show(self._decoder.feed_all(tokens))
        pieces = []
        for token in map(int, tokens):
            if self._filter.found:
                break
            self.shown_tokens += 1
            pieces.append(self._filter.feed(self._decoder.feed(token)))
        if self._filter.found:
            self.new_tokens = self.shown_tokens
            self.remaining = 0
        return self._show("".join(pieces))

    def end(self) -> str:
        """Show what was held back; return it. The decoder's last characters may complete a stop string."""
        rest = "" if self._filter.found else self._filter.feed(self._decoder.end()) + self._filter.end()
        self.finish_reason = "stop" if self._filter.found or self.at_eos else "length"
        self.stopped_by = self._filter.found or ""
        return self._show(rest)

    def _show(self, text: str) -> str:
        if text:
            self.pieces.append(text)
        return text


def complete(
    writer: Writer, tokenizer: Tokenizer, requests: Iterable[Request]
) -> Iterator[tuple[Completion, str]]:
    """Write all requests, as many at once as the writer has slots. Yield each completion with its new text.

    A request joins as soon as a slot is free; with an engine that is `fast_in_step`, when no text is left.
    Pieces of different completions alternate. A finished completion is yielded once more, with an empty text.
    After any end the writer holds no text. Raises TypeError if writer is no Writer, ValueError if it holds
    other texts, and as Writer.join() does.
    """
    if not isinstance(writer, Writer):
        raise TypeError(f"writer is {type_text(writer)}; it must be Writer(open_engine(model))")
    if writer.texts:
        raise ValueError(f"writer holds {len(writer.texts)} texts; it must hold none")
    waiting = enumerate(requests)
    growing = cast("dict[Completion, None]", writer.texts)
    try:
        while True:
            slots = 0
            if writer.admits:
                slots = writer.free
            elif not growing:
                slots = 1  # join() says that other Writers have all slots
            for number, request in itertools.islice(waiting, slots):
                writer.join(Completion(request, number, tokenizer))
            if not growing:
                return
            new = dict(writer.step())
            alone = len(growing) == 1
            for completion in list(growing):
                tokens = new.get(completion, NONE)
                # A text that is alone is streamed token by token. In a batch this would cost too much.
                for shown in ([token] for token in tokens.tolist()) if alone else (tokens,):
                    piece = completion.add(shown)
                    if piece:
                        yield completion, piece
                if completion.ended:
                    piece = completion.end()
                    if piece:
                        yield completion, piece
                    writer.leave(completion)
                    yield completion, ""
    finally:
        for text in list(writer.texts):
            writer.leave(text)


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
    ignore_eos: bool = False,
    stream: bool = False,
    **options: Any,
) -> str | Iterator[str]:
    """The text that continues `prompt`, without the prompt. With stream=True an iterator over its pieces.

    checkpoint: a loaded model, or a name for load(), which then loads it at each call.
    prompt: an empty one stands for a line end.
    max_new_tokens: the most tokens to write; the model's block size by default and for -1.
    engine: a name, or an engine that open_engine() opened for this model, with its own options; it serves
    many texts, as many streams and threads at once as it has slots.
    seed, stop, context, use_cache, ignore_eos: as in Request; a random seed is logged. The same seed gives
    the same text with every part and engine of a device, unless kv_cache is 'bf16', which rounds their
    results.
    options: fields of Sampling, and of EngineOptions but slots and capacity. None stands for each default.
    Raises ValueError or TypeError naming the wrong argument, before anything is written, and BuildError if
    the kernels cannot be compiled.
    """
    chosen = {name: options.pop(name) for name in ENGINE_OPTIONS if name in options}
    settings = {field.name for field in fields(Sampling)}
    for name in options:
        if name not in settings:
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
    checkpoint = loaded(checkpoint)
    sampling = Sampling(**options)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is {type_text(prompt)}; it must be a string")
    if max_new_tokens is None or whole_number("max_new_tokens", max_new_tokens) == -1:
        max_new_tokens = checkpoint.config.block_size
    request = Request(
        checkpoint.tokenizer.encode(prompt or "\n"),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=stop,
        context=context,
        use_cache=use_cache,
        ignore_eos=ignore_eos,
    )
    stream = truth("stream", stream)
    if request.seed != seed:
        logging.getLogger(__name__).info("seed is %d", request.seed)
    if engine is None or isinstance(engine, str) or not hasattr(engine, "config"):
        capacity = capacity_for(checkpoint, request)
        engine = open_engine(checkpoint, engine, capacity=capacity, slots=1, **chosen)  # type: ignore[arg-type]
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
    limit = longest if request.max_new_tokens is None else request.max_new_tokens
    return min(longest, max(1, len(request.ids) + limit))
