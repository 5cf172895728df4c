"""The training step on a GPU after the backward pass: launches of csrc/cuda/update.cu, and their jobs."""

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.build.structs import structure
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.launches import EARLY_LAUNCH
from shakespeare.attention_ext.cuda.tiles import round_up
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.config import EMBEDDING, PLACES, GPTConfig
from shakespeare.training.initial import Floats
from shakespeare.training.recipe import (
    BETAS,
    CLIP,
    EPSILON,
    ITERATIONS,
    LEAST_NORM,
    MOMENTUM,
    QUINTIC,
    Recipe,
)

FOLDER = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
THREADS = 256  # of a block
RESIDENT = 2  # blocks of weight_gradients on a multiprocessor
SLICE_COST = 64  # rows whose products take about as long as writing and reading a slice's sums
# The numbers of Muon and AdamW in update.cu.
FACTORS = {
    **dict(zip(("A1", "A3", "A5"), QUINTIC)),
    "MOMENTUM": MOMENTUM,
    "LEAST_NORM": LEAST_NORM,
    "CLIP": CLIP,
    "EPSILON": EPSILON,
    **{f"BLEND_{i}": 1 - beta for i, beta in enumerate(BETAS, 1)},
    **{f"LOG_BETA_{i}": math.log(beta) for i, beta in enumerate(BETAS, 1)},
}
FLAT = ("value", "gradient", "average", "first", "second")
# A layer's weights, and the norm before each
LAYER = (("attn.c_attn", "ln_1"), ("attn.c_proj", ""), ("mlp.c_fc", "ln_2"), ("mlp.c_proj", ""))


# u8 are addresses
TILE, STRIP, PIECE, PACKING = (
    np.dtype(structure(FOLDER / "update.cu", name)) for name in ("Tile", "Strip", "Piece", "Packing")
)


class Array:
    """Numbers on the GPU, of `bytes` each, 0 at first. memory, address: a part of another Array's."""

    def __init__(
        self, *shape: int, bytes: int = 4, memory: driver.Memory | None = None, address: int = 0
    ) -> None:
        self.shape = shape
        self.bytes = bytes
        self.memory = memory or driver.Memory(max(1, math.prod(shape)) * bytes)
        self.address = address or self.memory.address

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> "Array":
        """With these numbers."""
        array = cls(*numbers.shape, bytes=numbers.itemsize)
        array.write(numbers)
        return array

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, i: int) -> "Array":
        address = self.address + i * math.prod(self.shape[1:]) * self.bytes
        return Array(*self.shape[1:], bytes=self.bytes, memory=self.memory, address=address)

    def write(self, numbers: NDArray[Any]) -> None:
        """Replace all numbers between launches: all before have ended. Not for a part of another Array."""
        driver.synchronize_all()
        self.memory.write(numbers)
        driver.synchronize_all()  # a stream of ours does not wait for the copy

    def read(self, dtype: type = np.float32) -> NDArray[Any]:
        """The numbers, when all launches have ended."""
        driver.synchronize_all()
        return self.memory.read(np.empty(self.shape, dtype), self.address - self.memory.address)


class Flat:
    """A model's parameters, gradients, averages and the optimizers' states, each one Array of float32.

    Parameters are in the order of GPTConfig.shapes() and begin `at` a number by their names. first and
    second: Muon's momentum and nothing, AdamW's exp_avg and exp_avg_sq. updates: one number, theirs.
    """

    def __init__(self, config: GPTConfig) -> None:
        self.shapes = config.shapes()
        *offsets, end = np.cumsum([0, *(round_up(math.prod(s), 64) for s in self.shapes.values())]).tolist()
        self.at = dict(zip(self.shapes, offsets))
        self.value, self.gradient, self.average, self.first, self.second = (Array(end) for _ in FLAT)
        self.updates = Array(1)

    def read(self, name: str) -> dict[str, Floats]:
        """Each parameter's numbers in one of FLAT, in its shape."""
        numbers = getattr(self, name).read()
        return {
            each: numbers[at : at + math.prod(shape)].reshape(shape)
            for (each, shape), at in zip(self.shapes.items(), self.at.values())
        }

    def write(self, name: str, arrays: Mapping[str, Floats]) -> None:
        """Replace what read() gives."""
        numbers = np.zeros(len(self.value), np.float32)
        for each, at in self.at.items():
            numbers[at : at + arrays[each].size] = arrays[each].ravel()
        getattr(self, name).write(numbers)


class Weight(NamedTuple):
    """Where a weight (rows, width), its norm's (or -1) and its gradient's partial sums begin."""

    at: int
    rows: int
    width: int
    gamma: int
    sums: int
    matrices: int  # of Muon's; 0 in the head


def _cut(length: int, limit: int) -> list[tuple[int, int]]:
    """Where pieces begin, and their lengths."""
    return [(begin, min(limit, length - begin)) for begin in range(0, length, limit)]


def _grid(rows: int, height: int, columns: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Row, column, rows and columns of the tiles of a matrix."""
    return ((i, j, h, w) for i, h in _cut(rows, height) for j, w in _cut(columns, width))


def source(dtype: Dtype, capability: tuple[int, int]) -> nvrtc.Source:
    """The kernels of update.cu."""
    sizes = {"FORMAT": driver.FORMATS[dtype], "THREADS": THREADS}
    numbers = {name: f"{number}f" for name, number in FACTORS.items()}
    return nvrtc.Source("update.cu", nvrtc.arch(capability), {**sizes, **numbers}, FOLDER)


class Update:
    """What follows the backward pass, for the parameters in `flat`.

    operands: (dY, X) of the head, the embedding, and of each layer c_attn, attn_proj, c_fc and mlp_proj, each
    (padded rows, width), V rounded up to 32; gradients are dY^T X. dx0: (rows, C) float32, that of the
    embeddings. losses: (rows,) float32, whose mean is written to `loss` and added to the float64 after it,
    both of (2,) float64. packed: the weights as
    csrc/cuda/step.h says, of the head and of each layer in that order, for y = x W^T, then for dx = dy W.
    Raises BuildError as driver.Module does.
    """

    def __init__(
        self,
        config: GPTConfig,
        recipe: Recipe,
        flat: Flat,
        operands: Sequence[tuple[Array, Array]],
        dx0: Array,
        losses: Array,
        loss: Array,
        dtype: Dtype,
        stream: Any,
    ) -> None:
        on = driver.gpu()
        self.stream = stream
        self.size = dtype.bytes
        self.config = config
        self.recipe = recipe
        self.flat = flat
        self.losses = losses
        self.loss = loss
        self.early = on.capability >= EARLY_LAUNCH
        self.module = driver.Module(source(dtype, on.capability))
        sizes = [self.module.ints("products", 9)[3 * i : 3 * i + 3] for i in range(3)]
        # rows and columns of a tile, bytes of shared memory
        self.products = dict(zip(("weight_gradients", "gram", "polynomial", "apply"), sizes[:2] + sizes[1:]))

        self.at = flat.at
        shapes = [[t.shape[1] for t in pair] for pair in operands]
        self.sums = np.cumsum([0, *map(math.prod, shapes)]).tolist()
        head = self.at[EMBEDDING], config.vocab_size, config.n_embd, self.at["transformer.ln_f.weight"]
        self.weights = [Weight(*head, sums=0, matrices=0)]
        for i, ((n, k), sums) in enumerate(zip(shapes[2:], self.sums[2:])):
            layer, which = divmod(i, len(LAYER))
            at, gamma = (self.at.get(f"transformer.h.{layer}.{each}.weight", -1) for each in LAYER[which])
            self.weights.append(Weight(at, n, k, gamma, sums, matrices=3 if n == 3 * k else 1))
        self._gradients(operands, dx0, RESIDENT * on.multiprocessors)
        self._optimizers()
        self._packings()

    def gradients(self) -> None:
        """Write the gradients, which are not clipped, and the mean loss."""
        self._launch("weight_gradients", self.tiles)
        scalars = self.flat.value, self.flat.gradient, self.squares, self.losses, len(self.losses), self.loss
        self._launch("reduce_gradients", self.strips, *scalars, more=1)

    def step(self, fraction: Array, decay: Array) -> None:
        """Clip; step the optimizers by a share of the peak rates, and the average by its decay; scalars."""
        flat = (ctypes.c_void_p * len(FLAT))(*(getattr(self.flat, name).address for name in FLAT))
        clip = (self.squares, len(self.squares))
        updates = self.flat.updates
        self._launch("momentum", self.muon, flat, self.x[0], *clip, self.squares_of_x, updates)
        for i in range(ITERATIONS):  # the first one divides X by its norm, and X X^T by its square
            tiles = self.iterations[i % 2]
            self._launch("gram", tiles["gram"], 0 if i else 2)
            self._launch("polynomial", tiles["polynomial"])
            self._launch("apply", tiles["apply"], 0 if i else 1)
        scalars = fraction, decay, float(self.recipe.weight_decay)
        self._launch("update", self.pieces, flat, self.x[ITERATIONS % 2], *clip, updates, *scalars)

    def pack(self, weights: Array) -> None:
        """Pack the weights, Flat's values or averages, for the next passes."""
        self._launch("pack_weights", self.packings, weights, self.packed)

    def _launch(self, name: str, table: Array, *arguments: Any, more: int = 0) -> None:
        """A block for each job, and `more`."""
        kinds: dict = {int: ctypes.c_int, float: ctypes.c_float, Array: lambda a: ctypes.c_void_p(a.address)}
        scalars = [kinds.get(type(each), lambda same: same)(each) for each in (table, *arguments)]
        shared = self.products.get(name, [0])[-1]
        function = self.module.function(name, shared)
        how = dict[str, Any](shared=shared, early=self.early, stream=self.stream)
        driver.launch(function, len(table) + more, THREADS, *scalars, **how)

    def _table(self, dtype: np.dtype, jobs: list[tuple]) -> Array:
        if dtype is TILE:
            jobs = sorted(jobs, key=lambda tile: -tile[-1])  # the longest sums first
        return Array.of(np.array(jobs, dtype))

    def _tiles(
        self, name: str, a: tuple, b: tuple, out: int, shape: tuple, norm: tuple = (0, 0)
    ) -> list[tuple]:
        """The jobs for a product; shape: its (n, k) and the terms of a sum.

        a, b: the address, elements from row to row, and from one row or column of the product to the next.
        norm: the address of the sums of X's squares, and their count.
        """
        n, k, depth = shape
        height, width, _ = self.products[name]
        size = 4 if name == "weight_gradients" else self.size
        return [
            (a[0] + i * a[2] * self.size, b[0] + j * b[2] * self.size, out + (i * k + j) * size, *norm)
            + (a[1], b[1], k, i, j, h, w, depth)
            for i, j, h, w in _grid(n, height, k, width)
        ]

    def _gradients(self, operands: Sequence[tuple[Array, Array]], dx0: Array, slots: int) -> None:
        """The tables of gradients(). slots: blocks that the GPU holds at a time."""
        height, width, _ = self.products["weight_gradients"]
        rows = len(operands[0][0])
        count = sum(-(-dy.shape[1] // height) * -(-x.shape[1] // width) for dy, x in operands)

        def cost(slices: int) -> float:  # in rows
            return -(-count * slices // slots) * rows / slices + SLICE_COST * slices

        slices = _cut(rows, round_up(-(-rows // min(range(1, slots + 1), key=cost)), 32))
        self.partials = Array(len(slices) * self.sums[-1])
        partials = self.partials.address
        tiles = []
        strips = []
        for number, (first, depth) in enumerate(slices):
            for pair, sums in zip(operands, self.sums):
                a, b = ((t[first].address, t.shape[1], 1) for t in pair)
                out = partials + (number * self.sums[-1] + sums) * 4
                tiles += self._tiles("weight_gradients", a, b, out, (a[1], b[1], depth))
        self.tiles = self._table(TILE, tiles)

        every = [(w, partials, self.sums[-1], len(slices)) for w in self.weights]
        if PLACES in self.at:
            T = self.config.block_size
            C = self.config.n_embd
            places = Weight(self.at[PLACES], T, C, gamma=-1, sums=0, matrices=1)
            every.append((places, dx0.address, T * C, len(dx0) // T))
        for w, sums, slice, count in every:
            embedding = 0 if w.matrices else sums + self.sums[1] * 4
            for i, j, h, _ in _grid(w.rows, THREADS // 2 if w.gamma < 0 else w.rows, w.width, 8):
                place = i * w.width + j
                gamma = -1 if w.gamma < 0 else w.gamma + j
                addresses = sums + (w.sums + place) * 4, embedding and embedding + place * 4
                strips.append((*addresses, slice, w.at + place, gamma, count, h, w.width))
        self.strips = self._table(STRIP, strips)
        self.squares = Array(len(strips))

    def _optimizers(self) -> None:
        """The tables of step(), and Muon's X, twice, S and P of all matrices."""
        pieces: list[tuple] = []
        matrices = []  # X's rows, columns and beginning, that of S, the squares' and their count
        x = 0
        s = 0
        for w in self.weights:
            for number in range(w.matrices):
                rows = w.rows // w.matrices
                cols = w.width
                begin = len(pieces)
                to = (1, rows) if rows > cols else (cols, 1)  # the next row, column
                for i, j, h, _ in _grid(rows, THREADS // 4, cols, 32):
                    at = w.at + (number * rows + i) * cols + j
                    scale = math.sqrt(max(1, rows / cols))
                    muon = x + i * to[0] + j * to[1], h, cols, *to, 1, self.recipe.muon_lr, scale
                    pieces.append((at, *muon))
                n, m = sorted((rows, cols))
                matrices.append((n, m, x, s, begin, len(pieces) - begin))
                x += n * m
                s += n * n
        self.x = [Array(x, bytes=self.size) for _ in range(2)]
        self.square = Array(2 * s, bytes=self.size)
        self.squares_of_x = Array(len(pieces))
        self.muon = self._table(PIECE, pieces)
        self.iterations = []  # with even and with odd numbers
        for x_now, x_next in (self.x, self.x[::-1]):
            jobs: dict[str, list[tuple]] = {"gram": [], "polynomial": [], "apply": []}
            for n, m, x, at, begin, count in matrices:
                norm = (self.squares_of_x[begin].address, count)
                X = x_now[x].address
                S, P = ((self.square[place].address, n, n) for place in (at, s + at))
                jobs["gram"] += self._tiles("gram", (X, m, m), (X, m, m), S[0], (n, n, m), norm)
                jobs["polynomial"] += self._tiles("polynomial", S, S, P[0], (n, n, n))
                jobs["apply"] += self._tiles("apply", P, (X, m, 1), x_next[x].address, (n, m, n), norm)
            self.iterations.append({name: self._table(TILE, tiles) for name, tiles in jobs.items()})
        for name, shape in self.config.shapes().items():
            if ".h." not in name or len(shape) == 1:
                rate = self.recipe.position_lr if name == PLACES else self.recipe.adam_lr
                rows, cols = shape if len(shape) == 2 else (1, *shape)
                for i, j, h, _ in _grid(rows, THREADS // 4, cols, 32):
                    pieces.append((self.at[name] + i * cols + j, 0, h, cols, 0, 0, 0, rate, 0))
        self.pieces = self._table(PIECE, pieces)

    def _packings(self) -> None:
        jobs = []
        out = 0
        columns = 64 // self.size  # of a packed matrix's block
        for w in self.weights:
            rows = round_up(w.rows, 32)
            for transposed, (n, k) in enumerate(((rows, w.width), (w.width, rows))):
                job = w.at, w.gamma, out, w.rows, w.width, n, k, transposed
                jobs += [(*job, first) for first, _ in _cut(n // 8 * (k // columns), THREADS // 32)]
                out += n * k
        self.packed = Array(out, bytes=self.size)
        self.packings = self._table(PACKING, jobs)
