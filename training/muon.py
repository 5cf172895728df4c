"""Muon, the optimizer of the hidden matrices (K. Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

import math

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by a Newton-Schulz iteration, for groups of equal matrices.

    Each parameter group holds tensors whose trailing shape (rows, cols), given as `shape`, is the
    matrix to orthogonalise: a fused QKV weight (3C, C) with shape (C, C) counts as three. All
    matrices of a group go through one batched iteration. `lr` is a 0-d tensor, so that a captured
    CUDA graph reads its current value (torch.optim.Muon takes a Python number, which a graph would
    freeze, and orthogonalises a fused QKV weight as one).
    """

    def __init__(self, groups: list[dict], lr: Tensor, weight_decay: float, momentum: float = 0.95):
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rows, cols = group["shape"]
            buffers = [self.state[p]["momentum"] for p in group["params"]]
            update = _muon_direction(
                [p.grad for p in group["params"]], buffers, group["momentum"], rows, cols
            )
            sizes = [p.numel() // (rows * cols) for p in group["params"]]
            scale = math.sqrt(max(1, rows / cols))
            for p, u in zip(group["params"], update.split(sizes)):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * scale * u.view_as(p))


def _muon_direction(
    grads: list[Tensor], buffers: list[Tensor], momentum: float, rows: int, cols: int
) -> Tensor:
    """Nesterov momentum, then the nearest orthogonal matrices.

    grads, buffers: one tensor (n * rows, cols) per parameter, n matrices each; the buffers are updated.
    Returns (matrices of all parameters, rows, cols).
    """
    for g, b in zip(grads, buffers):
        b.lerp_(g, 1 - momentum)
    x = torch.cat([g.lerp(b, momentum).view(-1, rows, cols) for g, b in zip(grads, buffers)])
    if rows > cols:
        x = x.mT
    if x.is_cuda:
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # a quintic with a steep slope at 0; Jordan's coefficients
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if rows > cols else x).float()
