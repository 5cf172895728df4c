"""The native engine: the decoder of generation/csrc, which knows neither Python nor PyTorch, by ctypes."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import sys
import threading
from array import array
from collections.abc import Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shakespeare.attention_ext import default_tile, extension, processor
from shakespeare.attention_ext.build.structs import structure
from shakespeare.attention_ext.parts import resolve_simd
from shakespeare.generation.engines.engine import EngineOptions, Tokens, rows_of
from shakespeare.generation.logprobs import check_top
from shakespeare.generation.sampling import OFF, Sampling
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.draft import MACROS, Draft
from shakespeare.model.files import is_mapped

if TYPE_CHECKING:
    from shakespeare.attention_ext.build.recipes import Recipe
    from shakespeare.model.gpt import GPT

# What a failure of each kind in csrc/api.h raises.
FAILURES = {1: ValueError, 2: MemoryError, 3: RuntimeError}


HEADER = Path(__file__).parent.parent / "csrc" / "api.h"
Span = structure(HEADER.parent / "team.h", "Span")


# What the C++ takes from Python's tables: see csrc/sampling.h and csrc/cuda/ngrams_table.h.
DEFINES = (
    f"-DSAMPLING_NUMBERS={','.join(f'{name}={off}' for name, off in OFF.items())}",
    *(f"-D{name}={number}" for name, number in MACROS.items()),
)
# How ctypes names the types of its signatures; pointers to anything else are addresses.
TYPES: dict[str, Any] = {
    "void": None,
    "bool": c_bool,
    "double": c_double,
    "int64_t": c_int64,
    "const char*": c_char_p,
}


def signatures() -> dict[str, tuple[Any, list[Any]]]:
    """The functions of csrc/api.h: what each returns, and takes."""
    declared = re.findall(r"^([\w ]+\*?) (\w+)\(([^)]*)\);", HEADER.read_text("utf-8"), re.M)
    result = {}
    for returned, name, parameters in declared:
        types = [parameter.rpartition(" ")[0].strip() for parameter in parameters.split(",") if parameter]
        result[name] = (TYPES.get(returned, c_void_p), [TYPES.get(known, c_void_p) for known in types])
    return result


def recipe(simd: str = "auto") -> Recipe:
    """How the library is compiled. Raises as recipes.kernels() does."""
    from shakespeare.attention_ext.build import recipes  # a wheel needs no compiler's

    return recipes.library("decoder", ("model", "generation"), simd, DEFINES)


@functools.cache
def library(simd: str = "auto") -> ctypes.CDLL:
    """The library of csrc/ over one of SIMD, compiled if need be. Raises as extension.load() does."""
    loaded = extension.load_library("decoder", recipe, simd)

    def checked(result: Any, function: object, arguments: object) -> Any:
        """The result of a function that may fail. Raises ValueError naming the wrong argument."""
        if not result:
            kind = c_int()
            message = loaded.decoder_error(byref(kind)).decode()
            raise FAILURES[kind.value](message)
        return result

    for name, (returned, parameters) in signatures().items():
        function = getattr(loaded, name)
        function.restype = returned
        function.argtypes = parameters
        if returned in (c_bool, c_void_p):
            function.errcheck = checked
    return loaded


class Decoder:
    """An Engine that holds the packed weights and the slots' caches. Its calls take turns.

    draft: what guesses the next tokens.
    """

    name = "native"
    device = "cpu"
    fast_in_step = False
    tokens_at_once = 256

    def __init__(self, model: Checkpoint | GPT, options: EngineOptions, draft: Draft | None = None) -> None:
        c = model.config
        self.config = c
        self.slots = options.slots
        self.capacity = options.context(c)
        # PyTorch's number where it is imported; PyTorch does not know a container's quota
        of_torch = getattr(sys.modules.get("torch"), "get_num_threads", processor.threads)
        self.threads = min(of_torch(), processor.cores()) if options.threads is None else options.threads
        helpers = resolve_simd(options.simd)
        # Each thread calls the kernel itself, so the tile is one thread's.
        tuned = default_tile.tile(helpers, 1, c.head_dim, self.capacity, causal=True)
        tile = options.br or tuned[0], options.bc or tuned[1]
        self._lock = threading.Lock()
        self._c = library(helpers)
        self.description = extension.describe_helpers(self._c.decoder_simd_name().decode(), self.threads)
        shape = (c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.tanh_gelu, c.window or 0)
        room = self.slots, self.capacity, self.threads, processor.caches()[-1].size
        tensors = dict(model.weights)
        for tensor, data in tensors.items():
            if data.dtype != "float32":
                raise ValueError(f"{tensor} is {data.dtype}; it must be float32")
            if not data.flags.c_contiguous and not data.flags.f_contiguous:
                raise ValueError(f"{tensor} has gaps; it or its transpose must be contiguous")
        self._handle = self._c.decoder_open(
            integers(shape),
            integers((*tile, *room)),
            options.weights.encode(),
            options.kv_cache.encode(),
            str(options.row.operator).encode(),
            len(tensors),
            (c_char_p * len(tensors))(*(name.encode() for name in tensors)),
            (c_void_p * len(tensors))(*(tensor.ctypes.data for tensor in tensors.values())),
            integers([tensor.size for tensor in tensors.values()]),
            integers([(not t.flags.c_contiguous) + 2 * is_mapped(t) for t in tensors.values()]),
        )
        self.free = list(range(self.slots))
        for slot in self.free:
            self.set_sampling(slot, Sampling())
        self.set_draft(draft)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._c.decoder_close(self._handle)

    def __reduce__(self) -> Any:
        raise TypeError("a Decoder cannot be copied")

    def set_sampling(self, slot: int, sampling: Sampling, logprobs: int | None = None) -> None:
        numbers = (c_double * len(OFF))(*sampling.numbers)
        tokens, biases = zip(*sampling.logit_bias) if sampling.logit_bias else ((), ())
        added = (c_double * len(biases))(*biases)
        top = alternatives("logprobs", logprobs)
        with self._lock:
            self._c.decoder_set_sampling(
                self._handle, slot, numbers, len(tokens), integers(tokens), added, top
            )

    def take_logprobs(self, slot: int) -> list[tuple[int, float, list[tuple[int, float]]]]:
        rows = (list(zip(*row)) for row in zip(*(a.tolist() for a in self.take_logprob_arrays(slot))))
        return [(*first, [pair for pair in top if pair[0] >= 0]) for first, *top in rows]

    def take_logprob_arrays(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The same as arrays (tokens, 1 + top): tokens, -1 where an alternative lacks; and logprobs."""
        count, top = c_int64(), c_int64()
        with self._lock:
            self._c.decoder_take_logprobs(self._handle, slot, byref(count), byref(top))
            shape = count.value, 1 + top.value
            tokens = np.empty(shape, np.int64)
            logprobs = np.empty(shape)
            self._c.decoder_fetch_logprobs(self._handle, top, tokens.ctypes.data, logprobs.ctypes.data)
        return tokens, logprobs

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        with self._lock:
            self._c.decoder_begin(
                self._handle, slot, len(ids), integers(ids), continues, alternatives("top", top)
            )

    def read(self, slot: int, seconds: float = math.inf) -> bool:
        done = c_bool()
        with self._lock:
            self._c.decoder_read_for(self._handle, slot, seconds, byref(done))
        return done.value

    def drop(self, slot: int) -> None:
        with self._lock:
            self._c.decoder_drop(self._handle, slot)

    def write(self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None) -> Tokens:
        numbers = rows_of(uniforms, len(slots))
        written = c_int64()
        rows, count = numbers.shape
        tokens = np.empty((rows, count), np.int64)
        limit = None if seconds is None else byref(c_double(seconds))
        arrays = (integers(slots), rows, numbers.ctypes.data, limit, tokens.ctypes.data, byref(written))
        with self._lock:
            self._c.decoder_write_rows(self._handle, count, *arrays)
        return tokens[: written.value]

    def set_draft(self, draft: Draft | None) -> None:
        """Guess tokens by this draft from now on, or not at all. It changes no text."""
        tables = (None, None) if draft is None else (draft.tags.ctypes.data, draft.pairs.ctypes.data)
        with self._lock:
            self._c.decoder_set_draft(self._handle, *tables)
        self.draft = draft

    def copy(self, source: int, *targets: int) -> None:
        with self._lock:
            for target in targets:
                self._c.decoder_copy(self._handle, source, target)

    def logits(self, slot: int) -> list[float]:
        logits = (c_float * self.config.vocab_size)()
        with self._lock:
            self._c.decoder_logits(self._handle, slot, logits)
        return list(logits)

    def record(self, on: bool) -> None:
        """Switch the recording of spans on or off; it is off at first."""
        with self._lock:
            self._c.decoder_record(self._handle, on)

    def spans(self) -> list[tuple[str, int, int, int]]:
        """(kind, thread, begin, end) of each span since the last call, in nanoseconds; 0: the caller."""
        count = c_int64()
        spans = POINTER(Span)()
        with self._lock:
            self._c.decoder_take_spans(self._handle, byref(count), byref(spans))
            return [(s.kind.decode(), s.thread, s.begin, s.end) for s in spans[: count.value]]


def integers(numbers: Sequence[int]) -> ctypes.Array[c_int64]:
    """An array of numbers for the library. Raises ValueError for one that does not fit 64 bits."""
    try:
        return (c_int64 * len(numbers)).from_buffer(array("q", numbers)) if numbers else (c_int64 * 0)()
    except OverflowError:
        raise ValueError(f"a number in {list(numbers)!r:.100} does not fit 64 bits") from None


def alternatives(name: str, number: int | None) -> int:
    """NO_LOGPROB of csrc/sampling.h for None, else the number. Raises as check_top() does."""
    check_top(name, number)
    return -1 if number is None else number
