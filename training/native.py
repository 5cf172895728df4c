"""The training step in C++: gradients of the whole model in one call, and both optimizers in another.

It computes the step that Trainer has in PyTorch, in float32 on the CPU, with part4's attention and without
dropout and biases. Gradients, parameters, optimizer states and the average are PyTorch's tensors, which can
be read, saved and loaded as usual. training/csrc/ has the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_ext import attention, extension
from model.gpt import GPT, Attend, GPTConfig
from training.muon import Muon

# The kinds of work in a step, in the order of training/csrc/model.h.
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
    """Part 4's causal attention over one of SIMD. With it a Trainer takes the native step."""
    return partial(attention, "part4", causal=True, simd=simd)


def helpers_of(attend: Attend | None) -> str | None:
    """The SIMD helpers of an attention from part4() or partial(attention, 'part4', causal=True), or None."""
    if not isinstance(attend, partial) or attend.func is not attention or attend.args != ("part4",):
        return None
    options = {"simd": "auto", **attend.keywords}
    return options["simd"] if options == {"causal": True, "simd": options["simd"]} else None


def is_native(config: GPTConfig, device: torch.device, attend: Attend | None) -> bool:
    """Whether there is a native step: for part4 in float32 on the CPU, without dropout and biases."""
    plain = config.dropout == 0 and not config.bias
    return device.type == "cpu" and plain and helpers_of(attend) is not None


class NativeStep:
    """The native step of a model. It works on the tensors of the model, its average and its optimizers.

    seconds: (len(KINDS),) float64, the time of all threads since the object was made. norm: 0-d, the norm of
    the last gradients before clipping.
    """

    def __init__(self, model: GPT, averaged: GPT, muon: Muon, adam: torch.optim.AdamW, simd: str) -> None:
        self._operators: Any = extension.load(simd)
        self._config = model.config
        self._muon, self._adam = muon, adam
        self._parameters = list(model.parameters())
        self._grads = [torch.zeros_like(p) for p in self._parameters]
        for p, grad in zip(self._parameters, self._grads):
            p.grad = grad
        self._values = [p.detach() for p in self._parameters]
        self._averages = [p.detach() for p in averaged.parameters()]
        self._groups = [*muon.param_groups, *adam.param_groups]
        group_of = {p: i for i, group in enumerate(self._groups) for p in group["params"]}
        self._group_of = [group_of[p] for p in self._parameters]
        shapes = [self._groups[i].get("shape", (0, 0)) for i in self._group_of]
        self._rows, self._cols = ([shape[side] for shape in shapes] for side in (0, 1))
        self._states: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
        self._states_of: tuple[Any, Any] = None, None
        self._scratch, self._sizes = torch.empty(0), (0, 0, 0)
        self._results = torch.zeros(2)
        self.loss, self.norm = self._results.unbind()
        self.seconds = torch.zeros(len(KINDS), dtype=torch.float64)

    def gradients(self, ids: Tensor, targets: Tensor, clip: float) -> Tensor:
        """Write each parameter's gradient; returns the mean cross-entropy, 0-d, valid until the next call.

        ids, targets: (B, T) int64, where T is the block size. clip: gradients with a larger norm are scaled
        to this one.
        """
        self._reserve(ids.shape[0], ids.shape[1], torch.get_num_threads())
        self._operators.gpt_gradients(
            ids.contiguous(),
            targets.contiguous(),
            self._values,
            self._config.n_head,
            clip,
            self._grads,
            self._scratch,
            self._results,
            self.seconds,
        )
        return self.loss

    def update(self, rates: Sequence[float], average: float) -> None:
        """Step both optimizers and the average, which decays by `average`.

        rates: the learning rates of Muon's groups, then of AdamW's.
        """
        muon, adam = self._muon.defaults, self._adam.defaults
        first, second, steps = self._current_states()
        self._operators.gpt_update(
            self._values,
            self._grads,
            first,
            second,
            steps,
            self._averages,
            self._rows,
            self._cols,
            [rates[i] for i in self._group_of],
            muon["weight_decay"],
            muon["momentum"],
            *adam["betas"],
            adam["eps"],
            average,
            self._scratch,
            self.seconds,
        )

    def _current_states(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """For each parameter its momentum or average gradient, and its average square; AdamW's counters.

        They are looked up again only after load_state_dict(), which replaces an optimizer's table. After a
        step no cache holds Python's objects, so each look-up costs time.
        """
        if self._states_of[0] is not self._muon.state or self._states_of[1] is not self._adam.state:
            self._states = self._looked_up()
            self._states_of = self._muon.state, self._adam.state
        return self._states

    def _looked_up(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, second, steps = [], [], []
        empty = torch.empty(0)
        for p, rows in zip(self._parameters, self._rows):
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

    def _reserve(self, batch: int, block: int, threads: int) -> None:
        """Enlarge the scratch memory to what both operators need for these sizes."""
        if self._sizes == (batch, block, threads):
            return
        c, ops = self._config, self._operators
        floats = ops.gpt_scratch(batch, block, c.vocab_size, c.n_embd, c.n_head, c.n_layer, threads)
        self._scratch = torch.empty(max(floats, ops.update_scratch(self._rows, self._cols, threads)))
        self._sizes = batch, block, threads
