"""Which box belongs to which track."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from legato_service.tracking import assign, gains


def total(gain: np.ndarray, pairs: list[tuple[int, int]]) -> float:
    """The sum of the pairs' gains."""
    return float(sum(gain[pair] for pair in pairs))


def best_total(gain: np.ndarray) -> float:
    """The greatest sum of all ways, by trying each."""
    columns = [*range(gain.shape[1]), *[-1] * gain.shape[0]]
    ways = itertools.permutations(columns, gain.shape[0])
    pairs = ([(row, column) for row, column in enumerate(way) if column >= 0] for way in ways)
    return max(total(np.maximum(gain, 0), each) for each in pairs)


matrices = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))


def matrix(rows: int, columns: int, seed: int) -> np.ndarray:
    """Gains of both signs, some of them minus infinity."""
    rng = np.random.default_rng(seed)
    gain = rng.normal(size=(rows, columns))
    return np.where(rng.random((rows, columns)) < 0.2, -np.inf, gain)


@given(matrices)
def test_pairs_gain_and_no_two_share_a_row_or_a_column(shape):
    """Every pair has a positive gain, and rows and columns are taken at most once."""
    gain = matrix(*shape)
    pairs = assign(gain)
    assert all(gain[pair] > 0 for pair in pairs)
    assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)


@given(st.integers(0, 2**32 - 1))
def test_two_tracks_get_the_best_pairs(seed):
    """Of all ways to give two objects to two tracks the best one is found: they do not swap."""
    gain = matrix(2, 2, seed)
    assert np.isclose(total(gain, assign(gain)), best_total(gain))


@given(st.integers(3, 5), st.integers(3, 5), st.integers(0, 2**32 - 1))
def test_no_two_tracks_gain_by_an_exchange(rows, columns, seed):
    """Of more tracks, no two would be better off with each other's objects."""
    gain = np.maximum(matrix(rows, columns, seed), 0)
    pairs = assign(gain)
    for (one, its), (other, others) in itertools.combinations(pairs, 2):
        assert gain[one, others] + gain[other, its] <= gain[one, its] + gain[other, others] + 1e-9


def test_the_greatest_gain_does_not_cost_another_row_more():
    """Greedy alone would take 10 and leave 1; 9 and 9 are better."""
    assert assign(np.array([[10.0, 9.0], [9.0, 1.0]])) == [(0, 1), (1, 0)]


def test_a_sure_track_does_not_gain_by_a_far_box():
    """A box a few deviations away is worth less than a new object, beyond the gate never."""
    track = np.array([[0.5, 0.5, 0.1, 0.1]])
    boxes = track + np.array([[0.0, 0, 0, 0], [0.03, 0, 0, 0], [0.3, 0, 0, 0]])
    near, further, far = gains(track, np.full((1, 4), 0.01**2), boxes)[0]
    assert near > further > 0 > far == -np.inf
