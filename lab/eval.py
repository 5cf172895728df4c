"""gpt.py eval: the loss on held-out text per character, so that models with different tokens compare."""

import math
from dataclasses import dataclass
from functools import partial

import torch

from attention_ext import attention
from attention_ext.parts import check_part
from generation.engine import check_kernel
from generation.pytorch import on_device, rounded, with_rounded_cache
from model import corpus
from model.checkpoint import load
from model.loss import evaluate


@dataclass(frozen=True)
class Loss:
    """A mean loss. nats: per character. characters: number of them. window: tokens that the model sees."""

    nats: float
    characters: int
    window: int

    @property
    def bits(self) -> float:
        """Bits per character."""
        return self.nats / math.log(2)


def held_out_loss(
    model: str,
    text: str,
    part: str = "part0",
    weights: str = "fp32",
    kv_cache: str = "fp32",
    device: str = "cpu",
    kernel: str | None = None,
) -> Loss:
    """The loss over contiguous windows of the block size, on the last 10 % of a text.

    model: a name for load(). part: the attention. weights: a Precision or its name. kv_cache: a
    CachePrecision or its name, to which the keys and values that attention sees are rounded. device, kernel:
    as in generation.engine.open_engine.
    Raises ValueError naming what is wrong, BuildError without a GPU or what compiles the kernels.
    """
    row = check_part(part)
    checkpoint = load(model)
    attend = with_rounded_cache(partial(attention, part, causal=True, kernel=kernel), kv_cache)
    check_kernel(device, row, kernel, checkpoint.config.head_dim)
    gpt = on_device(rounded(checkpoint.model.with_attention(attend), weights), device, row, kernel)
    _, held_out = corpus.split(text)
    ids = checkpoint.tokenizer.encode(held_out)
    # Nothing predicts the first token, so neither it nor its characters count.
    nats = evaluate(gpt, torch.tensor(ids, device=device)) * (len(ids) - 1) / (len(held_out) - 1)
    return Loss(nats, len(held_out), checkpoint.config.block_size)
