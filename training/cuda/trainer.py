"""Training on a GPU by kernels alone: what run.py asks of a trainer, without PyTorch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.cuda import driver
from shakespeare.attention_ext.parts import Dtype
from shakespeare.model.config import GPTConfig
from shakespeare.training.cuda.step import TrainingStep
from shakespeare.training.cuda.update import Array, Flat
from shakespeare.training.initial import Floats, first_weights
from shakespeare.training.recipe import Recipe

STATE = ("value", "average", "first", "second", "updates")  # of Flat


class CudaTrainer:
    """A model, its average, and training steps over a text on the first GPU, each one launch of a graph.

    config: what step.takes(). ids: (N,) training tokens. dtype: of the products. start: the first weights.
    Raises BuildError as driver.gpu() and driver.Module do.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: GPTConfig,
        ids: NDArray[Any],
        dtype: Dtype,
        start: Mapping[str, Floats] | None = None,
    ) -> None:
        driver.activate()
        self.recipe = recipe
        self.config = config
        self.flat = Flat(config)
        weights, place = first_weights(config, recipe.seed)
        for name in ("value", "average"):
            self.flat.write(name, start or weights)
        self.training_step = TrainingStep(config, recipe, recipe.batch, dtype, self.flat, ids, place)
        self._rate = Array(1)
        self._decay = Array(1)
        driver.synchronize_all()  # a stream of ours does not wait for zeros
        self._launch = driver.captured(self.training_step.stream, self._step)
        self._before = driver.Event()
        self._last = driver.Event()

    def _step(self) -> None:
        self.training_step.take_batch()
        self.training_step.gradients()
        self.training_step.update(self._rate, self._decay)

    @property
    def facts(self) -> dict[str, str]:
        """What a run's record says of the device."""
        return {"device": driver.gpu().name}

    def advance(self, rate: float, decay: float) -> None:
        """Do a training step, at a share of the peak learning rate and with the average's decay.

        A run by time waits for the step before: else launches are timed.
        """
        stream = self.training_step.stream
        self._rate.memory.set_async(rate, stream)
        self._decay.memory.set_async(decay, stream)
        self._launch()
        if self.recipe.minutes is not None:
            self._last.record(stream)
            self._before.wait()
            self._before, self._last = self._last, self._before

    def take_losses(self) -> float:
        """The sum of the batches' losses since the last call."""
        _, total = self.training_step.loss.read(np.float64).tolist()
        self.training_step.loss.write(np.zeros(2))
        return total

    def averages(self) -> dict[str, Floats]:
        """A copy of the average's weights, by name."""
        return self.flat.read("average")

    def set_averages(self, weights: Mapping[str, Floats]) -> None:
        """Let the average have these weights."""
        self.flat.write("average", weights)

    def evaluate(self, ids: NDArray[Any]) -> float:
        """The average's mean loss: as model.loss.evaluate(), by the products of the training step."""
        if ids.ndim == 2:
            return self.training_step.evaluate(ids)
        if self.config.endless:  # it reads a text on, in pieces that are longer than a block
            import torch

            from shakespeare.model.gpt import GPT
            from shakespeare.model.loss import evaluate

            return evaluate(GPT.from_weights(self.config, self.averages()).cuda(), torch.from_numpy(ids))
        T = self.config.block_size
        return self.training_step.evaluate(ids[start : start + T + 1] for start in range(0, len(ids) - 1, T))

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of what the next training steps depend on besides text and recipe, by name."""
        return {name: getattr(self.flat, name).read() for name in STATE}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state_dict(). Raises ValueError if it is of another model or device."""
        for name in STATE:
            array = getattr(self.flat, name)
            if name not in state or state[name].shape != array.shape:
                raise ValueError("state is of a model of other sizes or another device")
            array.write(state[name])
