"""Models with rounded matrices in PyTorch, as the native decoder rounds them: to bfloat16 or to int8.

The decoder's sums of int8 weights times integer activations are exact within a group; here they are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shakespeare.attention_ext.build.structs import CSRC, constants
from shakespeare.model.gpt import GPT

STATED = constants(CSRC / "simd" / "portable.h")  # no compiler is needed
GROUP = STATED["INT8_GROUP"]
BITS = STATED["INT8_BITS"]
LEAST_EXPONENT = -107  # least exponent of a row's largest number; smaller rows use the scale of this one


def round_weights(weight: Tensor) -> Tensor:
    """Round each row of (out, in), in groups of GROUP, to multiples of 1/127 of the group's largest."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))  # (out, groups, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 127
    multiples = (groups / scale).nan_to_num(0).round().clamp(-127, 127)
    return (multiples * scale).flatten(1)[:, : weight.shape[1]]


def round_activations(x: Tensor) -> Tensor:
    """Round rows (..., in) to at least BITS - 2 bits, by a power of 2; with NaN or infinity they are NaN."""
    largest = x.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [1/2, 1)
    # A largest number just below a power of 2 would be rounded up to it and have one bit too many.
    exponent = exponent - 1 + (mantissa >= 1 - 2.0**-BITS).int()
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=LEAST_EXPONENT) - (BITS - 2))
    return torch.where(largest.isfinite(), (x / scale).round() * scale, torch.nan)


class Int8Linear(nn.Linear):
    """A linear layer with rounded weights that rounds its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(round_activations(x))


def in_int8(model: GPT) -> GPT:
    """A float32 model that rounds its matrices, the head's too, and their inputs, but not the embeddings."""
    return _with_matrices(model, round_weights, Int8Linear)


def in_bf16(model: GPT) -> GPT:
    """A model whose matrices, including the head's, are rounded to bfloat16; see in_int8() for the rest."""
    return _with_matrices(model, lambda weight: weight.bfloat16().float(), nn.Linear)


def _with_matrices(model: GPT, rounded: Callable[[Tensor], Tensor], linear: type[nn.Linear]) -> GPT:
    """The model with its linear layers replaced by layers of a kind with rounded weights."""
    other = model.with_attention(model.attend)
    for parent in list(other.modules()):
        for name, module in parent.named_children():
            if not isinstance(module, nn.Linear):
                continue
            with torch.device("meta"):
                layer = linear(module.in_features, module.out_features, module.bias is not None)
            layer.weight = nn.Parameter(rounded(module.weight.detach()), requires_grad=False)
            layer.bias = module.bias
            setattr(parent, name, layer)
    return other.eval()
