"""A Kalman filter of one box, for times that are unevenly spaced.

Its four axes (centre x, centre y, width, height) are filtered apart. Each has a position, a
velocity and an acceleration that changes at random and fades (Singer's model). Lengths are shares
of the picture, times seconds. Shapes: A = 4 axes, K = 3 derivatives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

FADING = 2.0  # seconds in which an acceleration fades to 1 / e
# Standard deviations, in widths (of x and width) or heights (of y and height) of the box.
MEASUREMENT = 0.02
SPEED_A = np.array([4.0, 4.0, 0.8, 0.8])  # of an object seen for the first time, a second
ACCELERATION_A = np.array([2.0, 2.0, 0.4, 0.4])  # a second squared
QUANTUM = 0.001  # a share of the picture: the least error of a measurement
LEAST_SIZE = 0.001  # a share of the picture


@dataclasses.dataclass(frozen=True, slots=True)
class BoxState:
    """What is known of a box at `time`, after the measurement `box_A`.

    `sudden`: the object's motion before its last measurement says nothing about the one after.
    """

    time: float
    box_A: Array
    mean_AK: Array
    covariance_AKK: Array
    sudden: bool = False

    def deviations(self) -> Array:
        """Of each derivative of each axis; AK."""
        variance_AK: Array = np.diagonal(self.covariance_AKK, axis1=1, axis2=2)
        return np.sqrt(variance_AK)


def begin(time: float, box_A: Array) -> BoxState:
    """A box that is seen for the first time."""
    unit_A = _unit(box_A)
    mean_AK = np.zeros((4, 3))
    mean_AK[:, 0] = box_A
    covariance_AKK = np.zeros((4, 3, 3))
    covariance_AKK[:, 0, 0] = measurement_variance(box_A)
    covariance_AKK[:, 1, 1] = (SPEED_A * unit_A) ** 2
    covariance_AKK[:, 2, 2] = (ACCELERATION_A * unit_A) ** 2
    return BoxState(time, box_A, mean_AK, covariance_AKK)


def predict(state: BoxState, time: float) -> tuple[Array, Array]:
    """Mean and covariance at `time`, which may lie before the state's."""
    elapsed = time - state.time
    if elapsed == 0:
        return state.mean_AK, state.covariance_AKK
    transition_KK, noise_KK = _transition(elapsed)
    noise_A = (ACCELERATION_A * _unit(state.mean_AK[:, 0])) ** 2
    covariance_AKK = transition_KK @ state.covariance_AKK @ transition_KK.T
    return state.mean_AK @ transition_KK.T, covariance_AKK + noise_A[:, None, None] * noise_KK


def places(states: Sequence[BoxState], time: float) -> tuple[Array, Array]:
    """Mean and variance of the boxes at `time`, as of a measurement to come; TA."""
    step_TK, noise_T = _steps(states, time)
    mean_TAK = np.stack([state.mean_AK for state in states])
    covariance_TAKK = np.stack([state.covariance_AKK for state in states])
    spread_TA = np.einsum("tk,takl,tl->ta", step_TK, covariance_TAKK, step_TK)
    return _places(np.einsum("tak,tk->ta", mean_TAK, step_TK), spread_TA, noise_T)


def places_anew(states: Sequence[BoxState], time: float) -> tuple[Array, Array]:
    """The same, if only the last measurement of each is known."""
    step_TK, noise_T = _steps(states, time)
    box_TA = np.stack([state.box_A for state in states])
    spread_TA = (step_TK[:, 1:2] * SPEED_A) ** 2 + (step_TK[:, 2:] * ACCELERATION_A) ** 2
    return _places(box_TA, measurement_variance(box_TA) + spread_TA * _unit(box_TA) ** 2, noise_T)


def _places(mean_TA: Array, spread_TA: Array, noise_T: Array) -> tuple[Array, Array]:
    noise_TA = noise_T[:, None] * (ACCELERATION_A * _unit(mean_TA)) ** 2
    return mean_TA, spread_TA + noise_TA + measurement_variance(mean_TA)


def _steps(states: Sequence[BoxState], time: float) -> tuple[Array, Array]:
    """What takes each state to a place at `time`, and its noise."""
    steps = [_transition(time - state.time) for state in states]
    step_TK = np.stack([transition_KK[0] for transition_KK, _ in steps])
    return step_TK, np.array([noise_KK[0, 0] for _, noise_KK in steps])


def update(state: BoxState, time: float, box_A: Array, *, sudden: bool = False) -> BoxState:
    """The state at `time` with one more measurement."""
    before = begin(state.time, state.box_A) if sudden else state
    mean_AK, covariance_AKK = predict(before, time)
    variance_A = covariance_AKK[:, 0, 0] + measurement_variance(box_A)
    gain_AK = covariance_AKK[:, :, 0] / variance_A[:, None]
    innovation_A = box_A - mean_AK[:, 0]
    mean_AK = mean_AK + gain_AK * innovation_A[:, None]
    covariance_AKK = covariance_AKK - gain_AK[:, :, None] * covariance_AKK[:, None, 0, :]
    return BoxState(time, box_A, mean_AK, covariance_AKK, sudden)


def measurement_variance(box_A: Array) -> Array:
    """Of a box that a model finds, by axis. Also for boxes in rows."""
    return (MEASUREMENT * _unit(box_A)) ** 2 + QUANTUM**2


def _unit(box_A: Array) -> Array:
    """What the deviations of each axis are multiples of."""
    size = np.maximum(box_A[..., 2:], LEAST_SIZE)
    return np.concatenate([size, size], axis=-1)


def forget_transitions() -> None:
    """After a change of `FADING`."""
    _transition.cache_clear()


@functools.lru_cache(64)  # the objects of a frame mostly share the last one that they were seen in
def _transition(elapsed: float) -> tuple[Array, Array]:
    """The matrix of the prediction, and its noise for an acceleration of deviation 1.

    Backwards the acceleration is taken as constant, because it would grow without bound.
    """
    if elapsed < 0:
        forth_KK = np.array([[1, elapsed, elapsed**2 / 2], [0, 1, elapsed], [0, 0, 1]])
    else:
        forth_KK = _fading(elapsed)
    return forth_KK, _noise(abs(elapsed))


def _fading(elapsed: float) -> Array:
    share = elapsed / FADING
    left = math.exp(-share)
    return np.array(
        [
            [1, elapsed, FADING**2 * (share - 1 + left)],
            [0, 1, FADING * (1 - left)],
            [0, 0, left],
        ]
    )


def _noise(elapsed: float) -> Array:
    """What the changes of the acceleration add to the covariance.

    White noise enters the acceleration all the time, and reaches the three derivatives by the last
    column of `_fading`: the integral of that column times itself.
    """
    noise_KK = np.zeros((3, 3))
    for point, weight in zip(*_quadrature(), strict=True):
        effect_K = _fading(elapsed * (1 + point) / 2)[:, 2]
        noise_KK += weight * elapsed / FADING * np.outer(effect_K, effect_K)
    return noise_KK


@functools.cache
def _quadrature() -> tuple[Array, Array]:
    """Points in [-1, 1] and their weights, for polynomials up to degree 15."""
    return np.polynomial.legendre.leggauss(8)
