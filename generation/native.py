"""The native engine: the decoder of generation/csrc, which runs without Python or PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from attention_ext import extension, processor
from attention_ext.parts import PARTS, CachePrecision, Precision
from generation.engine import Engine
from generation.sampling import Sampling
from model.gpt import GPT


def load_decoder(simd: str = "auto") -> Any:
    """The class Decoder of generation/csrc/module.cpp. Raises as extension.load_module() does."""
    return extension.load_module("decoder", ("model", "generation"), simd).Decoder


def open_decoder(
    model: GPT,
    part: str,
    simd: str,
    tile: tuple[int, int],
    weights: Precision,
    kv_cache: CachePrecision,
    slots: int,
    capacity: int,
) -> Engine:
    """The decoder of a model, which holds the packed weights and the slots' caches.

    tile: (br, bc) of a tiled part. It uses torch.get_num_threads() threads. record(on) switches the recording
    of spans on or off, initially off; spans() gives those since the last call as (kind, thread, begin, end),
    thread by thread, in nanoseconds of time.monotonic_ns(). Thread 0 is the caller.
    """
    tensors = {
        name: tensor.detach().contiguous().numpy()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to transformer.wte.weight
    }
    c = model.config
    decoder = load_decoder(simd)(
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
    decoder.name, decoder.fast_in_step = "native", False
    decoder.config, decoder.slots, decoder.capacity = c, slots, capacity
    for slot in range(slots):
        decoder.set_sampling(slot, Sampling())
    return decoder
