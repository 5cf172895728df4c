"""The cuda engine: model, caches and the choice of a token in one launch, csrc/cuda/cluster.cu and grid.cu.

It needs cuda-bindings and a GPU, but no PyTorch; cuda-core and NVRTC only for kernels that no wheel brings.
Clusters of blocks, for few texts, need compute capability 9.0.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shakespeare.attention_ext.build import cache, nvrtc
from shakespeare.attention_ext.cuda.gpu import bindings
from shakespeare.attention_ext.parts import BuildError, CachePrecision, Precision
from shakespeare.generation import logprobs
from shakespeare.generation.distributions import distributions
from shakespeare.generation.engines.native import DraftCounts
from shakespeare.generation.engines.slots import ADJUSTED, SETTINGS, Slots, numbers_only
from shakespeare.generation.engines.slots import Unfit as Unfit
from shakespeare.model.checkpoint import Checkpoint, bf16_bits
from shakespeare.model.config import EMBEDDING, GPTConfig
from shakespeare.model.draft import ORDER, Draft

if TYPE_CHECKING:
    from shakespeare.model.gpt import GPT

Floats = NDArray[np.float32]

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
CAPABILITY, CLUSTER_CAPABILITY = (8, 0), (9, 0)  # the least that reduces integers in a warp, and has clusters
CLUSTERS = (16, 8)  # blocks of a cluster, the best for one text first; a GPU may refuse 16
THREADS, LANES = 256, 32  # of a block, of a warp
# A lane's keys at a time, where so many warps attend to a text together in a cluster; the best on an H100.
STRIPS = {8: 2, 4: 2, 2: 4, 1: 6}
# Rows of a pass with drafts. On an H100 a pass of four takes 1.8 times one of a row and writes 2.55 tokens of
# shakes256; a fifth row adds 0.2 tokens, 8 %, and takes 13 % longer.
DRAFT_ROWS = 4
LEAST_HITS = 0.47  # of guesses: with fewer, a pass gives less than 1.8 tokens
TRIED = 32  # guesses of a text, before they are judged
MOST_TEXTS = 5  # of a cluster's pass: what shared memory has room for beside shakes256 in float32
GRID_TEXTS = (1, 2, 4, 8)  # of a block of the grid: with more, the registers do not suffice for two blocks
PROMPT_TEXTS = 4  # tokens of a prompt in a block
GRID_STRIP, PROMPT_STRIP = 4, 2  # as STRIPS
RESIDENT = 2  # blocks of a multiprocessor, of which one may read keys while the other multiplies
WEIGHT_BITS = {Precision.FP32: 32, Precision.BF16: 16}  # int8 has no kernel
FORMATS = {CachePrecision.FP32: 0, CachePrecision.BF16: 1}  # FORMAT of attention_ext/csrc/cuda/call.h
HEAD_DIMS = (4, 8, 16, 32, 64, 128)  # a power of two of lanes reads a key
BARRIERS = 4  # of cluster.cu
# What the kernels count the cycles of, in the words of gpt.py profile.
PHASES = ("embedding", "QKV", "attention", "projection", "MLP up", "MLP down", "head", "sampling", "waiting")
CACHE_SHARE = 4  # of the L2 cache, for the weights that each block of the grid reads for every token
SECONDS = 0.0075  # of a launch by default, less than the 0.01 in which Ctrl-C should take effect
FIRST_ROW_SECONDS = 2e-5  # for each text of a multiprocessor: the guess before one was measured
TEXT = np.dtype([(name, np.int32) for name in ("slot", "length", "token", "flags")])  # struct Text
FIRST, LAST = 1, 2  # flags of a Text


class Work(ctypes.Structure):
    """struct Work of csrc/cuda/decoder.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "tokens", "positions", "keys", "values", "logits")),
        *((name, ctypes.c_void_p) for name in ("every", "seen", "written", "sampling", "bias", "texts")),
        *((name, ctypes.c_void_p) for name in ("uniforms", "chosen", "cycles", "arrived")),
        *((name, ctypes.c_void_p) for name in ("contexts", "codes", "drafts")),
        *((name, ctypes.c_int) for name in ("count", "rows", "capacity", "context_bits", "leading")),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Layout(ABC):
    """How blocks hold a model: what a kernel is compiled with.

    clocks: whether it counts the cycles of its phases.
    """

    config: GPTConfig
    weights: Precision
    kv_cache: CachePrecision
    clocks: bool = field(default=False, kw_only=True)

    @functools.cached_property
    @abstractmethod
    def image(self) -> np.dtype:
        """struct Weights."""

    @abstractmethod
    def shared(self, texts: int) -> int:
        """Bytes of struct Shared, a block's shared memory, for passes of this many texts."""

    @abstractmethod
    def most_texts(self, shared: int) -> int:
        """The most texts of a pass in so many bytes of shared memory; 0 if the model does not fit."""

    @abstractmethod
    def source(self, texts: int, capability: tuple[int, int]) -> nvrtc.Source:
        """The kernel for passes of this many texts."""

    @abstractmethod
    def pack(self, tensors: Mapping[str, Floats]) -> NDArray[Any]:
        """The weights, (blocks that hold different ones,) of `image`."""

    def _image(self, matrices: Mapping[str, tuple[int, ...]], outputs: Mapping[str, int]) -> np.dtype:
        """struct Weights of matrices with these shapes, the last one the head, which have so many outputs."""
        c = self.config
        weight = np.float32 if self.weights is Precision.FP32 else np.uint16
        *layer, head = [(name, weight, shape) for name, shape in matrices.items()]
        norm = [(name, np.float32, c.n_embd) for name in ("gain", "bias")[: 1 + c.bias]]
        vectors: list[Any] = [(name, norm) for name in ("ln_1", "ln_2")]
        if c.bias:
            vectors += [(name, np.float32, n) for name, n in outputs.items()]
        fields: list[Any] = [("layers", layer, c.n_layer), head]
        return padded([*fields, ("vectors", padded(vectors), c.n_layer), ("ln_f", norm)])

    def _source(self, file: str, texts: int, capability: tuple[int, int], **macros: int) -> nvrtc.Source:
        c = self.config
        macros |= {"FORMAT": FORMATS[self.kv_cache], "WEIGHT_BITS": WEIGHT_BITS[self.weights]}
        macros |= {"LAYERS": c.n_layer, "HEADS": c.n_head, "HEAD_DIM": c.head_dim, "VOCAB": c.vocab_size}
        macros |= {"TEXTS": texts, "THREADS": THREADS, "BIAS": c.bias, "CLOCKS": self.clocks}
        macros |= {"SHARED_BYTES": self.shared(texts)}
        arch = f"sm_{capability[0]}{capability[1]}"
        return nvrtc.Source(file, arch, {name: int(n) for name, n in macros.items()}, SOURCES)

    def _pack(
        self,
        made: NDArray[Any],
        tensors: Mapping[str, Floats],
        matrix: Callable[[Floats, int], Floats],
        vector: Callable[[Floats, int], Floats],
    ) -> None:
        """Fill `made`. matrix, vector: what is held of a tensor, of so many parts."""
        c = self.config

        def fill_norm(norm: NDArray[Any], name: str) -> None:
            norm["gain"] = tensors[f"{name}.weight"]
            if c.bias:
                norm["bias"] = tensors[f"{name}.bias"]

        matrices = {"qkv": ("attn.c_attn", 3), "proj": ("attn.c_proj", 1)}
        matrices |= {"fc": ("mlp.c_fc", 1), "out": ("mlp.c_proj", 1)}
        for i in range(c.n_layer):
            layer, vectors, prefix = made["layers"][:, i], made["vectors"][:, i], f"transformer.h.{i}"
            for name, (full, parts) in matrices.items():
                layer[name] = self._weight(matrix(tensors[f"{prefix}.{full}.weight"], parts))
                if c.bias:
                    vectors[name] = vector(tensors[f"{prefix}.{full}.bias"], parts)
            for name in ("ln_1", "ln_2"):
                fill_norm(vectors[name], f"{prefix}.{name}")
        fill_norm(made["ln_f"], "transformer.ln_f")

    def _weight(self, numbers: Floats) -> NDArray[Any]:
        return numbers if self.weights is Precision.FP32 else bf16_bits(numbers)

    def _counters(self) -> int:
        """Bytes of the cycles in struct Shared."""
        return 8 * self.clocks * (len(PHASES) + 1)


@dataclass(frozen=True)
class Cluster(Layout):
    """A cluster of `blocks` holds the model in its shared memory, each block a share: cluster.cu.

    drafts: whether the texts of a pass are rows of one text.
    """

    blocks: int
    drafts: bool = False

    @property
    def head_rows(self) -> int:
        """A block's rows of the head, of which the last block's may lie beyond the vocabulary."""
        return -(-self.config.vocab_size // self.blocks)

    @functools.cached_property
    def image(self) -> np.dtype:
        C, share = self.config.n_embd, self.config.n_embd // self.blocks
        rows = {"qkv": 3 * share, "proj": share, "fc": 4 * share, "out": share}
        matrices = {name: (n, C * (4 if name == "out" else 1)) for name, n in rows.items()}
        return self._image(matrices | {"head": (self.head_rows, C)}, rows)

    def shared(self, texts: int) -> int:
        c = self.config
        units = c.n_head * max(1, self.blocks // c.n_head)
        choice = -(-self.blocks * self.head_rows // 2) * 2 + 2 * c.vocab_size
        team, _ = self.attending(texts)
        various = -(-max(4 * c.n_embd, team * (c.head_dim + 4), choice) // 4) * 4
        qkv = -(-units // self.blocks) * 3 * c.head_dim
        result = -(-texts * (c.head_dim + 2) // 4) * 16
        size = texts * (4 * (2 * c.n_embd + qkv + various) + 16) + units * result
        size += 8 * SETTINGS + 8 * BARRIERS + self._counters()
        return self.image.itemsize + -(-size // 16) * 16

    def attending(self, texts: int) -> tuple[int, int]:
        """(warps that attend to a text together, a lane's keys at a time) of passes of this many texts.

        As many warps as possible attend at once: to one text, or to several.
        """
        warps = THREADS // LANES
        team = warps if self.drafts else max(1, warps >> (texts - 1).bit_length())
        return team, STRIPS[team]

    def most_texts(self, shared: int) -> int:
        rows = -(-4 * self.config.n_embd // self.blocks * LANES // THREADS)  # a warp's, of the widest matrix
        most = min(MOST_TEXTS, self.blocks) if rows <= LANES else 0
        return max((texts for texts in range(1, most + 1) if self.shared(texts) <= shared), default=0)

    def alone(self, drafts: bool, shared: int) -> tuple[Cluster, int]:
        """(layout, rows) of a pass of one text; with drafts, if there is room for a guess."""
        drafted = replace(self, drafts=True)
        rows = min(DRAFT_ROWS, drafted.most_texts(shared))
        return (drafted, rows) if drafts and rows > 1 else (self, 1)

    def source(self, texts: int, capability: tuple[int, int]) -> nvrtc.Source:
        team, strip = self.attending(texts)
        macros = {"BLOCKS": self.blocks, "TEAM": team, "STRIP": strip, "DRAFTS": int(self.drafts)}
        return self._source("cluster.cu", texts, capability, **macros)

    def pack(self, tensors: Mapping[str, Floats]) -> NDArray[Any]:
        c = self.config
        made = np.zeros(self.blocks, self.image)

        def shares(tensor: Floats, parts: int) -> Floats:
            """Each block's rows, its share of each of so many parts."""
            split = tensor.reshape(parts, self.blocks, -1, *tensor.shape[1:])
            return split.swapaxes(0, 1).reshape(self.blocks, -1, *tensor.shape[1:])

        self._pack(made, tensors, shares, shares)
        head = np.zeros((self.blocks * self.head_rows, c.n_embd), np.float32)
        head[: c.vocab_size] = tensors[EMBEDDING]
        made["head"] = self._weight(shares(head, 1))
        return made


@dataclass(frozen=True)
class Grid(Layout):
    """Every block reads all weights: grid.cu. prompt: whether it reads a prompt, or writes texts."""

    prompt: bool = False

    @functools.cached_property
    def image(self) -> np.dtype:
        C = self.config.n_embd
        matrices = {"qkv": (C, 3 * C), "proj": (C, C), "fc": (C, 4 * C), "out": (4 * C, C)}
        outputs = {name: columns for name, (_, columns) in matrices.items()}
        matrices["head"] = C, -(-self.config.vocab_size // 4) * 4
        if self._tiled:
            shapes = {name: (-(-n // 16), -(-k // 16), LANES, 8) for name, (k, n) in matrices.items()}
            return self._image(shapes, outputs)
        return self._image(matrices, outputs)

    @property
    def _tiled(self) -> bool:
        """Whether the matrices are tiles for the tensor cores."""
        return self.weights is Precision.BF16

    def shared(self, texts: int) -> int:
        c = self.config
        warps, together = THREADS // LANES, texts if self.prompt else 1
        units = texts // together * c.n_head * max(1, warps // (texts // together * c.n_head))
        logits = -(-c.vocab_size // 4) * 4
        various = max(4 * c.n_embd, (logits + 2 * c.vocab_size + 2) // 4 * 4)
        held, partial = c.n_embd, units * together * (c.head_dim + 4)
        if self._tiled:
            held, various = ((n + 15) // 32 * 32 + 16 for n in (held, various))
        else:
            partial = max(4 * THREADS * texts, partial)
        size = texts * (4 * (c.n_embd + held + various) + 20) + 4 * partial
        size = -(-size // 8) * 8 + self._counters()
        return -(-size // 16) * 16

    def most_texts(self, shared: int) -> int:
        sizes = [texts for texts in GRID_TEXTS if self.shared(texts) <= shared]
        return max((texts for texts in sizes if not self.prompt or texts <= PROMPT_TEXTS), default=0)

    def source(self, texts: int, capability: tuple[int, int]) -> nvrtc.Source:
        strip = PROMPT_STRIP if self.prompt else GRID_STRIP
        macros = {"PROMPT": int(self.prompt), "STRIP": strip, "RESIDENT": RESIDENT}
        return self._source("grid.cu", texts, capability, **macros)

    def pack(self, tensors: Mapping[str, Floats]) -> NDArray[Any]:
        def matrix(tensor: Floats, parts: int = 1) -> Floats:
            outputs, inputs = tensor.shape
            if not self._tiled:
                return np.pad(tensor.T, ((0, 0), (0, -outputs % 4)))
            # Lane 4 g + t of a tile has the outputs g and g + 8, and of each two pairs of inputs from 4 t on.
            tiled = np.pad(tensor, ((0, -outputs % 16), (0, -inputs % 16)))
            tiled = tiled.reshape(-(-outputs // 16), 2, 8, -1, 4, 2, 2)  # tile, half, g, tile, t, pair, input
            return tiled.transpose(0, 3, 2, 4, 5, 1, 6).reshape(-(-outputs // 16), -1, LANES, 8)

        made = np.zeros(1, self.image)
        self._pack(made, tensors, matrix, lambda tensor, parts: tensor)
        made["head"] = self._weight(matrix(tensors[EMBEDDING]))
        return made


class Launch(NamedTuple):
    """A kernel for passes of `texts` texts, or tokens of a prompt, on so many blocks.

    leading: of the blocks, those whose attention comes before that of the others.
    """

    layout: Layout
    texts: int
    blocks: int
    leading: int

    @property
    def drafts(self) -> bool:
        """Whether a pass has rows of one text."""
        return isinstance(self.layout, Cluster) and self.layout.drafts


def padded(fields: list[Any]) -> np.dtype:
    """A record of these fields that ends at a multiple of 16 bytes, the size of a vector load."""
    size = np.dtype(fields).itemsize
    return np.dtype([*fields, ("padding", np.uint8, -size % 16)])


def layouts_for(
    config: GPTConfig, weights: Precision, kv_cache: CachePrecision, on: Any, clocks: bool = False
) -> tuple[list[Cluster], Grid]:
    """How a Gpu may hold a model for few texts, the best for one text first, and for many.

    on: a Gpu's name, capability, shared and cache. Whether it takes clusters of a size, Gpu.clusters() says.
    Raises Unfit, in a sentence, if the cuda engine does not take the model.
    """
    if weights not in WEIGHT_BITS:
        raise Unfit(f"the cuda engine has weights in {' and '.join(WEIGHT_BITS)}, not {weights}")
    if on.capability < CAPABILITY:
        has, least = (".".join(map(str, capability)) for capability in (on.capability, CAPABILITY))
        raise Unfit(f"the cuda engine needs compute capability {least}; {on.name} has {has}")
    if config.head_dim not in HEAD_DIMS:
        raise Unfit(f"the cuda engine takes heads of {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}")
    if config.n_embd % CLUSTERS[-1]:
        raise Unfit(f"the cuda engine takes n_embd of multiples of {CLUSTERS[-1]}, not {config.n_embd}")
    grid = Grid(config, weights, kv_cache, clocks=clocks)
    size, most = grid.image.itemsize, on.cache // CACHE_SHARE
    if size > most or not grid.most_texts(on.shared):
        has = f"the model has {size:,} in {weights}"
        raise Unfit(f"the cuda engine takes {most:,} bytes of weights on {on.name}; {has}")
    sizes = CLUSTERS if on.capability >= CLUSTER_CAPABILITY else ()
    clusters = [Cluster(config, weights, kv_cache, n, clocks=clocks) for n in sizes if config.n_embd % n == 0]
    return [each for each in clusters if each.most_texts(on.shared)], grid


class Gpu:
    """The first GPU that CUDA shows: its primary context, which PyTorch uses too, and a stream of its own.

    capability: (major, minor). shared: the most bytes of shared memory for a block. cache: bytes of the L2
    cache. hertz: its clock's. memory: its bytes. identity: no other GPU's.
    """

    def __init__(self) -> None:
        driver = bindings()
        checked(driver.cuInit(0))
        self._device = checked(driver.cuDeviceGet(0))
        self.name = checked(driver.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()
        self._context = checked(driver.cuDevicePrimaryCtxRetain(self._device))
        self.activate()
        self.stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{name}") for name in ("MAJOR", "MINOR"))
        self.capability = (major, minor)
        self.shared = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.cache = self._attribute("L2_CACHE_SIZE")
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.hertz = 1000 * self._attribute("CLOCK_RATE")
        self.memory = int(checked(driver.cuDeviceTotalMem(self._device)))
        self.identity = checked(driver.cuDeviceGetUuid(self._device)).bytes.hex()
        self._clusters: dict[Cluster, int] = {}

    def _attribute(self, name: str) -> int:
        named = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return checked(bindings().cuDeviceGetAttribute(named, self._device))

    def activate(self) -> None:
        """Make the context the calling thread's."""
        checked(bindings().cuCtxSetCurrent(self._context))

    def prepare(self, kernels: Iterable[tuple[Layout, int]]) -> None:
        """Compile those that nobody has compiled yet, at the same time: each takes a second or two."""
        nvrtc.make_all(layout.source(texts, self.capability) for layout, texts in dict.fromkeys(kernels))

    @functools.cache
    def kernel(self, layout: Layout, texts: int) -> tuple[Any, Any]:
        """The function for passes of so many texts, and the library that keeps it alive."""
        driver = bindings()
        function, library = load(layout.source(texts, self.capability), "decode")
        attributes = {"MAX_DYNAMIC_SHARED_SIZE_BYTES": layout.shared(texts)}
        if isinstance(layout, Cluster):
            attributes = {
                "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1,
                "MAX_DYNAMIC_SHARED_SIZE_BYTES": self.shared,
            }
        for name, value in attributes.items():
            named = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
            checked(driver.cuFuncSetAttribute(function, named, value))
        return function, library

    @functools.cache
    def launch(self, layout: Layout, texts: int, blocks: int, shared: int | None = None) -> Any:
        """The driver's description of a launch of so many blocks. shared: bytes, if not the layout's."""
        driver = bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes, config.hStream = shared or layout.shared(texts), self.stream
        attribute = driver.CUlaunchAttribute()
        if isinstance(layout, Cluster):
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = layout.blocks, 1, 1
            attribute.value.clusterDim = size
        else:  # blocks of a prompt wait for each other, so all must run
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = int(isinstance(layout, Grid) and layout.prompt)
        config.attrs, config.numAttrs = [attribute], 1
        return config

    def clusters(self, layout: Cluster, drafts: bool = False) -> int:
        """The most clusters that run at a time, a block on a multiprocessor; 0 if none of this size runs.

        Any kernel of the layout tells: that for one text, with drafts or without, which is loaded the first
        time.
        """
        if layout not in self._clusters:
            function, _ = self.kernel(*layout.alone(drafts, self.shared))
            config = self.launch(layout, 1, layout.blocks, self.shared)
            error, count = bindings().cuOccupancyMaxActiveClusters(function, config)
            self._clusters[layout] = 0 if error else count
        return self._clusters[layout]

    @functools.cache
    def resident(self, layout: Grid, texts: int) -> int:
        """The most blocks that run at a time."""
        shared = layout.shared(texts) + self._attribute("RESERVED_SHARED_MEMORY_PER_BLOCK")
        of_one = self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // shared
        return min(RESIDENT, of_one) * self.multiprocessors


def load(source: nvrtc.Source, name: str) -> tuple[Any, Any]:
    """A kernel of a source, compiled if need be, and the library that keeps it alive."""
    driver = bindings()
    library = checked(driver.cuLibraryLoadData(source.make(), [], [], 0, [], [], 0))
    return checked(
        driver.cuKernelGetFunction(checked(driver.cuLibraryGetKernel(library, name.encode())))
    ), library


def launch(function: Any, blocks: int, threads: int, stream: int, arguments: int) -> None:
    """Launch a kernel without shared memory. arguments: the address of those of its arguments."""
    checked(bindings().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0))


@contextlib.contextmanager
def turn(identity: str) -> Iterator[None]:
    """Have a GPU alone among the launches of all processes that take turns.

    A GPU shares its time among processes: two launches both end late, and it is idle while both processes
    work on the texts. The system releases the lock when the process ends.
    """
    import fcntl

    with open(cache.directory() / f"gpu_{identity}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def gpu() -> Gpu:
    """The GPU. Raises BuildError, in one line, if there is none or cuda-bindings is missing."""
    try:
        return Gpu()
    except RuntimeError as error:  # the driver's library is missing
        raise BuildError(f"device is 'cuda', and no GPU can be used: {str(error).splitlines()[0]}") from None


def checked(result: tuple) -> Any:
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
        driver = bindings()
        self.size, self._free = size, driver.cuMemFreeHost if host else driver.cuMemFree
        if host:
            self.address = int(checked(driver.cuMemHostAlloc(size, driver.CU_MEMHOSTALLOC_PORTABLE)))
            self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.address))
        else:
            self.address = int(checked(driver.cuMemAlloc(size)))
            checked(driver.cuMemsetD8(self.address, 0, size))

    def __del__(self) -> None:
        if hasattr(self, "address") and not sys.is_finalizing():  # the process frees it then
            self._free(self.address)


class CudaEngine(Slots):
    """An Engine on the first GPU. Its calls take turns.

    A number is summed in the same order whatever other texts a launch of the same kind holds. So a text's
    last bits depend on the kind only: alone in a cluster, with drafts or without, among others there, or in
    the grid. clocks: whether cycles() has something to tell. draft: what guesses the next tokens of few
    texts, each in a cluster of its own; one with damaged tables is ignored with a warning. The other
    arguments and the errors are those of open_engine(), and Unfit.
    """

    name = "cuda"

    def __init__(
        self,
        model: Checkpoint | GPT,
        weights: Precision,
        kv_cache: CachePrecision,
        slots: int,
        capacity: int,
        clocks: bool = False,
        draft: Draft | None = None,
    ) -> None:
        on = self._gpu = gpu()
        on.activate()
        c, tensors = model.config, model.weights
        super().__init__(c, slots, capacity)
        clusters, self._grid = layouts_for(c, weights, kv_cache, on, clocks)
        self._reader = Grid(c, weights, kv_cache, prompt=True, clocks=clocks)
        # Texts of a block of the grid, tokens of a prompt in one, and blocks of prompts at a time.
        self._many, self._read_together = (each.most_texts(on.shared) for each in (self._grid, self._reader))
        alone = clusters[0].alone(draft is not None, on.shared) if clusters else (self._grid, GRID_TEXTS[0])
        on.prepare([(self._reader, self._read_together), alone])
        takes = functools.partial(on.clusters, drafts=draft is not None)
        self._clusters = list(itertools.dropwhile(lambda each: not takes(each), clusters))
        self._read_blocks = on.resident(self._reader, self._read_together)
        self._weights: dict[Layout, Memory] = {
            layout: self._uploaded(layout.pack(tensors)) for layout in (*self._clusters, self._grid)
        }
        self._weights[self._reader] = self._weights[self._grid]
        for layout in self._clusters[:1]:
            self._weights[replace(layout, drafts=True)] = self._weights[layout]
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
        # What a launch is given, on the host and on the GPU: of texts, and of prompts.
        self._given = {prompts: (Memory(1 << 16, host=True), Memory(1 << 16)) for prompts in (False, True)}
        self._chosen, self._cycles = Memory(1 << 12, host=True), Memory(8 * len(PHASES), host=True)
        self._every, self._arrived = Memory(4), Memory(4 * on.multiprocessors * RESIDENT)
        self._work = Work(
            **{name: memory.address for name, memory in self._held.items()},
            tokens=self._tokens.address,
            positions=self._positions.address,
            cycles=self._cycles.address,
            arrived=self._arrived.address,
            capacity=capacity,
            scale=1 / (math.sqrt(c.head_dim) * math.log(2)),
        )
        self._work_at = (ctypes.c_void_p * 1)(ctypes.addressof(self._work))
        self._launches: dict[int, Launch] = {}  # of so many texts; to find one takes longer than a token
        self._row_seconds: dict[Launch, float] = {}
        self._tails = np.zeros((slots, ORDER), np.int64)  # of each slot the last tokens, the latest one last
        self._drafted: dict[Launch, Launch] = {}  # of one without drafts
        self._guessed = np.zeros((slots, 2))  # of each slot's text: guesses that were compared, and hits
        self._tables: tuple[Memory, ...] = ()
        self._drafts = np.zeros(5)  # passes, tokens, rows of guesses, guesses that were compared; seconds
        self._counted = np.zeros((0, 3), np.int32)  # of the last launch, as struct Work has them
        try:
            self.set_draft(draft)
        except ValueError as error:
            warnings.warn(f"{error}; the draft is ignored", stacklevel=3)
        # Compiled now, not while texts wait: what as many texts as there are slots need, or fewer.
        most = min(slots, self._many * RESIDENT * on.multiprocessors)  # more need the same
        on.prepare(self._way(range(count))[:2] for count in range(1, most + 1))

    @property
    def description(self) -> str:
        """What computes the texts, in a line for people."""
        where = self._gpu.name
        if self._clusters:
            layout = self._clusters[0]
            where = f"{self._gpu.clusters(layout)} clusters of {layout.blocks} blocks of {where}"
        return f"The whole model in one launch, part 4's attention, on {where}"

    def read(self, slot: int, seconds: float = math.inf) -> bool:
        end = time.monotonic() + seconds
        with self._lock:
            if slot not in self._begun:
                raise ValueError(f"slot is {slot}; it must be one that was begun")
            ids, done, continues, top = self._begun[slot]
            if done == 0 and not continues:
                self._logprobs[slot] = []
            most = self._read_together * self._read_blocks
            if top is None and len(ids) <= most:
                self._prompts[slot] = ids, continues
                done = len(ids)
            while done < len(ids):
                some = ids[done : done + most]
                ends = LAST * (done + len(some) == len(ids))
                self._read_some(
                    slot, some, done, FIRST * (done == 0 and not continues), ends, top is not None
                )
                if top is not None:
                    following = ids[done + 1 : done + 1 + len(some)]
                    rows = self._every_logits(len(some))[: len(following)]
                    self._logprobs[slot] += logprobs.of_logits(rows, following, top)
                done += len(some)
                if done < len(ids) and time.monotonic() >= end:
                    self._begun[slot] = (ids, done, continues, top)
                    return False
            del self._begun[slot]
            self._lengths[slot] = len(ids)
            self._tails[slot, -len(ids) :] = ids[-ORDER:]
            if not continues:
                self._guessed[slot] = 0
        return True

    def _read_prompts(self) -> None:
        """Read the prompts that wait, as many as possible in a launch; a block has tokens of one prompt."""
        if len(self._prompts) < 2:  # faster than below
            for slot, (prompt, continues) in self._prompts.items():
                self._read_some(slot, prompt, 0, FIRST * (not continues), LAST, False)
            self._prompts.clear()
            return
        of_block = self._read_together
        waiting, self._prompts = self._prompts, {}
        slots = np.fromiter(waiting, np.int32)
        tokens = np.fromiter((len(ids) for ids, _ in waiting.values()), np.int64)
        continued = np.fromiter((continues for _, continues in waiting.values()), bool)
        ids = itertools.chain.from_iterable(ids for ids, _ in waiting.values())
        ends = np.cumsum(-(-tokens // of_block))  # in blocks
        first = 0
        while first < len(slots):
            before = ends[first - 1] if first else 0
            last = int(np.searchsorted(ends, before + self._read_blocks, "right"))
            some = tokens[first:last]
            position = np.arange(-(-some.max() // of_block) * of_block, dtype=np.int32)
            held = position < some[:, None]
            texts = np.zeros(held.shape, TEXT)
            texts["slot"] = np.where(held, slots[first:last, None], -1)
            texts["length"] = position
            texts["token"][held] = np.fromiter(ids, np.int32, int(some.sum()))
            texts["flags"][:, 0] = FIRST * ~continued[first:last]
            texts["flags"][np.arange(len(some)), some - 1] |= LAST
            of_blocks = texts.reshape(-1, of_block)
            self._launch_prompts(of_blocks[of_blocks["slot"][:, 0] >= 0].reshape(-1), False)
            first = last

    def _read_some(
        self, slot: int, ids: Sequence[int], length: int, first: int, last: int, every: bool
    ) -> None:
        """Read tokens of a prompt, after `length` others. first, last: flags of the first and the last."""
        texts = np.zeros(len(ids), TEXT)
        texts["slot"], texts["token"], texts["length"] = slot, ids, np.arange(length, length + len(ids))
        texts["flags"][0] = first
        texts["flags"][-1] |= last
        self._launch_prompts(texts, every)

    def _launch_prompts(self, texts: NDArray[Any], every: bool) -> None:
        """Read tokens of prompts: (count,) of TEXT, in each block those of one."""
        self._gpu.activate()
        blocks = -(-len(texts) // self._read_together)
        self._launch(Launch(self._reader, self._read_together, blocks, blocks), texts, None, every)

    def write(
        self, slots: Sequence[int], uniforms: ArrayLike, seconds: float | None = None
    ) -> NDArray[np.int32]:
        at, numbers = self._asked(slots, uniforms, seconds)
        with self._lock:
            self._gpu.activate()
            self._read_prompts()
            texts = np.zeros(len(at), TEXT)
            texts["slot"], texts["length"], texts["token"] = at, self._lengths[at], self._pending[at]
            held = self._held_by(at)
            launch = self._way(slots)
            if launch.drafts:
                tails = self._tails[at].astype(np.uint32)
                before = np.where(self._pending[at, None] < 0, tails[:, 1:], tails[:, :-1])
                texts["flags"] = (
                    (before << np.array([24, 16, 8, 0], np.uint32)).sum(1, dtype=np.uint32).view(np.int32)
                )
            seconds = SECONDS if seconds is None else seconds
            guess = FIRST_ROW_SECONDS * max(1.0, len(at) / self._gpu.multiprocessors)
            fit = seconds / self._row_seconds.get(launch, guess)
            rows = int(min(len(numbers), max(1, fit), self.capacity + 1 - int(held.max())))
            scored = self._are_scored(slots)
            chosen = self._launch(launch, texts, numbers[:rows], scored, seconds > SECONDS)
            self._lengths[at], self._pending[at] = held + rows - 1, chosen[-1]
            self._tails[at] = np.concatenate([self._tails[at], chosen[-ORDER:].T], axis=1)[:, -ORDER:]
            if launch.drafts:
                passes, drafted, guesses = self._counted.sum(0).tolist()
                self._drafts += passes, chosen.size, drafted, guesses, rows * self._row_seconds[launch]
                self._guessed[at, 0] += self._counted[:, 2]
                self._guessed[at, 1] += rows - self._counted[:, 0]
            if scored:
                every = self._every_logits(chosen.size).reshape(*chosen.shape, -1)
                self._score(slots, chosen, every)
        return numbers_only(chosen)

    def copy(self, source: int, *targets: int) -> None:
        for slot in (source, *targets):
            self._check_slot(slot)
        at = sorted(set(targets) - {source})
        with self._lock:
            self._gpu.activate()
            prompt, continues = self._prompts.get(source, ([], True))
            blocks = -(-len(prompt) // self._read_together)
            # Prompts that fit a launch are read in the time of one, and a slot's copy takes several calls.
            if not continues and blocks * (1 + len(at)) <= self._read_blocks:
                self._prompts.update(dict.fromkeys(at, (prompt, False)))
            else:
                self._read_prompts()
                for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
                    self._copy_to_run(source, run)
            for kept in (self._lengths, self._pending, self._tails, self._guessed):
                kept[at] = kept[source]
            for slot in self._begun.keys() & set(at):
                del self._begun[slot]

    def _copy_to_run(self, source: int, run: NDArray[Any]) -> None:
        """Copy a slot to neighbouring ones: to the first, from there to the next, to two, four ..."""
        for name in ("keys", "values", "logits", "seen", "written"):
            start, size = self._held[name].address, self._sizes[name]
            origin, done = source, 0
            while done < len(run):
                count = min(max(done, 1), len(run) - done)
                to, of = (start + int(slot) * size for slot in (run[done], origin))
                checked(bindings().cuMemcpyDtoDAsync(to, of, count * size, self._gpu.stream))
                origin, done = run[0], done + count

    def logits(self, slot: int) -> list[float]:
        self._check_slot(slot)
        with self._lock:
            self._gpu.activate()
            self._read_prompts()
            made = np.empty(self.config.vocab_size, np.float32)
            address = self._held["logits"].address + slot * self._sizes["logits"]
            checked(bindings().cuStreamSynchronize(self._gpu.stream))
            checked(bindings().cuMemcpyDtoH(made.ctypes.data, address, made.nbytes))
            return made.tolist()

    def cycles(self) -> dict[str, int]:
        """The cycles of each of PHASES in the last launch, in the first block."""
        return dict(zip(PHASES, self._cycles.bytes.view(np.int64).tolist()))

    def _uploaded(self, array: NDArray[Any]) -> Memory:
        data = np.ascontiguousarray(array)
        made = Memory(data.nbytes)
        checked(bindings().cuMemcpyHtoD(made.address, data.ctypes.data, data.nbytes))
        return made

    def _every_logits(self, rows: int) -> Floats:
        """The logits that the last launch kept, (rows, vocab_size)."""
        made = np.empty((rows, self.config.vocab_size), np.float32)
        checked(bindings().cuStreamSynchronize(self._gpu.stream))
        checked(bindings().cuMemcpyDtoH(made.ctypes.data, self._every.address, made.nbytes))
        return made

    def set_draft(self, draft: Draft | None) -> None:
        """Guess tokens by this draft from now on, or not at all.

        It changes the last bits of logits, and no text but where a number falls within them of a boundary.
        Raises ValueError if its tables are damaged, or for another vocabulary.
        """
        self.draft: Draft | None = None
        if draft is None:
            return
        if len(draft.first) != self.config.vocab_size:
            has = f"the draft's vocabulary is {len(draft.first)}"
            raise ValueError(f"{has}; it must be the model's, {self.config.vocab_size}")
        contexts, codes, bits = distributions(draft)
        each = -(-codes.shape[1] // LANES)  # tokens of a lane
        codes = np.pad(codes, ((0, 0), (0, LANES * each - codes.shape[1])))
        codes = np.pad(codes.reshape(-1, LANES, each), ((0, 0), (0, 0), (0, -each % 4)))
        with self._lock:
            self._gpu.activate()
            self._tables = self._uploaded(contexts), self._uploaded(codes)
            self._work.contexts, self._work.codes = (table.address for table in self._tables)
            self._work.context_bits = bits
        self.draft = draft

    def draft_counts(self) -> DraftCounts:
        """What drafts did since the last call. Guessing is a part of verifying, and `wasted` is not known."""
        with self._lock:
            steps, tokens, drafted, guesses, seconds = self._drafts.tolist()
            self._drafts[:] = 0
        passes = int(steps)
        accepted = int(tokens) - passes
        return DraftCounts(passes, int(tokens), int(guesses), accepted, int(drafted), accepted, 0, seconds, 0)

    def _way(self, slots: Sequence[int]) -> Launch:
        """How these texts are written: with drafts, if each has a cluster of its own and guesses hit.

        Penalties count the tokens before a row, which a row of guesses does not know; adjusted logits have no
        drafts. Counts decide, not times, which change from run to run.
        """
        count = len(slots)
        if count not in self._launches:
            self._launches[count] = self._launch_of(count)
        plain = self._launches[count]
        # In clusters of eight, for more texts in bf16, a pass of four rows gains nothing on an H100.
        if self.draft is None or plain.texts > 1 or plain.layout not in self._clusters[:1]:
            return plain
        if plain not in self._drafted:
            drafted = self._clusters[0].alone(True, self._gpu.shared)
            self._drafted[plain] = Launch(*drafted, plain.blocks, plain.leading)
        if any(self._settings["sampling"][slot][ADJUSTED] for slot in slots):
            return plain
        guesses, hits = self._guessed[list(slots)].sum(0)
        if guesses >= TRIED * count and hits < LEAST_HITS * guesses:
            return plain
        return self._drafted[plain]

    def _launch_of(self, count: int) -> Launch:
        """What writes so many texts: one pass of clusters, if they suffice, else the grid."""
        on = self._gpu
        found: Launch | None = None
        for layout in self._clusters:
            if found and found.texts == 1:
                break
            at_a_time = on.clusters(layout)
            together = -(-count // at_a_time) if at_a_time else math.inf
            if together <= layout.most_texts(on.shared) and (not found or together < found.texts):
                blocks = -(-count // int(together)) * layout.blocks
                found = Launch(layout, int(together), blocks, blocks)
        if found:
            return found
        for texts in GRID_TEXTS:
            resident = on.resident(self._grid, texts)
            if texts == self._many or count <= texts * resident:
                break
        blocks = min(-(-count // texts), resident)
        # Where the tensor cores multiply, there is too little to do beside the reading of keys to take turns.
        turns = blocks > on.multiprocessors and self._grid.weights is Precision.FP32
        return Launch(self._grid, texts, blocks, -(-blocks // 2) if turns else blocks)

    def _launch(
        self,
        launch: Launch,
        texts: NDArray[Any],
        uniforms: NDArray[np.float64] | None,
        every: bool,
        long: bool = False,
    ) -> NDArray[np.int32]:
        """Write a row of tokens for each row of uniforms and wait for them, or begin to read prompts without.

        texts: (count,) of TEXT. every: keep the logits of every row. long: whether processes take turns.
        Returns the tokens, (rows, count).
        """
        driver, count, stream, work = bindings(), len(texts), self._gpu.stream, self._work
        for name in self._stale:
            array = self._settings[name]
            checked(driver.cuMemcpyHtoD(self._held[name].address, array.ctypes.data, array.nbytes))
        self._stale.clear()
        rows = 1 if uniforms is None else len(uniforms)
        given = texts.nbytes + (0 if uniforms is None else uniforms.nbytes)
        prompts = uniforms is None
        if prompts:  # the launch before this may not have got what it was given
            checked(driver.cuStreamSynchronize(stream))
        if given > self._given[prompts][0].size:
            self._given[prompts] = Memory(2 * given, host=True), Memory(2 * given)
        host, staged = self._given[prompts]
        size, counts = 4 * rows * count, 12 * count
        if size + counts > self._chosen.size:
            self._chosen = Memory(2 * (size + counts), host=True)
        if every and size * self.config.vocab_size > self._every.size:
            self._every = Memory(size * self.config.vocab_size)
        host.bytes[: texts.nbytes] = texts.view(np.uint8)
        if uniforms is not None:
            host.bytes[texts.nbytes : given].view(float).reshape(uniforms.shape)[:] = uniforms
        work.weights = self._weights[launch.layout].address
        work.every = self._every.address if every else None
        work.texts, work.uniforms = staged.address, staged.address + texts.nbytes
        work.chosen, work.count, work.rows, work.leading = self._chosen.address, count, rows, launch.leading
        work.drafts = self._chosen.address + size
        function, _ = self._gpu.kernel(launch.layout, launch.texts)
        config = self._gpu.launch(*launch[:3])
        checked(driver.cuMemcpyHtoDAsync(staged.address, host.address, given, stream))
        checked(driver.cuMemsetD8Async(self._arrived.address, 0, self._arrived.size, stream))
        with turn(self._gpu.identity) if long else contextlib.nullcontext():
            start = time.perf_counter()
            checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(self._work_at), 0))
            if not prompts:
                checked(driver.cuStreamSynchronize(stream))
                self._row_seconds[launch] = (time.perf_counter() - start) / rows
        if launch.drafts:
            self._counted = self._chosen.bytes[size : size + counts].view(np.int32).reshape(count, 3).copy()
        return self._chosen.bytes[:size].view(np.int32).reshape(rows, count).copy()
