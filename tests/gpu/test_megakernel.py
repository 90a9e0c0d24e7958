"""On a GPU: the megakernel's steps are the model's, and have one result however they run.

What must hold is in `tests/megakernel/words.py`, which `tests/emulator` checks without a GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2

from tests.gpu.inputs import HOPPER
from tests.megakernel import words
from tests.megakernel.words import World, bits_are_those_of_captured_steps

pytestmark = HOPPER


SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=3)


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16])
def test_steps_are_the_models(world: World, num_rows: int) -> None:
    words.steps_are_the_models(world, num_rows)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 16])
def test_bits_are_those_of_captured_steps(world: World, num_rows: int) -> None:
    bits_are_those_of_captured_steps(world, num_rows)


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    """1 to 16 rows, by both builds."""
    words.a_row_has_the_same_bits_in_every_batch(world, (*range(2, 10), 15, 16))


@pytest.mark.parametrize(
    ("num_rows", "build", "repeats"),
    [(1, 8, 150), (8, 8, 150), (1, 16, 400), (16, 16, 60)],
)
def test_repeats_have_the_same_bits(world: World, num_rows: int, build: int, repeats: int) -> None:
    words.repeats_have_the_same_bits(world, num_rows, build, repeats)


@pytest.mark.parametrize("sharing", [words.SHARING, words.SHARING[:3], [(8, 47)], [(16, 20)]])
def test_rows_that_share_pages_have_their_own_bits(
    world: World, sharing: list[tuple[int, int]]
) -> None:
    words.rows_that_share_pages_have_their_own_bits(world, 6, sharing)


def test_late_warps_change_nothing() -> None:
    words.late_warps_change_nothing(World(LEGATO_TINY), repeats=60)


def test_tokens_are_those_of_the_sampling_kernel(world: World) -> None:
    """Greedy rows and every mix of temperature, top-p and top-k."""
    words.tokens_are_those_of_the_sampling_kernel(world, num_rows=16, steps=3)
    words.tokens_are_those_of_the_sampling_kernel(world, num_rows=16, steps=3, shift=2.0**20)


def test_a_row_that_is_not_finite_ends_the_launch() -> None:
    words.a_row_that_is_not_finite_ends_the_launch(World(LEGATO_TINY))


def test_a_stuck_wait_is_reported_and_ends_the_launch() -> None:
    words.a_stuck_wait_is_reported_and_ends_the_launch(World(LEGATO_TINY))
