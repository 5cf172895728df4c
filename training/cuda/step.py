"""The training step on a GPU: csrc/cuda/passes.cu, part 4's kernels between its launches, and update.cu.

Launches only, on PyTorch's current stream, so that a CUDA graph can hold a whole step.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from shakespeare.attention_ext import rules
from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.build.structs import structure
from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.cuda.kernels import WIDEST
from shakespeare.attention_ext.cuda.launches import EARLY_LAUNCH
from shakespeare.attention_ext.cuda.tiles import up
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.config import GPTConfig
from shakespeare.training.cuda.update import FOLDER, Flat, Update
from shakespeare.training.recipe import Recipe

LEAST = (8, 0)  # compute capability
ROWS = 16  # of a block of passes.cu
Arguments = structure(FOLDER / "passes.cu", "Step")


def shared_bytes(config: GPTConfig, dtype: Dtype) -> int:
    """Shared of passes.cu."""
    C = config.n_embd
    vocabulary = up(config.vocab_size, 32)
    piece = 16 // dtype.bytes
    elements = C + piece + max(4 * C, vocabulary) + piece
    return ROWS * (4 * (C + max(C, vocabulary)) + dtype.bytes * elements)


def takes(config: GPTConfig, dtype: Dtype, on: driver.Gpu) -> bool:
    """Whether a model without biases has this training step on a GPU."""
    widths = config.n_embd % 32 == 0 and config.head_dim % 8 == 0 and config.head_dim <= WIDEST
    return widths and on.capability >= LEAST and shared_bytes(config, dtype) <= on.shared


class TrainingStep:
    """A model's training step on the current GPU, over parameters that lie in `flat`.

    batch: sequences of a step. dtype: of the products' factors and of what attention reads; sums, parameters
    and averages are float32. Dropout is that of nanoGPT without attention's weights. loss: a scalar to write.
    """

    def __init__(
        self, config: GPTConfig, recipe: Recipe, batch: int, dtype: Dtype, flat: Flat, loss: Tensor
    ) -> None:
        from shakespeare.attention_ext.cuda import operators  # which compiles the launcher

        index = torch.cuda.current_device()
        dtype_of_products = getattr(torch, dtype.torch_name)
        device = flat.value.device
        driver.activate(index)
        on = driver.gpu(index)
        C = config.n_embd
        L = config.n_layer
        T = config.block_size
        self.operators = operators
        self.config = config
        self.batch = batch
        self.rows = batch * T
        self.blocks = -(-self.rows // ROWS)
        self.shared = shared_bytes(config, dtype)
        padded = self.blocks * ROWS
        vocabulary = up(config.vocab_size, 32)
        # many threads where a block has a multiprocessor for itself
        self.threads = 512 if self.blocks <= on.multiprocessors else 256
        macros = {
            "FORMAT": driver.FORMATS[dtype],
            "EMBD": C,
            "VOCAB": config.vocab_size,
            "HEAD_SIZE": config.head_dim,
            "THREADS": self.threads,
            "DROPOUT": int(recipe.dropout > 0),
        }
        self.early = on.capability >= EARLY_LAUNCH
        arch = "sm_{}{}".format(*on.capability)
        self.module = driver.Module(nvrtc.Source("passes.cu", arch, macros, FOLDER))

        def kept(layers: int, width: int, dtype: torch.dtype = dtype_of_products) -> Tensor:
            return torch.zeros(layers, padded, width, dtype=dtype, device=device)

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
            "factors": kept(2 * L + 1, 1, torch.float32),
            "dlogits": kept(1, vocabulary),
            "onehot": kept(1, vocabulary),
            "dout": kept(1, C),
            "x": kept(1, C, torch.float32),
            "dx": kept(1, C, torch.float32),
            "dx0_float": kept(1, C, torch.float32),
            "losses": kept(1, 1, torch.float32),
            "dx0": kept(1, C),
        }
        self.tokens = torch.zeros(batch, T + 1, dtype=torch.int64, device=device)
        k = self.kept
        operands = [(k["dlogits"][0], k["normals"][2 * L]), (k["onehot"][0], k["dx0"][0])]
        for layer in range(L):
            inputs = k["normals"][2 * layer], k["joined"][layer], k["normals"][2 * layer + 1], k["g"][layer]
            outputs = (k[name][layer] for name in ("dqkv", "projected", "dh", "down"))
            operands += zip(outputs, inputs)
        exact = k["dx0_float"][0][: self.rows]
        losses = k["losses"].flatten()[: self.rows]
        self._update = Update(config, recipe, flat, operands, exact, losses, loss, dtype, index)
        self.update = self._update.step
        tensors = {
            **self.kept,
            "tokens": self.tokens,
            "packed": self._update.packed,
            "wte": flat.views(0)["value"],
            "updates": flat.updates,
        }
        if not config.endless:
            tensors["wpe"] = flat.views(1)["value"]
        pointers = {name: t.data_ptr() for name, t in tensors.items()}
        sizes: dict[str, Any] = dict(rows=self.rows, padded=padded, T=T, layers=L)
        self.arguments = Arguments(**pointers, **sizes, seed=recipe.seed % 2**32, dropout=recipe.dropout)

        heads = (batch, T, -1, config.n_head, config.head_dim)
        self.qkv = [t[: self.rows].view(heads).permute(2, 0, 3, 1, 4) for t in k["qkv"]]  # (3, B, H, T, d)
        self.dout = k["dout"][0][: self.rows].view(*heads[:2], *heads[3:]).transpose(1, 2)
        self.scale = 1 / math.sqrt(config.head_dim)
        self.rules = operators.NO_RULES
        if config.window is not None:
            slopes = torch.tensor(config.alibi_slopes, device=device)
            options = {"window": (config.window - 1, 0), "alibi_slopes": slopes}
            self.rules = rules.checked(options, self.qkv[0][0], T).on_cuda(T).arguments()

    def gradients(self, tokens: Tensor) -> None:
        """Write the gradients, before they are clipped, and the loss for tokens (B, T + 1)."""
        ops = self.operators
        last = self.config.n_layer - 1
        results = []
        self.tokens.copy_(tokens)
        self._update.pack()
        self._launch("begin")
        for layer in range(last + 1):
            q, k, v = self.qkv[layer]
            if self.config.window is None:
                out, lse = ops.flash_with_lse(q, k, v, True, self.scale, None)
            else:
                out, lse = ops.flash_ruled(q, k, v, True, self.scale, None, *self.rules)
            self._launch("forward", layer, out=out)
            results.append((q, k, v, out, lse))
        for layer in range(last, -1, -1):
            call = (self.dout, None, *results[layer], True, self.scale, None)
            dq, dk, dv = ops.flash_backward(*call, *self.rules)
            self._launch("backward", layer, dq=dq, dk=dk, dv=dv)
        self._update.gradients()

    def _launch(self, name: str, *layer: int, **tensors: Tensor) -> None:
        for field, tensor in tensors.items():
            setattr(self.arguments, field, tensor.data_ptr())
        function = self.module.function(name, self.shared)
        arguments = (self.arguments, *map(ctypes.c_int, layer))
        how: dict[str, Any] = dict(shared=self.shared, early=self.early)
        driver.launch(function, self.blocks, self.threads, *arguments, **how)
