"""Muon, the optimizer of the hidden matrices (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from shakespeare.training.recipe import ITERATIONS, LEAST_NORM, QUINTIC


class States:
    """An optimizer's parameter groups and states, without its step: PyTorch's class imports its compiler."""

    def __init__(self, groups: list[dict], **defaults: Any) -> None:
        self.param_groups = [defaults | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by a Newton-Schulz iteration, for groups of equal matrices.

    Each parameter group holds tensors with the trailing shape `shape`, (rows, cols), of the matrix to
    orthogonalise: a fused QKV weight (3C, C) with shape (C, C) counts as three. All matrices of a group go
    through one batched iteration. `lr` is a 0-d tensor, so a captured CUDA graph reads its current value. The
    caller sets the state of each tensor, its `momentum`.
    (torch.optim.Muon takes a number and treats a fused QKV weight as one matrix.)
    """

    def __init__(self, groups: list[dict], lr: Tensor, weight_decay: float, momentum: float):
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rows, cols = group["shape"]
            momentum = group["momentum"]
            parameters = group["params"]
            nesterov = []
            for p in parameters:  # (n * rows, cols), n matrices each
                buffer = self.state[p]["momentum"].lerp_(p.grad, 1 - momentum)
                nesterov.append(p.grad.lerp(buffer, momentum).view(-1, rows, cols))
            x = torch.cat(nesterov)
            if rows > cols:
                x = x.mT
            if x.is_cuda:
                x = x.bfloat16()
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + LEAST_NORM)
            first, third, fifth = QUINTIC
            for _ in range(ITERATIONS):  # x becomes the nearest orthogonal matrices
                a = x @ x.mT
                x = first * x + (third * a + fifth * a @ a) @ x
            x = (x.mT if rows > cols else x).float()
            scale = math.sqrt(max(1, rows / cols))
            for p, u in zip(parameters, x.split([len(matrices) for matrices in nesterov])):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * scale * u.view_as(p))
