"""Tracking of objects over frames: Kalman filter, association, tracks.

Its four axes (centre x, centre y, width, height) are filtered apart. Each has a position, a
velocity and an acceleration that changes at random and fades (Singer's model). Lengths are shares
of the image, times seconds. Shapes: A = 4 axes, K = 3 derivatives.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

FADING = 2.0  # seconds in which an acceleration fades to 1 / e
# Standard deviations, in widths (of x and width) or heights (of y and height) of the box.
MEASUREMENT = 0.02
SPEED_A = np.array([4.0, 4.0, 0.8, 0.8])  # per second, of an object seen for the first time
ACCELERATION_A = np.array([2.0, 2.0, 0.4, 0.4])  # a second squared
QUANTUM = 0.001  # fraction of the image: minimum error of a measurement
LEAST_SIZE = 0.001  # fraction of the image


@dataclasses.dataclass(frozen=True, slots=True)
class BoxState:
    """State estimate of a box at `time`, after the measurement `box_A`.

    `sudden`: the object's motion before its last measurement says nothing about the one after.
    """

    time: float
    box_A: Array
    mean_AK: Array
    covariance_AKK: Array
    sudden: bool = False

    def deviations(self) -> Array:
        """Return the deviations of each derivative of each axis; AK."""
        variance_AK: Array = np.diagonal(self.covariance_AKK, axis1=1, axis2=2)
        return np.sqrt(variance_AK)


def begin(time: float, box_A: Array) -> BoxState:
    """Start the state of a box that is seen for the first time."""
    unit_A = _unit(box_A)
    mean_AK = np.zeros((4, 3))
    mean_AK[:, 0] = box_A
    covariance_AKK = np.zeros((4, 3, 3))
    covariance_AKK[:, 0, 0] = measurement_variance(box_A)
    covariance_AKK[:, 1, 1] = (SPEED_A * unit_A) ** 2
    covariance_AKK[:, 2, 2] = (ACCELERATION_A * unit_A) ** 2
    return BoxState(time, box_A, mean_AK, covariance_AKK)


def predict(state: BoxState, time: float) -> tuple[Array, Array]:
    """Return mean and covariance at `time`, which may lie before the state's."""
    elapsed = time - state.time
    if elapsed == 0:
        return state.mean_AK, state.covariance_AKK
    transition_KK, noise_KK = _transition(elapsed)
    noise_A = (ACCELERATION_A * _unit(state.mean_AK[:, 0])) ** 2
    covariance_AKK = transition_KK @ state.covariance_AKK @ transition_KK.T
    return state.mean_AK @ transition_KK.T, covariance_AKK + noise_A[:, None, None] * noise_KK


def places(states: Sequence[BoxState], time: float) -> tuple[Array, Array]:
    """Return mean and variance of the boxes at `time`, as of a measurement to come; TA."""
    step_TK, noise_T = _steps(states, time)
    mean_TAK = np.stack([state.mean_AK for state in states])
    covariance_TAKK = np.stack([state.covariance_AKK for state in states])
    spread_TA = np.einsum("tk,takl,tl->ta", step_TK, covariance_TAKK, step_TK)
    return _places(np.einsum("tak,tk->ta", mean_TAK, step_TK), spread_TA, noise_T)


def places_anew(states: Sequence[BoxState], time: float) -> tuple[Array, Array]:
    """Predict places as `places` does, from the last measurement of each box only."""
    step_TK, noise_T = _steps(states, time)
    box_TA = np.stack([state.box_A for state in states])
    spread_TA = (step_TK[:, 1:2] * SPEED_A) ** 2 + (step_TK[:, 2:] * ACCELERATION_A) ** 2
    return _places(box_TA, measurement_variance(box_TA) + spread_TA * _unit(box_TA) ** 2, noise_T)


def _places(mean_TA: Array, spread_TA: Array, noise_T: Array) -> tuple[Array, Array]:
    noise_TA = noise_T[:, None] * (ACCELERATION_A * _unit(mean_TA)) ** 2
    return mean_TA, spread_TA + noise_TA + measurement_variance(mean_TA)


def _steps(states: Sequence[BoxState], time: float) -> tuple[Array, Array]:
    """Return the transition of each state to `time` and its process noise."""
    steps = [_transition(time - state.time) for state in states]
    step_TK = np.stack([transition_KK[0] for transition_KK, _ in steps])
    return step_TK, np.array([noise_KK[0, 0] for _, noise_KK in steps])


def update(state: BoxState, time: float, box_A: Array, *, sudden: bool = False) -> BoxState:
    """Return the state at `time` with one more measurement."""
    before = begin(state.time, state.box_A) if sudden else state
    mean_AK, covariance_AKK = predict(before, time)
    variance_A = covariance_AKK[:, 0, 0] + measurement_variance(box_A)
    gain_AK = covariance_AKK[:, :, 0] / variance_A[:, None]
    innovation_A = box_A - mean_AK[:, 0]
    mean_AK = mean_AK + gain_AK * innovation_A[:, None]
    covariance_AKK = covariance_AKK - gain_AK[:, :, None] * covariance_AKK[:, None, 0, :]
    return BoxState(time, box_A, mean_AK, covariance_AKK, sudden)


def measurement_variance(box_A: Array) -> Array:
    """Return the measurement variance of a detected box by axis; accepts rows of boxes."""
    return (MEASUREMENT * _unit(box_A)) ** 2 + QUANTUM**2


def _unit(box_A: Array) -> Array:
    """Return the unit of each axis's deviations."""
    size = np.maximum(box_A[..., 2:], LEAST_SIZE)
    return np.concatenate([size, size], axis=-1)


def forget_transitions() -> None:
    """Clear cached transitions, after a change of `FADING`."""
    _transition.cache_clear()


@functools.lru_cache(64)  # the objects of a frame mostly share the last one that they were seen in
def _transition(elapsed: float) -> tuple[Array, Array]:
    """Return the prediction's matrix, and its noise for an acceleration of deviation 1.

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
    """Return the covariance added by changes of the acceleration.

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
    """Return points in [-1, 1] and their weights, for polynomials up to degree 15."""
    return np.polynomial.legendre.leggauss(8)


# ---------------------------------------------------------------- association

# Which box belongs to which track.
#
# Shapes: T = tracks, D = detections, A = 4 axes (centre x, centre y, width, height).

GATE = 20.0
"""Maximum squared distance in standard deviations; 0.0005 of measurements lie beyond it."""
NEW_OBJECTS = 0.02
"""New objects expected in a frame. A track that explains a box worse than these does not get it."""
SUDDEN = 2.0
"""Penalty on the gain of a sudden start or stop, which few objects do in a frame."""
LEAST_GAIN = 1e-9
"""A gain below it is a rounding error."""


def gains(mean_TA: Array, variance_TA: Array, box_DA: Array) -> Array:
    """Return the log-likelihood gain of each track for each box over a new object; TD.

    In natural logarithms of likelihoods; minus infinity beyond `GATE`. The variances include the
    measurement's. A new object may be anywhere in the image, and about as large as the track;
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
    """Return pairs of great total gain, positive gains only; at most one per row and column.

    The greatest gain first; then two rows exchange their columns as long as that is better. No such
    exchange is left at the end, unless there were as many as rows: the time is bounded.
    """
    size = max(gain_TD.shape)
    gain = np.zeros((size, size))  # square; 0 means no pair
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
    """Assign a column to each row of a square greedily."""
    left = gain.copy()
    column_of = np.empty(len(gain), dtype=np.int64)
    for _ in range(len(gain)):
        row, column = np.unravel_index(np.argmax(left), left.shape)
        column_of[row] = column
        left[row], left[:, column] = -1, -1
    return column_of


# ---------------------------------------------------------------- tracker

# Tracks of one task's objects; the results of frames may come in any order.

MAX_STATES = 8
"""States kept per track, so that an older frame's result can be inserted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tracked:
    """An object of a frame: its track, and its state when the frame was captured."""

    track_id: str
    state: BoxState


class TrackIds:
    """Track names of a session, of which at most `limit` are in use."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._numbers = itertools.count(1)

    @property
    def is_empty(self) -> bool:
        return self._left == 0

    def take(self) -> str:
        """Take a name that was never used; not when `is_empty`."""
        assert self._left > 0, "every track is alive"
        self._left -= 1
        return str(next(self._numbers))

    def give_back(self, count: int) -> None:
        self._left += count


class Track:
    """Tracked object: its last states by time."""

    def __init__(self, track_id: str, first: BoxState) -> None:
        self.track_id = track_id
        self._states = [first]

    @property
    def last_seen(self) -> float:
        return self._states[-1].time

    def nearest(self, time: float) -> BoxState:
        """Return the last state up to `time`, or else the first one after it."""
        return self._states[max(self._index(time) - 1, 0)]

    def add(self, time: float, box_A: Array, sudden: bool) -> BoxState:
        """Add a measurement, and return the state at its time.

        Later measurements are applied again. If it is older than all that are kept, it
        changes nothing.
        """
        index = self._index(time)
        if index == 0:
            state = update(self._states[0], time, box_A)
            if len(self._states) < MAX_STATES:
                self._states.insert(0, begin(time, box_A))
                self._follow(1)
            return state
        state = update(self._states[index - 1], time, box_A, sudden=sudden)
        self._states.insert(index, state)
        self._follow(index + 1)
        del self._states[:-MAX_STATES]
        return state

    def _follow(self, first: int) -> None:
        """Compute the states from this index on again, each from the one before."""
        for index in range(first, len(self._states)):
            old = self._states[index]
            self._states[index] = update(
                self._states[index - 1], old.time, old.box_A, sudden=old.sudden
            )

    def _index(self, time: float) -> int:
        return bisect.bisect_right(self._states, time, key=lambda state: state.time)


class Tracker:
    """The tracks of one task. Times are those of the frames, in seconds on any clock.

    `max_unseen` is how long a track waits for its object.
    """

    def __init__(self, ids: TrackIds, max_unseen: float) -> None:
        self.max_unseen = max_unseen
        self._ids = ids
        self._tracks: list[Track] = []
        self._newest = (-1, -math.inf)  # sequence and time
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tracks)

    def observe(self, sequence: int, time: float, boxes_DA: Array) -> list[Tracked | None]:
        """Follow the objects of a frame; None for each that is one too many for `TrackIds`.

        A result so late that all tracks of its time may have ended has none either.
        """
        self._expire(sequence, time)
        if self._is_closed or time < self._newest[1] - self.max_unseen:
            return [None] * len(boxes_DA)
        found: list[Tracked | None] = [None] * len(boxes_DA)
        seen: set[Track] = set()
        for track, index, sudden in self._pairs(time, boxes_DA):
            found[index] = Tracked(track.track_id, track.add(time, boxes_DA[index], sudden))
            seen.add(track)
        for index, box_A in enumerate(boxes_DA):
            if found[index] is None and self._make_room(seen):
                state = begin(time, box_A)
                track = Track(self._ids.take(), state)
                found[index] = Tracked(track.track_id, state)
                self._tracks.append(track)
                seen.add(track)
        return found

    def close(self) -> None:
        """Forget all tracks; what is observed later has none."""
        self._forget(self._tracks)
        self._is_closed = True

    def _expire(self, sequence: int, time: float) -> None:
        """Expire tracks; a much earlier time means that the clock was set, so all restart."""
        last_sequence, last_time = self._newest
        if sequence > last_sequence and time < last_time - self.max_unseen:
            self._forget(self._tracks)
            last_time = time
        newest = max(time, last_time)
        self._newest = max(sequence, last_sequence), newest
        self._forget([each for each in self._tracks if newest - each.last_seen > self.max_unseen])

    def _pairs(self, time: float, boxes_DA: Array) -> list[tuple[Track, int, bool]]:
        """Return tracks with their boxes' indices, and whether they moved there suddenly."""
        if not self._tracks or len(boxes_DA) == 0:
            return []
        states = [track.nearest(time) for track in self._tracks]
        smooth_TD = gains(*places(states, time), boxes_DA)
        anew_TD = gains(*places_anew(states, time), boxes_DA)
        sudden_TD = anew_TD - SUDDEN
        pairs = assign(np.maximum(smooth_TD, sudden_TD))
        return [(self._tracks[t], d, bool(sudden_TD[t, d] > smooth_TD[t, d])) for t, d in pairs]

    def _make_room(self, seen: Collection[Track]) -> bool:
        """Drop the track that was unseen for longest if there are too many."""
        if self._ids.is_empty:
            unseen = [track for track in self._tracks if track not in seen]
            self._forget(sorted(unseen, key=lambda track: track.last_seen)[:1])
        return not self._ids.is_empty

    def _forget(self, tracks: Sequence[Track]) -> None:
        gone = set(tracks)
        self._tracks = [track for track in self._tracks if track not in gone]
        self._ids.give_back(len(gone))
