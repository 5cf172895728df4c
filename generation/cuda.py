"""The cuda engine: model, caches and the choice of a token in one launch, csrc/cuda/decoder.cu.

It needs cuda-core and a GPU with clusters of blocks (compute capability 9.0 or more), but no PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_ext.build import nvrtc
from attention_ext.parts import BuildError, CachePrecision, Precision
from generation import logprobs
from generation.engine import rows_of
from generation.logprobs import TokenLogprob
from generation.sampling import NUMBERS, Sampling
from model.checkpoint import Checkpoint, bf16_bits
from model.config import EMBEDDING, GPTConfig

if TYPE_CHECKING:
    from model.gpt import GPT

Floats = NDArray[np.float32]

SOURCES = Path(__file__).resolve().parent / "csrc" / "cuda"
CAPABILITY = (9, 0)  # the least that has clusters
CLUSTERS = (16, 8)  # blocks of a cluster, the best first; a GPU may refuse 16
THREADS, LANES = 256, 32  # of a block, of a warp
TEAM, STRIP = (
    8,
    2,
)  # warps that attend to a text together, and a lane's keys at a time: best of 2, 4, 8 on an H100
MOST_TEXTS = 5  # of a pass: what shared memory has room for beside shakes256 in float32
WEIGHT_BITS = {Precision.FP32: 32, Precision.BF16: 16}  # int8 has no kernel
FORMATS = {CachePrecision.FP32: 0, CachePrecision.BF16: 1}  # FORMAT of attention_ext/csrc/cuda/call.h
HEAD_DIMS = (4, 8, 16, 32, 64, 128)  # a power of two of lanes reads a key
BARRIERS, SETTINGS = 4, len(NUMBERS) + 1  # of decoder.cu; a text's settings, and whether logits have a bias
# What decoder.cu counts the cycles of, in the words of gpt.py profile.
PHASES = ("embedding", "QKV", "attention", "projection", "MLP up", "MLP down", "head", "sampling", "waiting")
PROMPT_TOKENS = 512  # of a prompt in a launch, which takes a few milliseconds
SECONDS = 0.005  # of a launch by default, so that Ctrl-C and a client that leaves take effect soon
FIRST_PASS_SECONDS = 2e-5  # the guess before one was measured
TEXT = np.dtype([(name, np.int32) for name in ("slot", "length", "token")])  # struct Text


class Work(ctypes.Structure):
    """struct Work of csrc/cuda/decoder.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "tokens", "positions", "keys", "values", "logits")),
        *((name, ctypes.c_void_p) for name in ("every", "seen", "written", "sampling", "bias", "texts")),
        *((name, ctypes.c_void_p) for name in ("uniforms", "chosen", "cycles")),
        *((name, ctypes.c_int) for name in ("count", "rows", "capacity")),
        ("scale", ctypes.c_float),
    ]


class Unfit(ValueError):
    """A model, a precision or a GPU that the cuda engine does not take."""


@dataclass(frozen=True)
class Layout:
    """How a cluster of `blocks` holds a model: what decoder.cu is compiled with.

    clocks: whether it counts the cycles of its phases.
    """

    config: GPTConfig
    blocks: int
    weights: Precision
    kv_cache: CachePrecision
    clocks: bool = False

    @property
    def head_rows(self) -> int:
        """A block's rows of the head, of which the last block's may lie beyond the vocabulary."""
        return -(-self.config.vocab_size // self.blocks)

    @property
    def image(self) -> np.dtype:
        """struct Weights, a block's share of the weights."""
        c, share = self.config, self.config.n_embd // self.blocks
        weight = np.float32 if self.weights is Precision.FP32 else np.uint16
        rows = {"qkv": 3 * share, "proj": share, "fc": 4 * share, "out": share}
        layer = [(name, weight, (n, c.n_embd * (4 if name == "out" else 1))) for name, n in rows.items()]
        norm = [(name, np.float32, c.n_embd) for name in ("gain", "bias")[: 1 + c.bias]]
        vectors: list[Any] = [(name, norm) for name in ("ln_1", "ln_2")]
        if c.bias:
            vectors += [(name, np.float32, n) for name, n in rows.items()]
        fields: list[Any] = [("layers", layer, c.n_layer), ("head", weight, (self.head_rows, c.n_embd))]
        return padded([*fields, ("vectors", padded(vectors), c.n_layer), ("ln_f", norm)])

    def shared(self, texts: int) -> int:
        """Bytes of struct Shared, a block's shared memory, for passes of this many texts."""
        c = self.config
        units = c.n_head * max(1, self.blocks // c.n_head)
        choice = -(-self.blocks * self.head_rows // 2) * 2 + 2 * c.vocab_size
        various = -(-max(4 * c.n_embd, TEAM * (c.head_dim + 4), choice) // 4) * 4
        qkv = -(-units // self.blocks) * 3 * c.head_dim
        floats = 2 * c.n_embd + qkv + various + units * (c.head_dim + 2)
        size = texts * (4 * floats + 8 * SETTINGS + 16) + 8 * (BARRIERS + self.clocks * (len(PHASES) + 1))
        return self.image.itemsize + -(-size // 16) * 16

    def most_texts(self, shared: int) -> int:
        """The most texts of a pass in so many bytes of shared memory; 0 if the model does not fit."""
        rows = -(-4 * self.config.n_embd // self.blocks * LANES // THREADS)  # a warp's, of the widest matrix
        most = min(MOST_TEXTS, LANES // rows)
        return max((texts for texts in range(1, most + 1) if self.shared(texts) <= shared), default=0)

    def source(self, texts: int, capability: tuple[int, int]) -> nvrtc.Source:
        """The kernel for passes of this many texts."""
        c = self.config
        macros = {"FORMAT": FORMATS[self.kv_cache], "WEIGHT_BITS": WEIGHT_BITS[self.weights]}
        macros |= {"LAYERS": c.n_layer, "HEADS": c.n_head, "HEAD_DIM": c.head_dim, "VOCAB": c.vocab_size}
        macros |= {"BLOCKS": self.blocks, "TEXTS": texts, "THREADS": THREADS, "TEAM": TEAM, "STRIP": STRIP}
        macros |= {"BIAS": c.bias, "CLOCKS": self.clocks, "SHARED_BYTES": self.shared(texts)}
        arch = f"sm_{capability[0]}{capability[1]}"
        return nvrtc.Source("decoder.cu", arch, {name: int(n) for name, n in macros.items()}, SOURCES)

    def pack(self, tensors: Mapping[str, Floats]) -> NDArray[Any]:
        """The weights of each block, (blocks,) of `image`."""
        c = self.config
        made = np.zeros(self.blocks, self.image)

        def shares(tensor: Floats, parts: int = 1) -> Floats:
            """Each block's rows, its share of each of so many parts."""
            split = tensor.reshape(parts, self.blocks, -1, *tensor.shape[1:])
            return split.swapaxes(0, 1).reshape(self.blocks, -1, *tensor.shape[1:])

        def matrix(tensor: Floats, parts: int = 1) -> NDArray[Any]:
            rows = shares(tensor, parts)
            return rows if self.weights is Precision.FP32 else bf16_bits(rows)

        def fill_norm(norm: NDArray[Any], name: str) -> None:
            norm["gain"] = tensors[f"{name}.weight"]
            if c.bias:
                norm["bias"] = tensors[f"{name}.bias"]

        matrices = {"qkv": ("attn.c_attn", 3), "proj": ("attn.c_proj", 1)}
        matrices |= {"fc": ("mlp.c_fc", 1), "out": ("mlp.c_proj", 1)}
        for i in range(c.n_layer):
            layer, vectors, prefix = made["layers"][:, i], made["vectors"][:, i], f"transformer.h.{i}"
            for field, (name, parts) in matrices.items():
                layer[field] = matrix(tensors[f"{prefix}.{name}.weight"], parts)
                if c.bias:
                    vectors[field] = shares(tensors[f"{prefix}.{name}.bias"], parts)
            for name in ("ln_1", "ln_2"):
                fill_norm(vectors[name], f"{prefix}.{name}")
        fill_norm(made["ln_f"], "transformer.ln_f")
        head = np.zeros((self.blocks * self.head_rows, c.n_embd), np.float32)
        head[: c.vocab_size] = tensors[EMBEDDING]
        made["head"] = matrix(head)
        return made


def padded(fields: list[Any]) -> np.dtype:
    """A record of these fields that ends at a multiple of 16 bytes, the size of a vector load."""
    size = np.dtype(fields).itemsize
    return np.dtype([*fields, ("padding", np.uint8, -size % 16)])


def layout_for(config: GPTConfig, weights: Precision, kv_cache: CachePrecision, on: Any) -> Layout:
    """How a Gpu holds a model. Raises Unfit, in a sentence, if it does not."""
    if weights not in WEIGHT_BITS:
        raise Unfit(f"the cuda engine has weights in {' and '.join(WEIGHT_BITS)}, not {weights}")
    if on.capability < CAPABILITY:
        has, least = (".".join(map(str, capability)) for capability in (on.capability, CAPABILITY))
        raise Unfit(f"the cuda engine needs compute capability {least}; {on.name} has {has}")
    if config.head_dim not in HEAD_DIMS:
        raise Unfit(f"the cuda engine takes heads of {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}")
    if config.n_embd % CLUSTERS[-1]:
        raise Unfit(f"the cuda engine takes n_embd of multiples of {CLUSTERS[-1]}, not {config.n_embd}")
    for blocks in CLUSTERS:
        made = Layout(config, blocks, weights, kv_cache)
        if config.n_embd % blocks == 0 and made.most_texts(on.shared) and on.clusters(made):
            return made
    raise Unfit(f"the model does not fit the shared memory of {CLUSTERS[0]} blocks of {on.name} in {weights}")


class Gpu:
    """The first GPU that CUDA shows: its primary context, which PyTorch uses too, and a stream of its own.

    capability: (major, minor). shared: the most bytes of shared memory for a block. hertz: its clock's.
    memory: its bytes.
    """

    def __init__(self) -> None:
        driver = _driver()
        _check(driver.cuInit(0))
        self._device = _check(driver.cuDeviceGet(0))
        self.name = _check(driver.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()
        self._context = _check(driver.cuDevicePrimaryCtxRetain(self._device))
        self.activate()
        self.stream = _check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{name}") for name in ("MAJOR", "MINOR"))
        self.capability = (major, minor)
        self.shared = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.hertz = 1000 * self._attribute("CLOCK_RATE")
        self.memory = int(_check(driver.cuDeviceTotalMem(self._device)))

    def _attribute(self, name: str) -> int:
        named = getattr(_driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return _check(_driver().cuDeviceGetAttribute(named, self._device))

    def activate(self) -> None:
        """Make the context the calling thread's."""
        _check(_driver().cuCtxSetCurrent(self._context))

    @functools.cache
    def kernel(self, layout: Layout, texts: int) -> tuple[Any, Any]:
        """The function for passes of so many texts, and the library that keeps it alive."""
        driver = _driver()
        function, library = load(layout.source(texts, self.capability), "decode")
        for name, value in (
            ("MAX_DYNAMIC_SHARED_SIZE_BYTES", layout.shared(texts)),
            ("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1),
        ):
            named = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
            _check(driver.cuFuncSetAttribute(function, named, value))
        return function, library

    def launch(self, layout: Layout, texts: int, clusters: int) -> Any:
        """The driver's description of a launch of so many clusters."""
        driver = _driver()
        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = clusters * layout.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes, config.hStream = layout.shared(texts), self.stream
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = layout.blocks, 1, 1
        attribute.value.clusterDim = size
        config.attrs, config.numAttrs = [attribute], 1
        return config

    @functools.cache
    def clusters(self, layout: Layout) -> int:
        """The most clusters that run at a time; 0 if the GPU takes none of this size."""
        texts = layout.most_texts(self.shared)
        most = _driver().cuOccupancyMaxActiveClusters
        error, count = most(self.kernel(layout, texts)[0], self.launch(layout, texts, 1))
        return 0 if error else count


def load(source: nvrtc.Source, name: str) -> tuple[Any, Any]:
    """A kernel of a source, compiled if need be, and the library that keeps it alive."""
    driver = _driver()
    library = _check(driver.cuLibraryLoadData(source.make(), [], [], 0, [], [], 0))
    return _check(
        driver.cuKernelGetFunction(_check(driver.cuLibraryGetKernel(library, name.encode())))
    ), library


def launch(function: Any, blocks: int, threads: int, stream: int, arguments: int) -> None:
    """Launch a kernel without shared memory. arguments: the address of those of its arguments."""
    _check(_driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0))


@functools.cache
def gpu() -> Gpu:
    """The GPU. Raises BuildError, in one line, if there is none or cuda-core is missing."""
    try:
        return Gpu()
    except RuntimeError as error:  # the driver's library is missing
        raise BuildError(f"device is 'cuda', and no GPU can be used: {str(error).splitlines()[0]}") from None


def _driver() -> Any:
    """The module cuda.bindings.driver. Raises BuildError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise nvrtc.missing("cuda.bindings is missing") from None
    return driver


def _check(result: tuple) -> Any:
    """The value of a call of the driver. Raises BuildError if it failed, MemoryError if memory is lacking."""
    error, *values = result
    if error != 0:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise MemoryError("the GPU's memory does not suffice")
        raise BuildError(f"device is 'cuda', and the driver failed: {error.name}")
    return values[0] if values else None


class Memory:
    """Bytes on the GPU, zero at first, or of the host where the GPU reaches them; freed with the object."""

    def __init__(self, size: int, host: bool = False) -> None:
        driver = _driver()
        self.size, self._free = size, driver.cuMemFreeHost if host else driver.cuMemFree
        if host:
            self.address = int(_check(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE)))
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        else:
            self.address = int(_check(driver.cuMemAlloc(size)))
            _check(driver.cuMemsetD8(self.address, 0, size))

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():  # the process frees it then
            self._free(self.address)


def settings_of(sampling: Sampling) -> list[float]:
    """A text's settings, as decoder.cu reads them."""
    return [float(getattr(sampling, name) or 0) for name in NUMBERS] + [float(bool(sampling.logit_bias))]


class Uniforms:
    """The numbers in [0, 1) of a seed, torch.rand's in float64: each call gives the next ones.

    To make a generator takes 0.2 ms, to seed one 3 us (Zen 3). So all texts share one for their first
    numbers, and only longer texts have their own.
    """

    _shared: Any = np.random.MT19937()
    _lock = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._seed = seed & 0xFFFFFFFF  # the bits that PyTorch uses
        self._own: Any = None
        self._given = 0  # raw numbers of the first call

    def __call__(self, count: int) -> NDArray[np.float64]:
        if self._given and self._own is None:
            self._own = np.random.MT19937()
            self._own._legacy_seeding(self._seed)
            self._own.random_raw(self._given, output=False)
        if self._own is not None:
            raw = self._own.random_raw(2 * count)
        else:
            with self._lock:
                self._shared._legacy_seeding(self._seed)
                raw = self._shared.random_raw(2 * count)
            self._given = 2 * count
        # The upper half of a number comes first. Reversed, it lies where a little-endian number has it.
        joined = raw[::-1].astype(np.uint32).view(np.uint64)[::-1]
        return (joined & np.uint64(2**53 - 1)) * 2.0**-53


class CudaEngine:
    """An Engine on the first GPU. Its calls take turns.

    A number is summed in the same order whatever else is written, so a text's bits do not depend on the
    batch. Prompts are read by the same kernel. clocks: whether cycles() has something to tell. The other
    arguments and the errors are those of open_engine(), and Unfit.
    """

    name, fast_in_step, tokens_at_once, threads = "cuda", False, 256, 1
    simd_name: str | None = None

    def __init__(
        self,
        model: Checkpoint | GPT,
        weights: Precision,
        kv_cache: CachePrecision,
        slots: int,
        capacity: int,
        clocks: bool = False,
    ) -> None:
        on = self._gpu = gpu()
        on.activate()
        c, tensors = model.config, model.weights
        self.config, self.slots, self.capacity = c, slots, capacity
        found = layout_for(c, weights, kv_cache, on)
        self._layout = Layout(c, found.blocks, weights, kv_cache, clocks)
        self._clusters, self._most_texts = on.clusters(found), self._layout.most_texts(on.shared)
        self._lock = threading.Lock()
        self._weights = self._uploaded(self._layout.pack(tensors))
        self._tokens = self._uploaded(tensors[EMBEDDING])
        self._positions = self._uploaded(tensors["transformer.wpe.weight"][:capacity])
        V, cached = (
            c.vocab_size,
            c.n_embd * c.n_layer * capacity * (4 if kv_cache is CachePrecision.FP32 else 2),
        )
        # Bytes of a slot of each array of struct Work.
        self._sizes = {"keys": cached, "values": cached, "logits": 4 * V, "seen": 4 * V, "written": 4 * V}
        self._sizes |= {"sampling": 8 * SETTINGS, "bias": 8 * V}
        self._held = {name: Memory(slots * size) for name, size in self._sizes.items()}
        self._given, self._staged = Memory(1 << 16, host=True), Memory(1 << 16)
        self._chosen, self._cycles = Memory(1 << 12, host=True), Memory(8 * len(PHASES), host=True)
        self._every = Memory(4)
        self._lengths = np.zeros(slots, np.int32)  # tokens in the cache
        self._pending = np.full(slots, -1, np.int32)  # the chosen token that is not yet read; -1 for none
        self._tops: list[int | None] = [None] * slots
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(slots)]  # not taken yet
        # Prompts to be read, how many of their tokens are; then as in begin().
        self._begun: dict[int, tuple[list[int], int, bool, int | None]] = {}
        self._pass_seconds = FIRST_PASS_SECONDS
        self._settings, self._settings_changed = np.tile(settings_of(Sampling()), (slots, 1)), True
        self._samplings = [Sampling()] * slots
        on.kernel(self._layout, 1)  # compiled now, not while the first text waits

    @property
    def description(self) -> str:
        """What computes the texts, in a line for people."""
        blocks = f"{self._clusters} clusters of {self._layout.blocks} blocks"
        return f"The whole model in one launch, part 4's attention, {blocks} on {self._gpu.name}"

    def uniforms(self, seed: int) -> Callable[[int], NDArray[np.float64]]:
        return Uniforms(seed)

    def set_sampling(self, slot: int, sampling: Sampling, logprobs: int | None = None) -> None:
        self._check_slot(slot)
        V = self.config.vocab_size
        for token, _ in sampling.logit_bias:
            if token >= V:
                raise ValueError(f"a token of logit_bias is {token}; it must be from 0 to {V - 1}")
        with self._lock:
            if sampling is not self._samplings[slot]:  # the texts of a job share theirs
                self._samplings[slot], self._settings[slot] = sampling, settings_of(sampling)
                self._settings_changed = True
                if sampling.logit_bias:
                    bias = np.zeros(V)
                    tokens, numbers = zip(*sampling.logit_bias)
                    bias[list(tokens)] = numbers
                    self._gpu.activate()
                    self._fill("bias", slot, bias)
            self._tops[slot], self._logprobs[slot] = logprobs, []

    def take_logprobs(self, slot: int) -> list[TokenLogprob]:
        with self._lock:
            taken, self._logprobs[slot] = self._logprobs[slot], []
        return taken

    def begin(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        self._check_slot(slot)
        if not 1 <= len(ids) <= self.capacity:
            raise ValueError(f"the number of tokens is {len(ids)}; it must be from 1 to {self.capacity}")
        if not (0 <= min(ids) and max(ids) < self.config.vocab_size):
            raise ValueError(f"ids has a token outside 0 .. {self.config.vocab_size - 1}")
        with self._lock:
            self._lengths[slot], self._pending[slot] = 0, -1
            self._begun[slot] = (list(ids), 0, continues, top)

    def read(self, slot: int, seconds: float = math.inf) -> bool:
        end = time.monotonic() + seconds
        with self._lock:
            if slot not in self._begun:
                raise ValueError(f"slot is {slot}; it must be one that was begun")
            self._gpu.activate()
            ids, done, continues, top = self._begun[slot]
            if done == 0 and not continues:
                self._logprobs[slot] = []
            while done < len(ids):
                if done and time.monotonic() >= end:
                    self._begun[slot] = (ids, done, continues, top)
                    return False
                some = ids[done : done + PROMPT_TOKENS]
                texts = np.empty(len(some), TEXT)
                texts["slot"], texts["token"], texts["length"] = slot, some, range(done, done + len(some))
                self._launch(texts, None, self._most_texts, 1, every=top is not None)
                if top is not None:
                    following = ids[done + 1 : done + 1 + len(some)]
                    rows = self._every_logits(len(some))[: len(following)]
                    self._logprobs[slot] += logprobs.of_logits(rows, following, top)
                done += len(some)
            del self._begun[slot]
            counts = np.bincount(ids, minlength=self.config.vocab_size).astype(np.int32)
            if continues:
                counts += self._fetched("seen", slot, np.int32)
            else:
                self._fill("written", slot, np.zeros_like(counts))
            self._fill("seen", slot, counts)
            self._lengths[slot] = len(ids)
        return True

    def drop(self, slot: int) -> None:
        with self._lock:
            self._begun.pop(slot, None)

    def write(
        self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None
    ) -> NDArray[np.int32]:
        at = np.array(slots, np.int64)
        numbers = rows_of(uniforms, len(at))
        if not ((numbers >= 0) & (numbers < 1)).all():
            raise ValueError("a uniform is outside [0, 1)")
        if seconds is not None and not seconds >= 0:
            raise ValueError("seconds must be at least 0")
        for slot in at[(at < 0) | (at >= self.slots)]:
            self._check_slot(slot)
        if len(np.unique(at)) < len(at):
            raise ValueError(f"slots is {list(slots)}; each must be named once")
        with self._lock:
            self._gpu.activate()
            texts = np.empty(len(at), TEXT)
            texts["slot"], texts["length"], texts["token"] = at, self._lengths[at], self._pending[at]
            held = texts["length"] + (texts["token"] >= 0)
            for wrong, state in ((held == 0, "first"), (held > self.capacity, "again: it is full")):
                if wrong.any():
                    raise ValueError(f"slot is {at[wrong][0]}; it must be read {state}")
            passes = -(-len(at) // (self._most_texts * self._clusters))  # of each cluster, for a row
            together = -(-len(at) // (passes * self._clusters))
            fit = (SECONDS if seconds is None else seconds) / (passes * self._pass_seconds)
            rows = int(min(len(numbers), max(1, fit), self.capacity + 1 - int(held.max())))
            clusters = min(self._clusters, -(-len(at) // together))
            scored = any(self._tops[slot] is not None for slot in slots)
            if self._settings_changed:
                self._fill("sampling", 0, self._settings)
                self._settings_changed = False
            start = time.perf_counter()
            chosen = self._launch(texts, numbers[:rows], together, clusters, scored)
            self._pass_seconds = (time.perf_counter() - start) / (rows * passes)
            self._lengths[at], self._pending[at] = held + rows - 1, chosen[-1]
            if scored:
                every = self._every_logits(chosen.size).reshape(*chosen.shape, -1)
                for i, slot in enumerate(slots):
                    if (top := self._tops[slot]) is not None:
                        self._logprobs[slot] += logprobs.of_logits(every[:, i], chosen[:, i].tolist(), top)
        if (chosen < 0).any():
            raise ValueError("logits hold NaN, or the largest is infinite; they must be numbers")
        return chosen

    def copy(self, source: int, *targets: int) -> None:
        for slot in (source, *targets):
            self._check_slot(slot)
        at = np.setdiff1d(np.array(targets, np.int64), [source])
        with self._lock:
            self._gpu.activate()
            for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
                self._copy_to_run(source, run)
            self._lengths[at], self._pending[at] = self._lengths[source], self._pending[source]
            for slot in self._begun.keys() & set(targets):
                del self._begun[slot]

    def _copy_to_run(self, source: int, run: NDArray[Any]) -> None:
        """Copy a slot to neighbouring ones: to the first, from there to the next, to two, four ..."""
        for name in ("keys", "values", "logits", "seen", "written"):
            start, size = self._held[name].address, self._sizes[name]
            origin, done = source, 0
            while done < len(run):
                count = min(max(done, 1), len(run) - done)
                to, of = (start + int(slot) * size for slot in (run[done], origin))
                _check(_driver().cuMemcpyDtoDAsync(to, of, count * size, self._gpu.stream))
                origin, done = run[0], done + count

    def logits(self, slot: int) -> list[float]:
        self._check_slot(slot)
        with self._lock:
            self._gpu.activate()
            return self._fetched("logits", slot, np.float32).tolist()

    def cycles(self) -> dict[str, int]:
        """The cycles of each of PHASES in the last launch, in the first block."""
        return dict(zip(PHASES, self._cycles.bytes.view(np.int64).tolist()))

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot is {slot}; it must be from 0 to {self.slots - 1}")

    def _uploaded(self, array: NDArray[Any]) -> Memory:
        data = np.ascontiguousarray(array)
        made = Memory(data.nbytes)
        _check(_driver().cuMemcpyHtoD(made.address, data.ctypes.data, data.nbytes))
        return made

    def _fill(self, name: str, slot: int, data: NDArray[Any]) -> None:
        """Set a slot's numbers, after what is under way."""
        _check(_driver().cuStreamSynchronize(self._gpu.stream))
        address = self._held[name].address + slot * self._sizes[name]
        _check(_driver().cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def _fetched(self, name: str, slot: int, dtype: Any) -> NDArray[Any]:
        """A slot's numbers, after what is under way."""
        _check(_driver().cuStreamSynchronize(self._gpu.stream))
        made = np.empty(self._sizes[name] // np.dtype(dtype).itemsize, dtype)
        address = self._held[name].address + slot * self._sizes[name]
        _check(_driver().cuMemcpyDtoH(made.ctypes.data, address, made.nbytes))
        return made

    def _every_logits(self, rows: int) -> Floats:
        """The logits that the last launch kept, (rows, vocab_size)."""
        made = np.empty((rows, self.config.vocab_size), np.float32)
        _check(_driver().cuMemcpyDtoH(made.ctypes.data, self._every.address, made.nbytes))
        return made

    def _launch(
        self,
        texts: NDArray[Any],
        uniforms: NDArray[np.float64] | None,
        together: int,
        clusters: int,
        every: bool,
    ) -> NDArray[np.int32]:
        """Write a row of tokens for each row of uniforms, or read a prompt without them; wait for the end.

        texts: (count,) of TEXT. together: the texts of a pass. every: keep the logits of every row.
        Returns the tokens, (rows, count).
        """
        driver, count, stream = _driver(), len(texts), self._gpu.stream
        rows = 1 if uniforms is None else len(uniforms)
        drawn = 0 if uniforms is None else uniforms.nbytes
        given = drawn + texts.nbytes
        if given > self._given.size:
            self._given, self._staged = Memory(2 * given, host=True), Memory(2 * given)
        size = 4 * rows * count
        if size > self._chosen.size:
            self._chosen = Memory(2 * size, host=True)
        if every and size * self.config.vocab_size > self._every.size:
            self._every = Memory(size * self.config.vocab_size)
        if uniforms is not None:
            self._given.bytes[:drawn].view(float).reshape(uniforms.shape)[:] = uniforms
        self._given.bytes[drawn:given] = texts.view(np.uint8)
        work = Work(
            **{name: memory.address for name, memory in self._held.items()},
            weights=self._weights.address,
            tokens=self._tokens.address,
            positions=self._positions.address,
            every=self._every.address if every else None,
            texts=self._staged.address + drawn,
            uniforms=self._staged.address if drawn else None,
            chosen=self._chosen.address,
            cycles=self._cycles.address,
            count=count,
            rows=rows,
            capacity=self.capacity,
            scale=1 / (math.sqrt(self.config.head_dim) * math.log(2)),
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(work))
        function, _ = self._gpu.kernel(self._layout, together)
        config = self._gpu.launch(self._layout, together, clusters)
        _check(driver.cuMemcpyHtoDAsync(self._staged.address, self._given.address, given, stream))
        _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
        _check(driver.cuStreamSynchronize(stream))
        return self._chosen.bytes[:size].view(np.int32).reshape(rows, count).copy()
