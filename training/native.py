"""The training step in C++: gradients of the whole model in one call, and both optimizers in another.

What it computes is Trainer's step in PyTorch, float32 on the CPU, without dropout and biases, with part4's
attention. Gradients, parameters, the optimizers' states and the average are the tensors that PyTorch knows,
so that each can be read, saved and loaded as before. attention_ext/csrc/training/ has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention_ext import attention, extension
from model.gpt import GPT, Attend, GPTConfig
from training.muon import Muon

# Where a step's time goes, as csrc/training/model.h lists it.
KINDS = (
    "packing",
    "embedding",
    "norm",
    "products",
    "attention",
    "GELU",
    "loss",
    "products, backward",
    "attention, backward",
    "GELU, backward",
    "weights' gradients",
    "clipping",
    "Muon",
    "AdamW",
    "waiting",
)


def part4(simd: str = "auto") -> Attend:
    """Part 4's causal attention over one of SIMD, with which a Trainer takes the native step."""
    return partial(attention, "part4", causal=True, simd=simd)


def helpers_of(attend: Attend | None) -> str | None:
    """The SIMD helpers of an attention of part4() or partial(attention, 'part4', causal=True); else None."""
    if not isinstance(attend, partial) or attend.func is not attention or attend.args != ("part4",):
        return None
    options = {"simd": "auto", **attend.keywords}
    return options["simd"] if options == {"causal": True, "simd": options["simd"]} else None


def is_native(config: GPTConfig, device: torch.device, attend: Attend | None) -> bool:
    """Whether the native step computes it: part4 in float32 on the CPU, no dropout, no biases."""
    plain = config.dropout == 0 and not config.bias
    return device.type == "cpu" and plain and helpers_of(attend) is not None


class NativeStep:
    """The native step of a model, its average and its optimizers, whose tensors it works on.

    seconds: (len(KINDS),) float64, the time of all threads since this was made. norm: 0-d, of the last
    gradients before they were clipped.
    """

    def __init__(self, model: GPT, averaged: GPT, muon: Muon, adam: torch.optim.AdamW, simd: str) -> None:
        self._operators: Any = extension.load(simd)
        self._heads = model.config.n_head
        self._muon, self._adam = muon, adam
        self._parameters = list(model.parameters())
        for p in self._parameters:
            p.grad = torch.zeros_like(p)
        self._values = [p.detach() for p in self._parameters]
        self._averages = [p.detach() for p in averaged.parameters()]
        self._shapes = torch.zeros(len(self._parameters), 2, dtype=torch.int64)
        place = {p: i for i, p in enumerate(self._parameters)}
        for group in muon.param_groups:
            for p in group["params"]:
                self._shapes[place[p]] = torch.tensor(group["shape"])
        self._scratch = torch.empty(0)
        self._results = torch.zeros(2)
        self.loss, self.norm = self._results.unbind()
        self.seconds = torch.zeros(len(KINDS), dtype=torch.float64)

    def gradients(self, ids: Tensor, targets: Tensor, clip: float) -> Tensor:
        """Write each parameter's gradient; returns the mean cross-entropy, 0-d, valid until the next call.

        ids, targets: (B, T) int64, T being the block size. clip: the largest norm of all gradients; larger
        ones are scaled to it.
        """
        vocabulary, width = self._values[0].shape
        layers = (len(self._values) - 3) // 6
        threads = torch.get_num_threads()
        sizes = (*ids.shape, vocabulary, width, self._heads, layers, threads)
        self._reserve(self._operators.gpt_scratch, *sizes)
        grads = [p.grad for p in self._parameters]
        self._operators.gpt_gradients(
            ids.contiguous(),
            targets.contiguous(),
            self._values,
            self._heads,
            clip,
            grads,
            self._scratch,
            self._results,
            self.seconds,
        )
        return self.loss

    @torch.no_grad()
    def update(self, average: float) -> None:
        """Step both optimizers by their groups' learning rates, and the average with its decay."""
        muon, adam = self._muon.defaults, self._adam.defaults
        rates: dict[nn.Parameter, float] = {}
        for group in (*self._muon.param_groups, *self._adam.param_groups):
            rates.update(dict.fromkeys(group["params"], float(group["lr"])))
        first, second, steps = self._states()
        torch._foreach_add_(steps, 1)
        self._reserve(self._operators.update_scratch, *self._shapes.T.tolist(), torch.get_num_threads())
        self._operators.gpt_update(
            self._values,
            [p.grad for p in self._parameters],
            first,
            second,
            self._averages,
            self._shapes,
            torch.tensor([rates[p] for p in self._parameters], dtype=torch.float64),
            muon["weight_decay"],
            muon["momentum"],
            *adam["betas"],
            adam["eps"],
            average,
            int(steps[0]),
            self._scratch,
            self.seconds,
        )

    def _states(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """For each parameter its momentum, or its average gradient; its average square; AdamW's counters."""
        first, second, steps = [], [], []
        empty = torch.empty(0)
        for p, (rows, _) in zip(self._parameters, self._shapes.tolist()):
            state = (self._muon if rows else self._adam).state[p]
            if rows:
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                first.append(state["momentum"])
                second.append(empty)
                continue
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            first.append(state["exp_avg"])
            second.append(state["exp_avg_sq"])
            steps.append(state["step"])
        return first, second, steps

    def _reserve(self, floats_for: Callable[..., int], *sizes: Any) -> None:
        """Let the scratch have what an operator needs for these sizes."""
        floats = floats_for(*sizes)
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats)
