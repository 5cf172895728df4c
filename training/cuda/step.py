"""The training step on a GPU: csrc/cuda/passes.cu, part 4's kernels between its launches, and update.cu.

Launches only, on a stream of its own, so that a CUDA graph can hold a whole step. PyTorch is not needed.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.build.structs import constants, structure
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.calls import Attention, Matrices
from shakespeare.attention_ext.cuda.kernels import WIDEST
from shakespeare.attention_ext.cuda.launches import EARLY_LAUNCH
from shakespeare.attention_ext.cuda.tiles import round_up
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.config import EMBEDDING, PLACES, GPTConfig
from shakespeare.training.cuda.update import FOLDER, Array, Flat, Update
from shakespeare.training.recipe import GOLDEN, Recipe

LEAST = (8, 0)  # compute capability
PASSES = FOLDER / "passes.cu"
ROWS = constants(PASSES)["ROWS"]  # of a block
Arguments = structure(PASSES, "Step")
IDS = {1: "unsigned char", 2: "short", 4: "int"}  # of a text, by their bytes


def shared_bytes(config: GPTConfig, dtype: Dtype) -> int:
    """Shared of passes.cu."""
    C = config.n_embd
    vocabulary = round_up(config.vocab_size, 32)
    piece = 16 // dtype.bytes
    elements = C + piece + max(4 * C, vocabulary) + piece
    return ROWS * (4 * (C + max(C, vocabulary)) + dtype.bytes * elements)


def takes(config: GPTConfig, dtype: Dtype, on: driver.Gpu) -> bool:
    """Whether a model has this training step on a GPU."""
    fixed = GPTConfig()
    plain = {name: getattr(fixed, name) for name in ("tanh_gelu", "untied_head", "eos_token_id")}
    widths = config.n_embd % 32 == 0 and config.head_dim % 8 == 0 and config.head_dim <= WIDEST
    able = on.capability >= LEAST and shared_bytes(config, dtype) <= on.shared
    return replace(config, bias=False, **plain) == config and widths and able


class TrainingStep:
    """A model's training step on the first GPU, over parameters that lie in `flat`.

    batch: sequences of a step. ids: the text, (N,). place: where its first window begins, a share of the
    text. dtype: of the products' factors and of what attention reads; sums, parameters and averages are
    float32. Dropout is that of nanoGPT without attention's weights. loss: two float64, of the last batch and
    the sum of all.
    """

    def __init__(
        self,
        config: GPTConfig,
        recipe: Recipe,
        batch: int,
        dtype: Dtype,
        flat: Flat,
        ids: NDArray[Any],
        place: float,
    ) -> None:
        driver.activate()
        self.stream = driver.stream()
        on = driver.gpu()
        C = config.n_embd
        L = config.n_layer
        T = config.block_size
        self.config = config
        self.batch = batch
        self.flat = flat
        self.rows = batch * T
        self.blocks = -(-self.rows // ROWS)
        self.shared = shared_bytes(config, dtype)
        padded = self.blocks * ROWS
        vocabulary = round_up(config.vocab_size, 32)
        # many threads where a block has a multiprocessor for itself
        self.threads = 512 if self.blocks <= on.multiprocessors else 256
        macros: dict[str, int | str] = {
            "FORMAT": driver.FORMATS[dtype],
            "EMBD": C,
            "VOCAB": config.vocab_size,
            "HEAD_SIZE": config.head_dim,
            "THREADS": self.threads,
            "DROPOUT": int(recipe.dropout > 0),
            "ID": IDS[ids.itemsize],
        }
        self.early = on.capability >= EARLY_LAUNCH
        passes = nvrtc.Source(PASSES.name, nvrtc.arch(on.capability), macros, FOLDER)
        self.module = driver.Module(passes)
        self.ids = Array.of(ids)
        self.place = place

        def kept(layers: int, width: int, bytes: int = dtype.bytes) -> Array:
            return Array(layers, padded, width, bytes=bytes)

        self.kept = {
            "joined": kept(L, C),
            "g": kept(L, 4 * C),
            "h": kept(L, 4 * C),
            "qkv": kept(L, 3 * C),
            "dqkv": kept(L, 3 * C),
            "dh": kept(L, 4 * C),
            "down": kept(L, C),
            "projected": kept(L, C),
            "normals": kept(2 * L + 1, C),
            "factors": kept(2 * L + 1, 1, bytes=4),
            "dlogits": kept(1, vocabulary),
            "onehot": kept(1, vocabulary),
            "dout": kept(1, C),
            "x": kept(1, C, bytes=4),
            "dx": kept(1, C, bytes=4),
            "dx0_float": kept(1, C, bytes=4),
            "losses": kept(1, 1, bytes=4),
            "dx0": kept(1, C),
        }
        self.tokens = Array(batch, T + 1, bytes=8)
        k = self.kept
        operands = [(k["dlogits"][0], k["normals"][2 * L]), (k["onehot"][0], k["dx0"][0])]
        for layer in range(L):
            inputs = k["normals"][2 * layer], k["joined"][layer], k["normals"][2 * layer + 1], k["g"][layer]
            outputs = (k[name][layer] for name in ("dqkv", "projected", "dh", "down"))
            operands += zip(outputs, inputs)
        exact, losses = (
            Array(self.rows, *k[name].shape[2:], memory=k[name].memory) for name in ("dx0_float", "losses")
        )
        self.losses = losses
        self.loss = Array(2, bytes=8)
        self._update = Update(config, recipe, flat, operands, exact, losses, self.loss, dtype, self.stream)
        self.update = self._update.step
        arrays = {**self.kept, "tokens": self.tokens, "packed": self._update.packed, "updates": flat.updates}
        sizes: dict[str, Any] = dict(rows=self.rows, padded=padded, T=T, layers=L)
        addresses = {name: array.address for name, array in arrays.items()}
        self.arguments = Arguments(**addresses, **sizes, seed=recipe.seed % 2**32)
        self.dropout = recipe.dropout

        # of a layer's attention, (B, H, T, d)
        shape = batch, config.n_head, T, config.head_dim
        slopes = np.tile(np.array(config.alibi_slopes, np.float32), batch)
        self.slopes = Array.of(slopes)
        window = {} if config.window is None else {"window": config.window, "slopes": self.slopes.address}
        self.attention = Attention(shape, dtype, 0, self.stream, **window)
        self.heads = {name: Array(L, *shape, bytes=dtype.bytes) for name in ("out", "dq", "dk", "dv")}
        self.lse = Array(L, *shape[:3])
        strides = 3 * C * T, config.head_dim, 3 * C
        self.qkv = [
            [Matrices(k["qkv"][layer].address + i * C * dtype.bytes, strides) for i in range(3)]
            for layer in range(L)
        ]
        self.dout = Matrices(k["dout"].address, (C * T, config.head_dim, C))

    def take_batch(self) -> None:
        """Write the tokens of the next windows, which after so many updates are always the same."""
        last = len(self.ids) - self.config.block_size
        text = ctypes.c_void_p(self.ids.address), ctypes.c_longlong(last)
        places = ctypes.c_double(self.place), ctypes.c_double(GOLDEN)
        how = dict[str, Any](early=self.early, stream=self.stream)
        function = self.module.function("take_batch")
        driver.launch(function, self.batch, 128, self.arguments, *text, *places, **how)

    def gradients(self) -> None:
        """Write the gradients, before they are clipped, and the loss for `tokens`."""
        self._forward(self.flat.value, self.dropout)
        for layer in range(self.config.n_layer - 1, -1, -1):
            q, k, v = self.qkv[layer]
            to = {name: self.heads[name][layer].address for name in ("dq", "dk", "dv")}
            out = self.heads["out"][layer].address
            lse = self.lse[layer].address
            self.attention.backward(self.dout, q, k, v, out, lse, **to)
            self._launch("backward", layer, **to)
        self._update.gradients()

    def evaluate(self, windows: Iterable[NDArray[Any]]) -> float:
        """The average's mean loss, each window's (n,) last tokens predicted; n is at most block_size + 1."""
        T = self.config.block_size
        waiting = list(windows)
        total = 0.0
        for first in range(0, len(waiting), self.batch):
            tokens = np.zeros((self.batch, T + 1), np.int64)
            seen = np.zeros((self.batch, T), bool)
            for i, window in enumerate(waiting[first : first + self.batch]):
                tokens[i, : len(window)] = window
                seen[i, : len(window) - 1] = True
            self.tokens.write(tokens)
            self._forward(self.flat.average, 0.0)
            total += float(self.losses.read().reshape(self.batch, T)[seen].sum(dtype=np.float64))
        return total / sum(len(window) - 1 for window in waiting)

    def _forward(self, weights: Array, dropout: float) -> None:
        """Up to the gradient of the last attention's output. weights: Flat's values or averages."""
        self.arguments.dropout = dropout
        self.arguments.wte = weights[self.flat.at[EMBEDDING]].address
        if PLACES in self.flat.at:
            self.arguments.wpe = weights[self.flat.at[PLACES]].address
        self._update.pack(weights)
        self._launch("begin")
        for layer in range(self.config.n_layer):
            q, k, v = self.qkv[layer]
            out = self.heads["out"][layer].address
            self.attention.forward(q, k, v, out, self.lse[layer].address)
            self._launch("forward", layer, out=out)

    def _launch(self, name: str, *layer: int, **addresses: int) -> None:
        for field, address in addresses.items():
            setattr(self.arguments, field, address)
        function = self.module.function(name, self.shared)
        arguments = (self.arguments, *map(ctypes.c_int, layer))
        how: dict[str, Any] = dict(shared=self.shared, early=self.early, stream=self.stream)
        driver.launch(function, self.blocks, self.threads, *arguments, **how)
