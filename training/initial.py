"""The weights before the first training step, by PyTorch's random numbers: web/csrc/initial.h in NumPy."""

import math

import numpy as np
from numpy.typing import NDArray

from shakespeare.generation.sampling import generator
from shakespeare.model.config import EMBEDDING, PLACES, GPTConfig

TOGETHER = 16  # numbers that PyTorch makes from as many draws
STD = 0.02
Floats = NDArray[np.float32]


class Random:
    """The stream of torch.manual_seed() on a CPU."""

    def __init__(self, seed: int) -> None:
        self.bits, seeding = generator()
        seeding.seed(seed & 0xFFFFFFFF)

    def skip_uniform(self, count: int) -> None:
        """Leave out torch.rand's numbers."""
        self.bits.random_raw(count, output=False)

    def skip_normal(self, count: int) -> None:
        """Leave out those of torch.nn.init.normal_()."""
        self.skip_uniform(count + (TOGETHER if count % TOGETHER else 0))

    def normal(self, shape: tuple[int, ...], std: float) -> Floats:
        """torch.nn.init.normal_() of at least 16 numbers (Box & Muller 1958)."""
        x = self._uniform(math.prod(shape))
        rest = len(x) % TOGETHER
        self._transform(x[: len(x) - rest], std)
        if rest:
            x[-TOGETHER:] = self._uniform(TOGETHER)
            self._transform(x[-TOGETHER:], std)
        return x.reshape(shape)

    def next(self) -> float:
        """torch.rand(dtype=torch.float64)"""
        upper, lower = map(int, self.bits.random_raw(2))
        return ((upper << 32 | lower) & (2**53 - 1)) * 2.0**-53

    def _uniform(self, count: int) -> Floats:
        raw = self.bits.random_raw(count)
        return (raw & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)

    @staticmethod
    def _transform(x: Floats, std: float) -> None:
        pairs = x.reshape(-1, 2, TOGETHER // 2)
        radius = np.sqrt(-2 * np.log(1 - pairs[:, 0])) * np.float32(std)
        angle = np.float32(2 * math.pi) * pairs[:, 1]
        pairs[:] = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


def sinusoids(length: int, width: int) -> Floats:
    """Vaswani et al.'s position encoding, (length, width), values in [-1, 1]."""
    even = np.arange(width) // 2 * 2
    angle = np.arange(length)[:, None] * np.exp(even * (-math.log(10_000.0) / width))
    return np.where(even == np.arange(width), np.sin(angle), np.cos(angle)).astype(np.float32)


def first_weights(config: GPTConfig, seed: int) -> tuple[dict[str, Floats], float]:
    """A model's weights by name, and the number in [0, 1) that the trainer draws next."""
    random = Random(seed)
    shapes = config.shapes()
    embedding = shapes[EMBEDDING]
    places = math.prod(shapes.get(PLACES, (0,)))
    matrices = [name for name in shapes if ".h." in name and len(shapes[name]) == 2]
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}

    def draw() -> dict[str, Floats]:
        """PyTorch draws a module's own weights before the GPT's, and c_proj's and the embedding's twice."""
        random.skip_normal(math.prod(embedding))
        random.skip_normal(places)
        random.skip_uniform(sum(math.prod(shapes[name]) for name in matrices) + math.prod(embedding))
        random.skip_normal(math.prod(embedding))
        random.skip_normal(places)
        drawn = {name: random.normal(shapes[name], STD) for name in matrices}
        drawn[EMBEDDING] = random.normal(embedding, STD)
        residual = STD / math.sqrt(2 * config.n_layer)
        return drawn | {name: random.normal(shapes[name], residual) for name in matrices if "c_proj" in name}

    weights.update(draw())
    draw()  # of the model for the averages
    if places:
        weights[PLACES] = np.float32(0.1) * sinusoids(*shapes[PLACES])
    return weights, random.next()
