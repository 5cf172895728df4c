"""How far a result may be from float64: a multiple of the error of a float32 result."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shakespeare.attention_ext.parts import Dtype

Floats = NDArray[np.floating]
ALLOWED = 4  # times the error of a float32 result


class Expected(NamedTuple):
    """out: the result in float64. allowed: the largest error of a right one, for each number or for all."""

    out: Floats
    allowed: float | Floats

    def error(self, got: Floats) -> Floats:
        """How far each number of a result is off; infinity for NaN."""
        return np.nan_to_num(np.abs(got - self.out), nan=np.inf, posinf=np.inf)

    def allows(self, got: Floats) -> bool:
        """Whether a result is right."""
        return bool((self.error(got) <= self.allowed).all())


def beside(
    exact: Floats, peer: Floats, floor: float, dtype: Dtype = Dtype.FP32, summed: Floats | None = None
) -> Expected:
    """What may differ from float64: ALLOWED times float32's error, and rounding of the largest number.

    peer: the result in float32. floor: its share of the largest number that any result may err. summed: for
    each number the magnitudes of the 16-bit numbers that it sums, which are rounded instead of the largest.
    """
    error = float(np.abs(peer - exact).max())
    largest = float(np.abs(exact).max())
    rounded = largest if summed is None else summed
    return Expected(exact, ALLOWED * (error + floor * max(1.0, largest) + dtype.rounding * rounded))


def floor(largest: float) -> float:
    """The larger of 1e-6 and the largest score's rounding, which is the relative error of a weight."""
    return max(1e-6, 2.0**-24 * largest)
