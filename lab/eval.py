"""gpt.py eval: the loss on held-out text per character, so that models with different tokens compare.

The native engine computes it for parts 1 to 4 on the CPU, without PyTorch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shakespeare.attention_ext import attention
from shakespeare.attention_ext.checks import none_is_default
from shakespeare.generation.engines.engine import Engine, EngineOptions
from shakespeare.generation.engines.table import ENGINES, open_engine
from shakespeare.lab.formats import counted
from shakespeare.model.checkpoint import load
from shakespeare.model.corpus import LAST_TENTH


@dataclass(frozen=True)
class Loss:
    """A mean loss. nats: per character. characters: number of them. window: tokens; None if it reads on."""

    nats: float
    characters: int
    window: int | None

    @property
    def bits(self) -> float:
        """Bits per character."""
        return self.nats / math.log(2)


@none_is_default
def held_out_loss(
    model: str,
    text: str,
    part: str = "part0",
    weights: str = "fp32",
    kv_cache: str = "fp32",
    device: str = "cpu",
    kernel: str | None = None,
    threads: int | None = None,
    between: tuple[float, float] = LAST_TENTH,
    apart: int | None = None,
) -> Loss:
    """The loss on the last 10 % of a text, over contiguous windows of the block size, or without an end.

    between: the shares of the text where another part begins and ends.
    apart: the longest window in tokens, for an endless model too, which then sees nothing before its own.
    model: a name for load(). part: the attention. weights: a Precision or its name. kv_cache: a
    CachePrecision or its name, to which the keys and values that attention sees are rounded. device, kernel:
    as in EngineOptions. threads: the native engine's.
    Raises ValueError naming what is wrong, BuildError without a GPU or what compiles the kernels.
    """
    checkpoint = load(model)
    options = EngineOptions(part=part, device=device, kernel=kernel)
    if refused := ENGINES["torch"].refuses(checkpoint, options):
        raise ValueError(refused)
    if device == "cuda":
        from shakespeare.attention_ext.cuda import driver

        driver.check_gpu()
    text = checkpoint.tokenizer.normal(text)
    if apart is not None and apart < 1:
        raise ValueError(f"apart is {apart}; it must be at least 1, or None")
    if not 0 <= between[0] < between[1] <= 1:
        raise ValueError(f"between is {between}; it must be two shares of the text, from 0 to 1, that rise")
    begin, end = (int(share * len(text)) for share in between)
    held_out = text[begin:end]
    ids = checkpoint.tokenizer.encode(held_out)
    if len(ids) < 2:
        part = "last 10 %" if between == LAST_TENTH else "{:g} to {:g}".format(*between)
        amount = f"its {part}, which are evaluated, have {counted(len(ids), 'token')}"
        raise ValueError(f"text has {counted(len(text), 'character')}; {amount} and must have at least 2")
    config = checkpoint.config
    longest = apart if config.endless or apart is None else min(apart, config.block_size)
    if ENGINES["native"].refuses(checkpoint, options) is None:
        precisions = {"weights": weights, "kv_cache": kv_cache}
        opened = open_engine(checkpoint, part=part, slots=1, threads=threads, **precisions)
        nats = native_loss(opened, ids, longest)
    else:
        import torch

        from shakespeare.generation.engines.pytorch import on_device, rounded, with_rounded_cache
        from shakespeare.model.loss import evaluate

        attend = with_rounded_cache(partial(attention, part, causal=True, kernel=kernel), kv_cache)
        gpt = rounded(checkpoint.model.with_attention(attend), weights)
        gpt = on_device(gpt, device, options.row, kernel)
        nats = evaluate(gpt, torch.tensor(ids, device=device), apart=longest)
    # Nothing predicts the first token, so neither it nor its characters count.
    window = longest or (None if config.endless else config.block_size)
    return Loss(nats * (len(ids) - 1) / (len(held_out) - 1), len(held_out), window)


def native_loss(engine: Engine, ids: Sequence[int], apart: int | None = None) -> float:
    """What model.loss.evaluate() gives for two tokens or more, by the log-probabilities of prompts."""
    config = engine.config
    total = 0.0
    reach = 1 if apart else config.reach or 1
    T = apart or max(config.block_size, reach)
    before = reach - 1  # tokens that a window sees ahead of its own
    for start in range(0, len(ids) - 1, T):
        engine.begin(0, ids[max(0, start - before) : start + T], top=0)
        while not engine.read(0):
            pass
        total -= sum(logprob for _, logprob, _ in engine.take_logprobs(0)[min(before, start) :])
        if start + T < len(ids):  # the token after the window
            logits = np.array(engine.logits(0))
            total += np.logaddexp.reduce(logits) - logits[ids[start + T]]
    return total / (len(ids) - 1)
