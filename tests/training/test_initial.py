"""Weights without PyTorch are PyTorch's."""

import dataclasses

import numpy as np
import pytest
import torch
from support import naming
from training_texts import TINY

from shakespeare.training.initial import first_weights
from shakespeare.training.trainer import Trainer


@pytest.mark.parametrize("endless", [False, True])
def test_first_weights_are_pytorchs(endless):
    change = {"positions": "alibi", "window": 8} if endless else {}
    for seed, V, C in ((0, 65, 96), (1337, 11, 24), (2**32 + 5, 7, 32)):
        recipe = dataclasses.replace(TINY, seed=seed, n_embd=C, n_layer=2, **change)
        trainer = Trainer(recipe, V, torch.arange(500) % V, torch.device("cpu"))
        weights, place = first_weights(trainer.model.config, seed)
        assert place == float(trainer.place)
        right = trainer.model.weights
        assert weights.keys() == right.keys() == trainer.model.config.shapes().keys()
        for name, weight in weights.items():
            with naming(seed, name):
                np.testing.assert_allclose(weight, right[name], rtol=1e-4, atol=2e-7)
