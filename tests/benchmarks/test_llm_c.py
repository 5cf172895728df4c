"""The files that llm.c's program reads; the program itself needs a clone, see benchmarks/training.py."""

from __future__ import annotations

import numpy as np
import tiny
import torch

from benchmarks import llm_c


def test_a_checkpoint_has_every_tensor_and_zeros_for_the_biases_that_lack(tmp_path):
    model = tiny.gpt()
    llm_c.write_model(tmp_path / "model", model)
    content = (tmp_path / "model").read_bytes()
    header, numbers = np.frombuffer(content[:1024], np.int32), np.frombuffer(content[1024:], np.float32)
    c = model.config
    sizes = (c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.vocab_size)
    assert tuple(header[:8]) == (20240326, 3, *sizes)
    C, L = c.n_embd, c.n_layer
    weights = (c.vocab_size + c.block_size) * C + L * (12 * C * C + 2 * C) + C
    biases = L * (3 * C + C + 4 * C + C + 2 * C) + C
    assert len(numbers) == weights + biases
    embedding = model.transformer.wte.weight.detach().numpy()
    assert np.array_equal(numbers[: embedding.size].reshape(embedding.shape), embedding)
    assert np.array_equal(numbers[-2 * C : -C], model.transformer.ln_f.weight.detach().numpy())
    if not c.bias:
        assert not numbers[-C:].any()


def test_a_shard_has_its_ids(tmp_path):
    llm_c.write_ids(tmp_path / "ids", torch.arange(33))
    content = (tmp_path / "ids").read_bytes()
    assert tuple(np.frombuffer(content[:12], np.int32)) == (20240520, 1, 33)
    assert np.array_equal(np.frombuffer(content[1024:], np.uint16), np.arange(33))
