"""Overlaps, matches and quantiles."""

from __future__ import annotations

import math

import pytest
from legato_client import Box

from examples.robot.scoring import match, mean, overlap, percentile

UNIT = Box(0, 0, 1, 1)
LEFT, RIGHT = Box(0, 0, 0.5, 1), Box(0.5, 0, 1, 1)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (UNIT, UNIT, 1.0),
        (UNIT, LEFT, 0.5),
        (LEFT, RIGHT, 0.0),
        (Box(0, 0, 0.5, 0.5), Box(0.25, 0, 0.75, 0.5), 1 / 3),
        (Box(0.2, 0.2, 0.2, 0.2), Box(0.2, 0.2, 0.2, 0.2), 0.0),
        (Box(0.9, 0.9, 0.1, 0.1), UNIT, 0.0),
    ],
    ids=["same", "half", "side by side", "shifted", "no area", "edges swapped"],
)
def test_overlap(one: Box, other: Box, expected: float) -> None:
    """Intersection over union, the same from both sides, never negative."""
    assert overlap(one, other) == pytest.approx(expected)
    assert overlap(other, one) == pytest.approx(expected)


def test_a_box_is_matched_once() -> None:
    """One box on two true ones finds one of them, and the best pair goes first."""
    assert match([UNIT], [LEFT, UNIT]) == [0.0, 1.0]
    assert match([LEFT, UNIT], [LEFT]) == [1.0]
    assert match([RIGHT, LEFT], [LEFT, RIGHT]) == [1.0, 1.0]


def test_what_is_not_found_counts_nothing() -> None:
    """A missed object scores 0; a box on nothing changes no score."""
    assert match([], [LEFT, RIGHT]) == [0.0, 0.0]
    assert match([RIGHT], [LEFT]) == [0.0]
    assert match([LEFT], []) == []


def test_percentiles_are_values_that_occurred() -> None:
    """Nearest rank: the least value that the share does not exceed."""
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0, 0.0)] == [
        50,
        90,
        99,
        100,
        1,
    ]
    assert percentile([3.0], 0.99) == 3.0


def test_of_nothing_there_is_no_figure() -> None:
    """An empty run gives no number that could be taken for one."""
    assert math.isnan(mean([]))
    assert math.isnan(percentile([], 0.5))
