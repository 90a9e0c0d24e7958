"""Which box belongs to which track.

Shapes: T = tracks, D = detections, A = 4 axes (centre x, centre y, width, height).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from legato_service.tracking.box_filter import LEAST_SIZE, Array

GATE = 20.0
"""The greatest squared distance in standard deviations; of four axes 0.0005 lie beyond it."""
NEW_OBJECTS = 0.02
"""New objects expected in a frame. A track that explains a box worse than these does not get it."""
SUDDEN = 2.0
"""Taken from the gain of a track whose object starts or stops suddenly: few do in a frame."""
LEAST_GAIN = 1e-9
"""A gain below it is a rounding error."""


def gains(mean_TA: Array, variance_TA: Array, box_DA: Array) -> Array:
    """How much better each track explains each box than a new object does; TD.

    In natural logarithms of likelihoods; minus infinity beyond `GATE`. The variances include the
    measurement's. A new object may be anywhere in the picture, and about as large as the track;
    a track that was long unseen may not be elsewhere either, so its spread is limited to the same.
    """
    difference_TDA = box_DA[None] - mean_TA[:, None]
    distance_TD = (difference_TDA**2 / variance_TA[:, None]).sum(axis=-1)
    unit_TA = np.ones_like(mean_TA)
    unit_TA[:, 2:] = np.maximum(mean_TA[:, 2:], LEAST_SIZE)
    spread_T = np.minimum(np.log(2 * np.pi * variance_TA / unit_TA**2), 0).sum(axis=-1)
    gain_TD = -0.5 * (distance_TD + spread_T[:, None]) - np.log(NEW_OBJECTS)
    return np.where(distance_TD <= GATE, gain_TD, -np.inf)


def assign(gain_TD: Array) -> list[tuple[int, int]]:
    """Pairs of great sum, of positive gains only; at most one a row and one a column.

    The greatest gain first; then two rows exchange their columns as long as that is better. No such
    exchange is left at the end, unless there were as many as rows: the time is bounded.
    """
    size = max(gain_TD.shape)
    gain = np.zeros((size, size))  # of squares; a zero stands for no pair
    gain[: gain_TD.shape[0], : gain_TD.shape[1]] = np.maximum(gain_TD, 0)
    column_of = _greedy(gain)
    for _ in range(size):
        by_column = gain[:, column_of]
        own = np.diagonal(by_column)
        better = by_column + by_column.T - own[:, None] - own
        one, other = np.unravel_index(np.argmax(better), better.shape)
        if better[one, other] <= LEAST_GAIN:
            break
        column_of[[one, other]] = column_of[[other, one]]
    return [(row, int(column)) for row, column in enumerate(column_of) if gain[row, column] > 0]


def _greedy(gain: Array) -> npt.NDArray[np.int64]:
    """A column for each row of a square."""
    left = gain.copy()
    column_of = np.empty(len(gain), dtype=np.int64)
    for _ in range(len(gain)):
        row, column = np.unravel_index(np.argmax(left), left.shape)
        column_of[row] = column
        left[row], left[:, column] = -1, -1
    return column_of
