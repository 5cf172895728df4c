"""This project's engines, with part 4."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import Peer, Texts
from shakespeare.attention_ext.parts import BuildError, CachePrecision, Precision
from shakespeare.attention_ext.webgpu.driver import opened
from shakespeare.generation.engines.engine import Engine
from shakespeare.generation.engines.table import open_engine
from shakespeare.generation.request import Request
from shakespeare.generation.sampling import Sampling
from shakespeare.generation.writer import Writer
from shakespeare.model.gpt import GPT

# The largest errors of logits. The table shows the rounding of weights; tests check it more closely.
MOST_ERROR = {"fp32": Peer.most_error, "bf16": 1e-1, "int8": 5e-1}
GREEDY = Sampling(temperature=0)


def name_of(engine: str, weights: Precision, kv_cache: CachePrecision) -> str:
    """An engine's name in tables."""
    precision = "" if weights is Precision.FP32 else f" {weights}"
    return f"{engine} part4{precision}" + ("" if kv_cache is CachePrecision.FP32 else f" kv-{kv_cache}")


def write(engine: Engine, requests: Sequence[Request]) -> Texts:
    """The tokens of texts that are written together."""
    writer = Writer(engine, len(requests))
    texts = {writer.join(request): list[int]() for request in requests}
    while written := writer.step():
        for text, tokens in written:
            texts[text] += tokens.tolist()
    return list(texts.values())


class Own(Peer):
    """One of our engines. On the CPU a Writer drives it as gpt.py does.

    On a GPU it is called directly, without Python between two tokens of a text. Raises BuildError
    for a WebGPU adapter that is the CPU.
    """

    def __init__(
        self,
        model: GPT,
        engine: str,
        slots: int,
        weights: Precision = Precision.FP32,
        kv_cache: CachePrecision = CachePrecision.FP32,
        device: str = "cpu",
    ) -> None:
        if engine == "webgpu" and opened().adapter.is_cpu:
            raise BuildError(f"{opened().adapter.name} is a CPU")
        self.name = name_of(engine, weights, kv_cache)
        self.rounded = weights is not Precision.FP32
        self.most_error = max(MOST_ERROR[weights], MOST_ERROR[kv_cache])
        self.device = engine if engine == "webgpu" else device
        self.engine = open_engine(
            model, engine, weights=weights, kv_cache=kv_cache, slots=slots, device=self.device
        )
        for slot in range(slots):
            self.engine.set_sampling(slot, GREEDY)

    def logits(self, ids: list[int]) -> Tensor:
        self.engine.begin(0, ids)
        self.engine.read(0)
        return torch.tensor(self.engine.logits(0))

    def every_logits(self, ids: list[int]) -> Tensor:
        self.logits(ids[:1])
        rows = []
        for token in [*ids[1:], 0]:  # chosen by a bias, from the logits before it
            self.engine.set_sampling(0, Sampling(0, logit_bias=((token, 100),)))
            self.engine.write([0], [[0.0]])
            rows.append(self.engine.logits(0))
        return torch.tensor(rows)  # (T, V)

    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        if self.device == "cpu":
            requests = [Request(ids, sampling=GREEDY, max_new_tokens=count) for ids in prompts]
            return write(self.engine, requests)
        engine = self.engine
        slots = range(len(prompts))
        engine.begin(0, prompts[0])  # all are the same
        engine.read(0)
        if len(slots) > 1:
            engine.copy(0, *slots[1:])
        uniforms = np.zeros((count, len(slots)))
        rows = list[Any]()
        while (written := sum(map(len, rows))) < count:
            rows.append(engine.write(slots, uniforms[written:], 1.0))
        return np.concatenate(rows).T.tolist()
