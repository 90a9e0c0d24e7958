"""Linear maps in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """A matrix [outputs, inputs] and its bias."""

    weight: Floats
    bias: Floats

    @classmethod
    def random(cls, outputs: int, inputs: int, rng: np.random.Generator) -> Map:
        """One that keeps the deviation of what it maps."""
        weight = rng.standard_normal((outputs, inputs)) / inputs**0.5
        return cls(weight, 0.1 * rng.standard_normal(outputs))

    def __call__(self, x: Floats) -> Floats:
        """[..., inputs] to [..., outputs]."""
        out: Floats = x @ self.weight.T + self.bias
        return out


def gelu(x: Floats) -> Floats:
    """The tanh approximation."""
    out: Floats = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return out
