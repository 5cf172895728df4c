"""How blocks of a GPU, or clusters of them from 9.0 on, hold a model: csrc/cuda/cluster.cu and grid.cu."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.build.structs import constants
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.launches import Gpu
from shakespeare.attention_ext.parts import CachePrecision, Dtype, Precision
from shakespeare.generation.engines.engine import Floats, Unfit, check_plain
from shakespeare.generation.engines.slots import CONSTANTS, ROW
from shakespeare.model import draft
from shakespeare.model.checkpoint import bf16_bits
from shakespeare.model.config import EMBEDDING, GPTConfig

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
CAPABILITY = (8, 0)  # the least that reduces integers in a warp
CLUSTER_CAPABILITY = (9, 0)  # the least that has clusters
CLUSTERS = (16, 8)  # blocks of a cluster, the best for one text first; a GPU may refuse 16
THREADS = 256  # of a block
LANES = 32  # of a warp
# A lane's keys at a time, by the number of warps that attend to a text together in a cluster.
STRIPS = {8: 2, 4: 2, 2: 4, 1: 6}
DRAFT_ROWS = 4  # of a pass with drafts: on an H100 a fifth adds 8 % of tokens and 13 % of time
MOST_TEXTS = 5  # of a cluster's pass: what shared memory has room for beside shakes256 in float32
GRID_TEXTS = (1, 2, 4, 8)  # of a block of the grid: with more, the registers do not suffice for two blocks
PROMPT_TEXTS = 4  # tokens of a prompt in a block
GRID_STRIP = 4  # as STRIPS
PROMPT_STRIP = 2
RESIDENT = 2  # blocks of a multiprocessor, of which one may read keys while the other multiplies
WEIGHT_BITS = {Precision.FP32: 32, Precision.BF16: 16}  # int8 has no kernel
HEAD_DIMS = (4, 8, 16, 32, 64, 128)  # a power of two of lanes reads a key
BARRIERS = constants(SOURCES / "cluster.h")["BARRIERS"]
# The kernels' phases, as gpt.py profile names them.
PHASES = ("embedding", "QKV", "attention", "projection", "MLP up", "MLP down", "head", "sampling", "waiting")
CACHE_SHARE = 4  # of the L2 cache, for the weights that each block of the grid reads for every token


@dataclass(frozen=True)
class Layout(ABC):
    """How blocks hold a model: what a kernel is compiled with. clocks: it counts its phases' cycles."""

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
        macros = {
            **CONSTANTS,
            **draft.MACROS,
            **macros,
            "FORMAT": driver.FORMATS[Dtype(self.kv_cache)],
            "WEIGHT_BITS": WEIGHT_BITS[self.weights],
            "LAYERS": c.n_layer,
            "HEADS": c.n_head,
            "HEAD_DIM": c.head_dim,
            "VOCAB": c.vocab_size,
            "TEXTS": texts,
            "THREADS": THREADS,
            "BIAS": c.bias,
            "CLOCKS": self.clocks,
            "SHARED_BYTES": self.shared(texts),
        }
        return nvrtc.Source(
            file, nvrtc.arch(capability), {name: int(n) for name, n in macros.items()}, SOURCES
        )

    def _pack(
        self,
        packed: NDArray[Any],
        tensors: Mapping[str, Floats],
        matrix: Callable[[Floats, int], Floats],
        vector: Callable[[Floats, int], Floats],
    ) -> None:
        """Fill `packed`. matrix, vector: what is held of a tensor, of so many parts."""
        c = self.config

        def fill_norm(norm: NDArray[Any], name: str) -> None:
            norm["gain"] = tensors[f"{name}.weight"]
            if c.bias:
                norm["bias"] = tensors[f"{name}.bias"]

        matrices = (
            ("qkv", "attn.c_attn"),
            ("proj", "attn.c_proj"),
            ("fc", "mlp.c_fc"),
            ("out", "mlp.c_proj"),
        )
        for i in range(c.n_layer):
            vectors = packed["vectors"][:, i]
            prefix = f"transformer.h.{i}"
            for name, full in matrices:
                parts = 3 if name == "qkv" else 1
                packed["layers"][name][:, i] = self._weight(matrix(tensors[f"{prefix}.{full}.weight"], parts))
                if c.bias:
                    vectors[name] = vector(tensors[f"{prefix}.{full}.bias"], parts)
            for name in ("ln_1", "ln_2"):
                fill_norm(vectors[name], f"{prefix}.{name}")
        fill_norm(packed["ln_f"], "transformer.ln_f")

    def _weight(self, numbers: Floats) -> NDArray[Any]:
        return numbers if self.weights is Precision.FP32 else bf16_bits(numbers)

    def _counters(self) -> int:
        """Bytes of the cycles in struct Shared."""
        return 8 * self.clocks * (len(PHASES) + 1)


@dataclass(frozen=True)
class Cluster(Layout):
    """A cluster's `blocks` share the model in shared memory: cluster.cu. drafts: rows are of one text."""

    blocks: int
    drafts: bool = False

    @property
    def head_rows(self) -> int:
        """A block's rows of the head, of which the last block's may lie beyond the vocabulary."""
        return -(-self.config.vocab_size // self.blocks)

    @functools.cached_property
    def image(self) -> np.dtype:
        C = self.config.n_embd
        share = C // self.blocks
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
        size += 8 * ROW + 8 * BARRIERS + self._counters()
        return self.image.itemsize + -(-size // 16) * 16

    def attending(self, texts: int) -> tuple[int, int]:
        """(warps that attend to a text together, a lane's keys at a time) of passes of this many texts.

        As many warps as possible attend at once: to one text, or to several.
        """
        warps = THREADS // LANES
        team = warps if self.drafts else max(1, warps >> (texts - 1).bit_length())
        return team, STRIPS[team]

    def most_texts(self, shared: int) -> int:
        """The most texts of a pass in so many bytes of shared memory; 0 if the model does not fit."""
        rows = -(-4 * self.config.n_embd // self.blocks * LANES // THREADS)  # a warp's, of the widest matrix
        limit = min(MOST_TEXTS, self.blocks) if rows <= LANES else 0
        return max((texts for texts in range(1, limit + 1) if self.shared(texts) <= shared), default=0)

    def alone(self, drafts: bool, shared: int) -> "tuple[Cluster, int]":
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
        packed = np.zeros(self.blocks, self.image)

        def shares(tensor: Floats, parts: int) -> Floats:
            """Each block's rows, its share of each of so many parts."""
            split = tensor.reshape(parts, self.blocks, -1, *tensor.shape[1:])
            return split.swapaxes(0, 1).reshape(self.blocks, -1, *tensor.shape[1:])

        self._pack(packed, tensors, shares, shares)
        head = np.zeros((self.blocks * self.head_rows, c.n_embd), np.float32)
        head[: c.vocab_size] = tensors[EMBEDDING]
        packed["head"] = self._weight(shares(head, 1))
        return packed


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
        together = texts if self.prompt else 1
        heads = texts // together * c.n_head
        units = heads * max(1, THREADS // LANES // heads)
        logits = -(-c.vocab_size // 4) * 4
        various = max(4 * c.n_embd, (logits + 2 * c.vocab_size + 2) // 4 * 4)
        normed = c.n_embd
        partial = units * together * (c.head_dim + 4)
        if self._tiled:
            normed, various = ((n + 15) // 32 * 32 + 16 for n in (normed, various))
        else:
            partial = max(4 * THREADS * texts, partial)
        size = texts * (4 * (c.n_embd + normed + various) + 20) + 4 * partial
        size = -(-size // 8) * 8 + self._counters()
        return -(-size // 16) * 16

    def most_texts(self, shared: int) -> int:
        """The most texts of a block in so many bytes of shared memory; 0 if the model does not fit."""
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

        packed = np.zeros(1, self.image)
        self._pack(packed, tensors, matrix, lambda tensor, parts: tensor)
        packed["head"] = self._weight(matrix(tensors[EMBEDDING]))
        return packed


class Launch(NamedTuple):
    """A kernel for passes of `texts` texts, or tokens of a prompt. leading: blocks that attend first."""

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
    return np.dtype([*fields, ("padding", np.uint8, -np.dtype(fields).itemsize % 16)])


def layouts_for(
    config: GPTConfig, weights: Precision, kv_cache: CachePrecision, on: Gpu, clocks: bool = False
) -> tuple[list[Cluster], Grid]:
    """How a GPU may hold a model for few texts, the best for one text first, and for many.

    Device.clusters() says whether the GPU takes a size. Raises Unfit for a model that the engine refuses.
    """
    check_plain("cuda", config)
    if weights not in WEIGHT_BITS:
        raise Unfit(f"the cuda engine has weights in {' and '.join(WEIGHT_BITS)}, not {weights}")
    if on.capability < CAPABILITY:
        has, needed = (".".join(map(str, capability)) for capability in (on.capability, CAPABILITY))
        raise Unfit(f"the cuda engine needs compute capability {needed}; {on.name} has {has}")
    if config.head_dim not in HEAD_DIMS:
        raise Unfit(f"the cuda engine takes heads of {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}")
    if config.n_embd % CLUSTERS[-1]:
        raise Unfit(f"the cuda engine takes n_embd of multiples of {CLUSTERS[-1]}, not {config.n_embd}")
    grid = Grid(config, weights, kv_cache, clocks=clocks)
    size = grid.image.itemsize
    limit = on.l2 // CACHE_SHARE
    if size > limit or not grid.most_texts(on.shared):
        has = f"the model has {size:,} in {weights}"
        raise Unfit(f"the cuda engine takes {limit:,} bytes of weights on {on.name}; {has}")
    sizes = CLUSTERS if on.capability >= CLUSTER_CAPABILITY else ()
    clusters = [Cluster(config, weights, kv_cache, n, clocks=clocks) for n in sizes if config.n_embd % n == 0]
    return [layout for layout in clusters if layout.most_texts(on.shared)], grid


class Device:
    """The first GPU, with a stream for the engines, and the kernels of layouts on it. on: what it is."""

    def __init__(self) -> None:
        self.on = driver.gpu()
        self.activate()
        self.stream = driver.stream()
        self._clusters: dict[Cluster, int] = {}

    def activate(self) -> None:
        """Make the GPU's context the calling thread's."""
        driver.activate()

    def prepare(self, kernels: Iterable[tuple[Layout, int]]) -> None:
        """Compile those that nobody has compiled yet, at the same time: each takes a second or two."""
        nvrtc.make_all(layout.source(texts, self.on.capability) for layout, texts in dict.fromkeys(kernels))

    @functools.cache
    def kernel(self, layout: Layout, texts: int) -> tuple[Any, object]:
        """The function for passes of so many texts, and what keeps it alive."""
        module = driver.Module(layout.source(texts, self.on.capability))
        in_clusters = isinstance(layout, Cluster)
        shared = self.on.shared if in_clusters else layout.shared(texts)
        return module.function("decode", shared, in_clusters), module

    @functools.cache
    def launch(self, layout: Layout, texts: int, blocks: int, shared: int = 0) -> Any:
        """The driver's description of a launch of so many blocks. shared: bytes, if not the layout's."""
        cluster = layout.blocks if isinstance(layout, Cluster) else 0
        waiting = isinstance(layout, Grid) and layout.prompt  # for each other, so all blocks must run
        shared = shared or layout.shared(texts)
        return driver.prepared_launch(blocks, THREADS, shared, self.stream, cluster, waiting)

    def clusters(self, layout: Cluster, drafts: bool = False) -> int:
        """The most clusters that run at a time, a block on a multiprocessor; 0 if none of this size runs.

        Any kernel of the layout tells; that for one text, with drafts or without, is loaded on first use.
        """
        if layout not in self._clusters:
            function, _ = self.kernel(*layout.alone(drafts, self.on.shared))
            config = self.launch(layout, 1, layout.blocks, self.on.shared)
            self._clusters[layout] = driver.most_clusters(function, config)
        return self._clusters[layout]

    @functools.cache
    def resident(self, layout: Grid, texts: int) -> int:
        """The most blocks that run at a time."""
        shared = layout.shared(texts) + driver.attribute("RESERVED_SHARED_MEMORY_PER_BLOCK")
        of_one = driver.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // shared
        return min(RESIDENT, of_one) * self.on.multiprocessors


@functools.cache
def device() -> Device:
    """The GPU of all cuda engines. Raises BuildError, in one line, if there is none."""
    return Device()
