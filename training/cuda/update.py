"""The training step on a GPU after the backward pass: csrc/cuda/update.cu, its tables of jobs and its launches."""

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
PIECE = THREADS // 4, 32  # rows and columns of Muon's pieces
CHUNK = 2048  # numbers of AdamW's
STRIP = 8  # columns of a gradient's, whose rows THREADS / 2 threads take
ITERATIONS = 5  # of Newton-Schulz
RESIDENT = 2  # blocks of weight_gradients on a multiprocessor
SLICE_COST = 64  # rows whose products take about as long as writing and reading a slice's sums
MOST_SLICES = 16
FLAT = ("value", "gradient", "average", "first", "second")


def _struct(**fields: str) -> np.dtype:
    return np.dtype([(name, kind) for kind, names in fields.items() for name in names.split()], align=True)


# The structs of update.cu, with addresses as numbers
TILE = _struct(u8="a b out S squares", i4="a_stride b_stride out_stride rows columns depth diagonal count")
STRIPS = _struct(u8="sums added", i8="slice at gamma", i4="slices rows width")
PIECES = _struct(i8="at x", i4="rows width x_row x_column count", f4="rate scale")
PACKING = _struct(i8="at gamma out", i4="rows width n k transposed first")


@dataclass(frozen=True)
class Flat:
    """A model's parameters, gradients, averages and the optimizers' states, float32, as update.cu has them.

    Parameters are in GPTConfig.shapes()'s order, without biases; each begins at one of `offsets`. first, second:
    the momentum and nothing of Muon's, exp_avg and exp_avg_sq of AdamW's. updates: how many there were.
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
        tensors = {name: torch.zeros(ends[-1], device=device) for name in FLAT}
        updates = torch.zeros((), device=device)
        return cls(**tensors, updates=updates, offsets=(0, *ends[:-1]), shapes=shapes)

    def views(self, i: int) -> dict[str, Tensor]:
        """Parameter i in each of FLAT, in its shape."""
        begin, shape = self.offsets[i], self.shapes[i]
        return {name: getattr(self, name)[begin : begin + math.prod(shape)].view(shape) for name in FLAT}


def _cut(length: int, most: int) -> list[tuple[int, int]]:
    """Begins and lengths of pieces."""
    return [(begin, min(most, length - begin)) for begin in range(0, length, most)]


@dataclass(frozen=True)
class _Weight:
    """A layer's or the head's weight: where it, its norm's weight (or -1) and the partial sums begin."""

    at: int
    rows: int
    width: int
    gamma: int
    sums: int
    matrices: int = 1  # of Muon, 0 without it


class Update:
    """What follows the backward pass, for parameters in `flat`.

    operands: for the head, the embedding and of each layer c_attn, attn_proj, c_fc and mlp_proj (dY, X), each
    (padded rows, width), whose dY^T X is the gradient; the head's and the embedding's dY have a width that is
    rounded up to 32. dx0: (rows, C), float32, the positions' gradient before the sum over the batch. losses: (rows,)
    float32. loss: a scalar, which gets their mean. packed: the weights, as csrc/cuda/step.h says: the head's, of
    each layer as the operands, of each y = x W^T and then dx = dy W. Raises BuildError as driver.Module does.
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
        on, device, self.kind = driver.gpu(index), flat.value.device, getattr(torch, dtype.torch_name)
        arch, macros = "sm_{}{}".format(*on.capability), {"FORMAT": driver.FORMATS[dtype], "THREADS": THREADS}
        self.module = driver.Module(nvrtc.Source("update.cu", arch, macros, FOLDER))
        products = self.module.ints("products", 9)
        self.shapes = {name: products[3 * i : 3 * i + 2] for i, name in enumerate(("weights", "rows", "x"))}
        shared = dict(zip(("weight_gradients", "gram", "apply"), products[2::3]))
        self.shared = shared | {"polynomial": shared["gram"]}
        self.device, self.flat, self.losses, self.loss = device, flat, losses, loss
        self.decay, self.size = recipe.weight_decay, dtype.bytes
        self.functions: dict[str, Any] = {}

        weights = self._weights(config, [(dy.shape[1], x.shape[1]) for dy, x in operands])
        self.packed = self._packings(weights)
        self._gradients(config, weights, operands, dx0, RESIDENT * on.multiprocessors)
        self._optimizers(config, recipe, weights)
        self.pointers = (ctypes.c_void_p * len(FLAT))(*(getattr(flat, name).data_ptr() for name in FLAT))

    def gradients(self) -> None:
        """Write the gradients, which are not clipped, and the mean loss."""
        self._launch("weight_gradients", self.weight_tiles)
        value, gradient, losses = self.flat.value, self.flat.gradient, self.losses
        arguments = (value, gradient, self.squares, losses, len(losses), self.loss)
        self._launch("reduce_gradients", self.strips, *arguments, more=1)

    def step(self, fraction: Tensor, decay: Tensor) -> None:
        """Clip, and step both optimizers by a fraction of the peak rates, and the average by its decay."""
        clip, updates = (self.squares, len(self.squares)), self.flat.updates
        self._launch("momentum", self.muon, self.pointers, self.x[0], *clip, self.squares_of_x, updates)
        for i in range(ITERATIONS):
            self._launch("gram", self.grams[i % 2], int(i == 0))
            self._launch("polynomial", self.polynomials)
            self._launch("apply", self.applies[i % 2], int(i == 0))
        x, settings = self.x[ITERATIONS % 2], (updates, fraction, decay, self.decay)
        self._launch("update", self.pieces, self.pointers, x, *clip, *settings)

    def pack(self) -> None:
        """Pack the weights for the next passes."""
        self._launch("pack_weights", self.packings, self.flat.value, self.packed)

    def _launch(self, name: str, table: Tensor, *arguments: object, more: int = 0) -> None:
        """A block for each job, and `more`."""
        shared = self.shared.get(name, 0)
        if name not in self.functions:
            self.functions[name] = self.module.function(name, shared)
        given: list[Any] = [ctypes.c_void_p(table.data_ptr())]
        for each in arguments:
            if isinstance(each, Tensor):
                given.append(ctypes.c_void_p(each.data_ptr()))
            elif isinstance(each, int | float):
                given.append(ctypes.c_int(each) if isinstance(each, int) else ctypes.c_float(each))
            else:
                given.append(each)
        driver.launch(self.functions[name], len(table) + more, THREADS, *given, shared=shared)

    def _table(self, kind: np.dtype, jobs: Iterable[tuple]) -> Tensor:
        rows = np.array(list(jobs), kind)
        return torch.from_numpy(rows.view(np.uint8).reshape(len(rows), -1)).to(self.device)

    def _zeros(self, *shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=self.device)

    def _weights(self, config: GPTConfig, shapes: list[tuple[int, int]]) -> list[_Weight]:
        """The head, then each layer's; the partial sums are those of the operands, one after another."""
        at, sizes = dict(zip(config.shapes(), self.flat.offsets)), [n * k for n, k in shapes]
        sums = np.cumsum([0, *sizes]).tolist()
        self.total, self.embedding, C = sums[-1], sums[1], config.n_embd
        found = [_Weight(at[EMBEDDING], config.vocab_size, C, at["transformer.ln_f.weight"], 0, 0)]
        names = (("attn.c_attn", "ln_1"), ("attn.c_proj", ""), ("mlp.c_fc", "ln_2"), ("mlp.c_proj", ""))
        for i, (n, k) in enumerate(shapes[2:]):
            name, norm = (f"transformer.h.{i // 4}.{part}.weight" for part in names[i % 4])
            found.append(_Weight(at[name], n, k, at.get(norm, -1), sums[i + 2], 3 if i % 4 == 0 else 1))
        return found

    def _packings(self, weights: list[_Weight]) -> Tensor:
        jobs, out, columns = [], 0, 64 // self.size  # of a block
        for w in weights:
            for transposed, (n, k) in enumerate(((up(w.rows, 32), w.width), (w.width, up(w.rows, 32)))):
                jobs += [
                    (w.at, w.gamma, out, w.rows, w.width, n, k, transposed, first)
                    for first, _ in _cut(n // 8 * (k // columns), THREADS // 32)
                ]
                out += n * k
        self.packings = self._table(PACKING, jobs)
        return self._zeros(out, kind=self.kind)

    def _gradients(
        self,
        config: GPTConfig,
        weights: list[_Weight],
        operands: Sequence[tuple[Tensor, Tensor]],
        dx0: Tensor,
        slots: int,
    ) -> None:
        """The tables of gradients(). slots: blocks that the GPU holds at a time."""
        (rows, columns), padded, C = self.shapes["weights"], len(operands[0][0]), config.n_embd
        tiles = sum(-(-dy.shape[1] // rows) * -(-x.shape[1] // columns) for dy, x in operands)

        def cost(slices: int) -> float:  # in rows' time
            return -(-tiles * slices // slots) * padded / slices + SLICE_COST * slices

        depth = up(-(-padded // min(range(1, MOST_SLICES + 1), key=cost)), 32)
        slices = _cut(padded, depth)
        partials = self._zeros(len(slices), self.total)
        jobs, out = [], partials.data_ptr()
        for dy, x in operands:
            n, k = dy.shape[1], x.shape[1]
            jobs += [
                (
                    dy.data_ptr() + (first * n + i) * self.size,
                    x.data_ptr() + (first * k + j) * self.size,
                    out + (number * self.total + i * k + j) * 4,
                    *(0, 0, n, k, k, height, width, terms, 0, 0),
                )
                for number, (first, terms) in enumerate(slices)
                for i, height in _cut(n, rows)
                for j, width in _cut(k, columns)
            ]
            out += n * k * 4
        self.weight_tiles = self._table(TILE, jobs)
        self.partials = partials

        strips = []
        for w in weights:
            sums = partials.data_ptr() + w.sums * 4
            added = partials.data_ptr() + self.embedding * 4 if w.matrices == 0 else 0
            for i, height in _cut(w.rows, THREADS // 2 if w.gamma < 0 else w.rows):
                for j in range(0, w.width, STRIP):
                    place, gamma = i * w.width + j, w.gamma if w.gamma < 0 else w.gamma + j
                    job = (sums + place * 4, added and added + place * 4, self.total, w.at + place, gamma)
                    strips.append((*job, len(slices), height, w.width))
        if not config.endless:
            T, at = config.block_size, dict(zip(config.shapes(), self.flat.offsets))[PLACES]
            for i, height in _cut(T, THREADS // 2):
                for j in range(0, C, STRIP):
                    place = i * C + j
                    job = (dx0.data_ptr() + place * 4, 0, T * C, at + place, -1)
                    strips.append((*job, len(dx0) // T, height, C))
        self.strips = self._table(STRIPS, strips)
        self.squares = self._zeros(len(strips))

    def _optimizers(self, config: GPTConfig, recipe: Recipe, weights: list[_Weight]) -> None:
        """The tables of step()."""
        matrices = [
            (w.at + i * w.rows // w.matrices * w.width, w.rows // w.matrices, w.width)
            for w in weights
            for i in range(w.matrices)
        ]
        size, sides = self.size, [min(rows, cols) for _, rows, cols in matrices]
        self.x = [self._zeros(sum(rows * cols for _, rows, cols in matrices), kind=self.kind) for _ in range(2)]
        self.S, self.P = (self._zeros(sum(n * n for n in sides), kind=self.kind) for _ in range(2))
        counts = [-(-rows // PIECE[0]) * -(-cols // PIECE[1]) for _, rows, cols in matrices]
        self.squares_of_x = self._zeros(sum(counts))
        pieces: list[tuple] = []
        tiles: list[list[tuple]] = [[] for _ in range(5)]
        place, square = 0, 0  # of the matrix in X and in S, P
        for (at, rows, cols), n, count in zip(matrices, sides, counts):
            m, norm = max(rows, cols), (self.squares_of_x.data_ptr() + len(pieces) * 4, count)
            to_row, to_column = (1, rows) if rows > cols else (cols, 1)
            scale = math.sqrt(max(1, rows / cols))
            pieces += [
                (
                    *(at + i * cols + j, place + i * to_row + j * to_column, height, cols, to_row, to_column),
                    *(0, recipe.muon_lr, scale),
                )
                for i, height in _cut(rows, PIECE[0])
                for j, _ in _cut(cols, PIECE[1])
            ]
            x = [each.data_ptr() + place * size for each in self.x]
            S, P = (each.data_ptr() + square * size for each in (self.S, self.P))
            for i, h in _cut(n, self.shapes["rows"][0]):
                for j, w in _cut(n, self.shapes["rows"][1]):
                    at_S, i_S, j_S = S + (i * n + j) * size, S + i * n * size, S + j * n * size
                    tile = (P + (i * n + j) * size, at_S, 0, n, n, n, h, w, n, i - j, 0)
                    tiles[2].append((i_S, j_S, *tile))
                    for parity in range(2):
                        operands = (x[parity] + i * m * size, x[parity] + j * m * size)
                        gram = (*operands, at_S, 0, norm[0], m, m, n, h, w, m, 0, count)
                        tiles[parity].append(gram)
            for i, h in _cut(n, self.shapes["x"][0]):
                for j, w in _cut(m, self.shapes["x"][1]):
                    for parity in range(2):
                        out = x[1 - parity] + (i * m + j) * size
                        tile = (P + i * n * size, x[parity] + j * size, out, 0, norm[0])
                        tiles[3 + parity].append((*tile, n, m, m, h, w, n, 0, count))
            place, square = place + rows * cols, square + n * n
        for each in tiles:
            each.sort(key=lambda tile: -tile[TILE.names.index("depth")])  # the longest first
        grams, self.polynomials, applies = tiles[:2], self._table(TILE, tiles[2]), tiles[3:]
        self.grams, self.applies = ([self._table(TILE, one) for one in both] for both in (grams, applies))
        self.muon = self._table(PIECES, pieces)
        for (name, shape), at in zip(config.shapes().items(), self.flat.offsets):
            if ".h." not in name or len(shape) == 1:
                rate = recipe.position_lr if name == PLACES else recipe.adam_lr
                chunks = _cut(math.prod(shape), CHUNK)
                pieces += [(at + i, 0, 0, 0, 0, 0, count, rate, 0.0) for i, count in chunks]
        self.pieces = self._table(PIECES, pieces)
