"""The training step on a GPU after the backward pass: the tables of jobs and the launches of csrc/cuda/update.cu."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.cuda import gpu as driver
from shakespeare.attention_ext.cuda.tiles import up
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.config import EMBEDDING, PLACES, GPTConfig
from shakespeare.training.recipe import Recipe

FOLDER = Path(__file__).resolve().parent.parent / "csrc" / "cuda"
THREADS = 256  # of a block
PIECE, CHUNK = (THREADS // 4, 32), 2048  # Muon's rows and columns of a block, AdamW's numbers
STRIP = THREADS // 2, 8  # rows that a block of reduce_gradients takes at a time, and its columns
RESIDENT = 2  # blocks of weight_gradients on a multiprocessor
SLICE_COST = 64  # rows whose products take about as long as writing and reading a slice's sums
ITERATIONS = 5
FLAT = ("value", "gradient", "average", "first", "second")
KERNELS = (
    *("weight_gradients", "reduce_gradients", "momentum", "gram", "polynomial", "apply", "update"),
    "pack_weights",
)


def _struct(**fields: str) -> np.dtype:
    return np.dtype([(name, kind) for kind, names in fields.items() for name in names.split()], align=True)


# The structs of update.cu; u8 are addresses
TILE = _struct(u8="a b out squares", i4="count a_stride b_stride out_stride row column rows columns depth")
STRIPS = _struct(u8="sums added", i8="slice at gamma", i4="slices rows width")
PIECES = _struct(i8="at x", i4="rows width x_row x_column count", f4="rate scale")
PACKING = _struct(i8="at gamma out", i4="rows width n k transposed first")


@dataclass(frozen=True)
class Flat:
    """A model's parameters, gradients, averages and the optimizers' states, each one float32 tensor.

    Parameters are in the order of GPTConfig.shapes(), and begin at `offsets`. first and second: Muon's momentum and
    nothing, AdamW's exp_avg and exp_avg_sq. updates: a scalar, how many there were.
    """

    value: Tensor
    gradient: Tensor
    average: Tensor
    first: Tensor
    second: Tensor
    updates: Tensor
    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def zeros(cls, config: GPTConfig, device: torch.device) -> "Flat":
        """Zeros for a model's parameters."""
        shapes = tuple(config.shapes().values())
        ends = np.cumsum([up(math.prod(shape), 64) for shape in shapes]).tolist()
        tensors = (torch.zeros(ends[-1], device=device) for _ in FLAT)
        return cls(*tensors, torch.zeros((), device=device), (0, *ends[:-1]), shapes)

    def views(self, i: int) -> dict[str, Tensor]:
        """Parameter i, in its shape, in each of the five tensors."""
        begin, shape = self.offsets[i], self.shapes[i]
        return {name: getattr(self, name)[begin : begin + math.prod(shape)].view(shape) for name in FLAT}


class Weight(NamedTuple):
    """A weight (rows, width), of so many `matrices` of Muon's, and where it is in the flat tensors and in partial sums.

    gamma: where its norm's weight is, or -1.
    """

    at: int
    rows: int
    width: int
    gamma: int
    sums: int
    matrices: int


class Operand(NamedTuple):
    """An operand's address, and elements from row to row, and from one of a tile's rows or columns to the next."""

    address: int
    stride: int
    step: int


def _cut(length: int, most: int) -> list[tuple[int, int]]:
    """Where pieces begin, and their lengths."""
    return [(begin, min(most, length - begin)) for begin in range(0, length, most)]


class Update:
    """What follows the backward pass, for the parameters in `flat`.

    operands: (dY, X) of the head, the embedding, and in each layer c_attn, attn_proj, c_fc and mlp_proj. Both are
    (padded rows, width), V rounded up to 32; gradients are dY^T X. dx0: (rows, C) float32, the embeddings'
    gradient. losses: (rows,) float32, whose mean is written to the scalar `loss`. packed: the weights as
    csrc/cuda/step.h says: of the head and of each layer in that order for y = x W^T, then for dx = dy W.
    Raises BuildError as driver.Module does.
    """

    def __init__(
        self,
        config: GPTConfig,
        recipe: Recipe,
        flat: Flat,
        operands: Sequence[tuple[Tensor, Tensor]],
        dx0: Tensor,
        losses: Tensor,
        loss: Tensor,
        dtype: Dtype,
        index: int,
    ) -> None:
        on, kind = driver.gpu(index), getattr(torch, dtype.torch_name)
        self.config, self.recipe, self.flat, self.size, self.kind = config, recipe, flat, dtype.bytes, kind
        macros = {"FORMAT": driver.FORMATS[dtype], "THREADS": THREADS}
        arch = f"sm_{on.capability[0]}{on.capability[1]}"
        module = driver.Module(nvrtc.Source("update.cu", arch, macros, FOLDER))
        sizes = module.ints("products", 9)
        self.shared = dict(weight_gradients=sizes[2], gram=sizes[5], polynomial=sizes[5], apply=sizes[8])
        self.tile = dict(weight_gradients=sizes[:2], gram=sizes[3:5], polynomial=sizes[3:5], apply=sizes[6:8])
        self.functions = {name: module.function(name, self.shared.get(name, 0)) for name in KERNELS}
        self.losses, self.loss = losses, loss

        self.at = dict(zip(config.shapes(), flat.offsets))
        shapes = [(dy.shape[1], x.shape[1]) for dy, x in operands]
        self.sums = np.cumsum([0, *(n * k for n, k in shapes)]).tolist()  # where products begin in a slice
        names = (
            ("attn.c_attn", "ln_1", 3),
            ("attn.c_proj", "", 1),
            ("mlp.c_fc", "ln_2", 1),
            ("mlp.c_proj", "", 1),
        )
        V, C = config.vocab_size, config.n_embd
        self.weights = [Weight(self.at[EMBEDDING], V, C, self.at["transformer.ln_f.weight"], 0, 0)]
        for i, (n, k) in enumerate(shapes[2:]):
            name, norm, matrices = names[i % 4]
            at, gamma = (self.at.get(f"transformer.h.{i // 4}.{each}.weight", -1) for each in (name, norm))
            self.weights.append(Weight(at, n, k, gamma, self.sums[i + 2], matrices))
        slices = self._slices(shapes, len(operands[0][0]), RESIDENT * on.multiprocessors)
        self.partials = self._zeros(len(slices) * self.sums[-1])
        self.products = self._products(operands, slices)
        self.strips = self._strips(len(slices), dx0)
        self.squares = self._zeros(len(self.strips))
        self._optimizers()
        self._packings()

    def gradients(self) -> None:
        """Write the gradients, which are not clipped, and the mean loss."""
        self._launch("weight_gradients", self.products)
        written = (self.flat.value, self.flat.gradient, self.squares)
        self._launch(
            "reduce_gradients", self.strips, *written, self.losses, len(self.losses), self.loss, more=1
        )

    def step(self, fraction: Tensor, decay: Tensor) -> None:
        """Clip, and step both optimizers by a fraction of the peak rates and the average by its decay, both scalars."""
        flat = (ctypes.c_void_p * len(FLAT))(*(getattr(self.flat, name).data_ptr() for name in FLAT))
        clip, updates, decayed = (
            (self.squares, len(self.squares)),
            self.flat.updates,
            self.recipe.weight_decay,
        )
        self._launch("momentum", self.muon, flat, self.x[0], *clip, self.squares_of_x, updates)
        for i in range(ITERATIONS):
            self._launch("gram", self.grams[i % 2], int(i == 0))
            self._launch("polynomial", self.polynomials)
            self._launch("apply", self.applies[i % 2], int(i == 0))
        self._launch("update", self.pieces, flat, self.x[1], *clip, updates, fraction, decay, decayed)

    def pack(self) -> None:
        """Pack the weights for the next passes."""
        self._launch("pack_weights", self.packings, self.flat.value, self.packed)

    def _launch(self, name: str, table: Tensor, *arguments: Any, more: int = 0) -> None:
        """A block for each job, and `more`."""
        given: list[Any] = [ctypes.c_void_p(table.data_ptr())]
        for each in arguments:
            address = ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each
            number = {int: ctypes.c_int, float: ctypes.c_float}.get(type(each))
            given.append(number(each) if number else address)
        shared = self.shared.get(name, 0)
        driver.launch(self.functions[name], len(table) + more, THREADS, *given, shared=shared)

    def _zeros(self, count: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(count, dtype=kind, device=self.flat.value.device)

    def _table(self, kind: np.dtype, jobs: list[tuple]) -> Tensor:
        data = torch.from_numpy(np.array(jobs, kind).view(np.uint8).reshape(len(jobs), -1))
        return data.to(self.flat.value.device)

    def _tiles(
        self, name: str, a: Operand, b: Operand, out: int, shape: tuple[int, int, int], *norm: int
    ) -> list[tuple]:
        """The jobs for a product (n, k) of sums of `depth` terms. norm: address and count of X's squares."""
        (n, k, depth), (rows, columns) = shape, self.tile[name]
        size = 4 if name == "weight_gradients" else self.size
        return [
            (
                *(a.address + i * a.step * self.size, b.address + j * b.step * self.size),
                *(out + (i * k + j) * size, *(norm or (0, 0))),
                *(a.stride, b.stride, k, i, j, height, width, depth),
            )
            for i, height in _cut(n, rows)
            for j, width in _cut(k, columns)
        ]

    def _slices(self, shapes: list[tuple[int, int]], rows: int, slots: int) -> list[tuple[int, int]]:
        """Of the rows, so many that blocks fill the GPU, which holds `slots` at a time."""
        height, width = self.tile["weight_gradients"]
        tiles = sum(-(-n // height) * -(-k // width) for n, k in shapes)

        def cost(slices: int) -> float:  # in rows
            return -(-tiles * slices // slots) * rows / slices + SLICE_COST * slices

        return _cut(rows, up(-(-rows // min(range(1, slots + 1), key=cost)), 32))

    def _products(self, operands: Sequence[tuple[Tensor, Tensor]], slices: list[tuple[int, int]]) -> Tensor:
        jobs = []
        for number, (first, depth) in enumerate(slices):
            for pair, sums in zip(operands, self.sums):
                a, b = (Operand(t[first].data_ptr(), t.shape[1], 1) for t in pair)
                out = self.partials.data_ptr() + (number * self.sums[-1] + sums) * 4
                jobs += self._tiles("weight_gradients", a, b, out, (a.stride, b.stride, depth))
        return self._table(TILE, jobs)

    def _strips(self, slices: int, dx0: Tensor) -> Tensor:
        jobs: list[tuple] = []

        def add(weight: Weight, sums: int, added: int, *slices: int) -> None:
            at, rows, width, gamma, *_ = weight
            for i, height in _cut(rows, rows if gamma >= 0 else STRIP[0]):
                for j in range(0, width, STRIP[1]):
                    place = i * width + j
                    more = added and added + place * 4
                    of = (at + place, gamma + j if gamma >= 0 else -1)
                    jobs.append((sums + place * 4, more, slices[0], *of, slices[1], height, width))

        partials = self.partials.data_ptr()
        for weight in self.weights:
            added = 0 if weight.matrices else partials + self.sums[1] * 4
            add(weight, partials + weight.sums * 4, added, self.sums[-1], slices)
        if PLACES in self.at:
            T, C = self.config.block_size, self.config.n_embd
            add(Weight(self.at[PLACES], T, C, -1, 0, 0), dx0.data_ptr(), 0, T * C, len(dx0) // T)
        return self._table(STRIPS, jobs)

    def _optimizers(self) -> None:
        """Muon's X twice, S, P, and the tables of step()."""
        size, muon, x, s = self.size, [], 0, 0
        matrices = []  # rows and columns of X, where it and its S begin, where its squares begin and their count
        for w in self.weights:
            for number in range(w.matrices):
                rows, cols = w.rows // w.matrices, w.width
                at, scale = w.at + number * rows * cols, math.sqrt(max(1, rows / cols))
                to_row, to_column = (1, rows) if rows > cols else (cols, 1)
                begin = len(muon)
                for i, height in _cut(rows, PIECE[0]):
                    for j, _ in _cut(cols, PIECE[1]):
                        place = (at + i * cols + j, x + i * to_row + j * to_column)
                        muon.append((*place, height, cols, to_row, to_column, 0, self.recipe.muon_lr, scale))
                n, m = sorted((rows, cols))
                matrices.append((n, m, x, s, begin, len(muon) - begin))
                x, s = x + n * m, s + n * n
        self.x = self._zeros(x, self.kind), self._zeros(x, self.kind)
        self.S, self.P, self.squares_of_x = (
            self._zeros(s, self.kind),
            self._zeros(s, self.kind),
            self._zeros(len(muon)),
        )
        grams, polynomials, applies = ([], []), [], ([], [])  # of iterations with even and odd numbers
        for n, m, x, s, begin, count in matrices:
            norm = (self.squares_of_x.data_ptr() + begin * 4, count)
            S, P = (Operand(t[s:].data_ptr(), n, n) for t in (self.S, self.P))
            for odd in range(2):
                X, to = self.x[odd][x:].data_ptr(), self.x[1 - odd][x:].data_ptr()
                rows_of = Operand(X, m, m)
                grams[odd].extend(self._tiles("gram", rows_of, rows_of, S.address, (n, n, m), *norm))
                applies[odd].extend(self._tiles("apply", P, Operand(X, m, 1), to, (n, m, n), *norm))
            polynomials += self._tiles("polynomial", S, S, P.address, (n, n, n))
        for each in grams:
            each.sort(key=lambda tile: -tile[-1])  # the longest sums first
        self.grams = [self._table(TILE, each) for each in grams]
        self.polynomials, self.applies = (
            self._table(TILE, polynomials),
            [self._table(TILE, each) for each in applies],
        )
        self.muon = self._table(PIECES, muon)
        for name, shape in self.config.shapes().items():
            if ".h." not in name or len(shape) == 1:
                rate = self.recipe.position_lr if name == PLACES else self.recipe.adam_lr
                for begin, count in _cut(math.prod(shape), CHUNK):
                    muon.append((self.at[name] + begin, 0, 0, 0, 0, 0, count, rate, 0.0))
        self.pieces = self._table(PIECES, muon)

    def _packings(self) -> None:
        jobs, out, columns = [], 0, 64 // self.size  # of a packed matrix's block
        for w in self.weights:
            rows = up(w.rows, 32)
            for transposed, (n, k) in enumerate(((rows, w.width), (w.width, rows))):
                of = (w.at, w.gamma, out, w.rows, w.width, n, k, transposed)
                jobs += [(*of, first) for first, _ in _cut(n // 8 * (k // columns), THREADS // 32)]
                out += n * k
        self.packed, self.packings = self._zeros(out, self.kind), self._table(PACKING, jobs)
