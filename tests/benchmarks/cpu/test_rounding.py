"""F1 of a form of the weights, and how it differs from that of another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from legato_client import Box
from legato_client.calibration.scored import LabelledImage, Scored

from benchmarks.cpu import rounding

BOX = Box(0.1, 0.1, 0.2, 0.2)


def picture(number, **boxes):
    return LabelledImage(Path(), number, boxes)


def found(number, *, right):
    return Scored("detect", number, "cup", BOX, (), right)


def test_counts_are_by_picture():
    """A thing that no picture shows counts only where the model finds it."""
    pictures = [picture(7, cup=(BOX, BOX), pen=()), picture(3, cup=(BOX,))]
    counts = rounding.counted(
        pictures, [found(7, right=True), found(7, right=False), found(3, right=True)]
    )
    assert counts.tolist() == [[1, 2, 2], [1, 1, 1]]
    assert rounding.f1(counts) == pytest.approx(2 * 2 / (3 + 3))


def test_a_difference_is_taken_picture_by_picture():
    """Two forms that fail in the same pictures do not differ, however much pictures do."""
    reference = np.array([[9, 9, 9], [0, 9, 9], [5, 9, 9], [9, 9, 9]] * 20)
    same = rounding.difference(reference.copy(), reference, seed=1)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    worse = reference.copy()
    worse[::2, 0] -= 1
    less = rounding.difference(worse, reference, seed=1)
    assert less.low < less.value < less.high < 0.0
    assert less.value == pytest.approx(-0.5 / 9)


def test_the_table_compares_with_the_first_form():
    """It has a row for each form, and the first has nothing to be compared with."""
    counts = {"float32": np.array([[1, 1, 1]]), "int8": np.array([[1, 2, 1]])}
    less = {"int8": rounding.Difference(-0.3333, -0.5, -0.1)}
    rows = rounding.table(counts, less).splitlines()
    assert rows[-2] == "| float32 | 1.0000 | - | 1.0000 | 1.0000 |"
    assert rows[-1] == "| int8 | 0.6667 | -0.3333 (-0.5000 to -0.1000) | 1.0000 | 0.5000 |"
