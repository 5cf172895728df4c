"""The native engine: the decoder of generation/csrc, which runs without Python or PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_ext import extension, processor
from attention_ext.parts import PARTS, CachePrecision, Precision
from generation.logprobs import TokenLogprob
from generation.sampling import Sampling
from model.gpt import GPT

# Seconds after which a call starts no further token, so that Ctrl-C takes effect soon. In a batch they count
# for each group of texts that a thread writes.
ONE_TEXT_SECONDS, BATCH_SECONDS = 2e-3, 8e-3


def load_decoder(simd: str = "auto") -> Any:
    """The class Decoder of generation/csrc/module.cpp. Raises as extension.load_module() does."""
    return extension.load_module("decoder", ("model", "generation"), simd).Decoder


class NativeEngine:
    """Runs the decoder, which holds the packed weights and the slots' caches.

    tile: (br, bc) of a tiled part. The decoder uses torch.get_num_threads() threads.
    """

    name = "native"
    fast_in_step = False

    def __init__(
        self,
        model: GPT,
        part: str,
        simd: str,
        tile: tuple[int, int],
        weights: Precision,
        kv_cache: CachePrecision,
        slots: int,
        capacity: int,
    ) -> None:
        self.config, self.slots, self.capacity = model.config, slots, capacity
        tensors = {
            name: tensor.detach().contiguous().numpy()
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"  # tied to transformer.wte.weight
        }
        c = self.config
        self._decoder = load_decoder(simd)(
            tensors,
            block_size=c.block_size,
            vocab_size=c.vocab_size,
            n_layer=c.n_layer,
            n_head=c.n_head,
            n_embd=c.n_embd,
            precision=str(weights),
            kv_cache=str(kv_cache),
            part=PARTS[part].operator,
            br=tile[0],
            bc=tile[1],
            slots=slots,
            capacity=capacity,
            threads=torch.get_num_threads(),
            cache_bytes=processor.caches()[-1].size,
        )
        for slot in range(slots):
            self.set_sampling(slot, Sampling())

    def set_sampling(self, slot: int, sampling: Sampling) -> None:
        self._decoder.set_sampling(slot, sampling)

    def set_logprobs(self, slot: int, top: int | None) -> None:
        self._decoder.set_logprobs(slot, _or_none(top))

    def take_logprobs(self, slot: int) -> list[TokenLogprob]:
        taken = self._decoder.take_logprobs(slot)
        return [TokenLogprob(token, logprob, tuple(top)) for token, logprob, top in taken]

    def prefill(self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None) -> None:
        self._decoder.prefill(slot, ids, continues, _or_none(top))

    def prefill_begin(
        self, slot: int, ids: Sequence[int], continues: bool = False, top: int | None = None
    ) -> None:
        self._decoder.prefill_begin(slot, ids, continues, _or_none(top))

    def prefill_some(self, slot: int, seconds: float) -> bool:
        return self._decoder.prefill_some(slot, seconds)

    def prefill_drop(self, slot: int) -> None:
        self._decoder.prefill_drop(slot)

    def next(self, slots: Sequence[int], uniforms: Sequence[float]) -> list[int]:
        return self.write(slots, [uniforms])[0]

    def write(self, slots: Sequence[int], uniforms: Sequence[Sequence[float]]) -> list[list[int]]:
        seconds = ONE_TEXT_SECONDS if len(slots) == 1 else BATCH_SECONDS
        return self._decoder.write(slots, uniforms, seconds)

    def copy(self, source: int, target: int) -> None:
        self._decoder.copy(source, target)

    def push(self, slot: int, token: int) -> None:
        self._decoder.push(slot, token)

    def logits(self, slot: int) -> Tensor:
        return torch.tensor(self._decoder.logits(slot))

    def record(self, on: bool) -> None:
        """Start or stop recording spans; initially off."""
        self._decoder.record(on)

    def spans(self) -> list[tuple[str, int, int, int]]:
        """The spans recorded since the last call, as (kind, thread, begin, end), thread by thread.

        begin, end: nanoseconds of time.monotonic_ns(). Thread 0 is the caller.
        """
        return self._decoder.spans()


def _or_none(top: int | None) -> int:
    """A number of alternatives for the decoder, where -1 stands for no log-probabilities."""
    return -1 if top is None else top
