"""On a GPU: values inside the megakernel.

What must hold is in `tests/megakernel/values.py`, which `tests/emulator` checks without a GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2

from tests.gpu.inputs import HOPPER
from tests.megakernel import values
from tests.megakernel.values import World, bits_are_those_of_captured_steps, steps_are_captured_ones

pytestmark = HOPPER


SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=2)


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.fixture(scope="module", params=[LEGATO_TINY, MOONDREAM2], ids=["tiny", "moondream2"])
def one_layer(request: pytest.FixtureRequest) -> World:
    return World(dataclasses.replace(request.param, num_layers=1))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16])
def test_values_are_fed_back_as_the_model_does(world: World, num_rows: int) -> None:
    values.values_are_fed_back_as_the_model_does(world, num_rows)


@pytest.mark.parametrize("num_rows", [1, 8, 16])
def test_bins_are_those_of_the_decoders(world: World, num_rows: int) -> None:
    values.bins_are_those_of_the_decoders(world, num_rows)


@pytest.mark.parametrize("num_rows", [1, 5, 8, 13, 16])
def test_bits_are_those_of_captured_steps(one_layer: World, num_rows: int) -> None:
    bits_are_those_of_captured_steps(one_layer, num_rows)


@pytest.mark.parametrize("num_rows", [1, 5, 8, 13, 16])
def test_steps_are_captured_ones(world: World, num_rows: int) -> None:
    steps_are_captured_ones(world, num_rows)


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    """1 to 16 greedy rows, by both builds."""
    values.a_row_has_the_same_bits_in_every_batch(world, (2, 5, 8, 9, 16))


def test_words_have_the_same_bits_by_both_builds(world: World) -> None:
    values.words_have_the_same_bits_by_both_builds(world, (1, 8, 13, 16))


@pytest.mark.parametrize(("num_rows", "repeats"), [(1, 100), (8, 100), (13, 40), (16, 40)])
def test_repeats_have_the_same_bits(world: World, num_rows: int, repeats: int) -> None:
    values.repeats_have_the_same_bits(world, num_rows, repeats)


def test_late_warps_change_nothing() -> None:
    values.late_warps_change_nothing(World(LEGATO_TINY), repeats=60)
