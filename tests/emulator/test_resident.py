"""The resident kernel's own source on a CPU, every thread of it a fiber: what holds on a GPU holds
here, in whatever order threads run.
"""

from __future__ import annotations

import pytest

from tests.emulator.module import Schedule
from tests.emulator.small import SMALL, emulated
from tests.resident import words
from tests.resident.words import World


@pytest.fixture(scope="module")
def world() -> World:
    return World(SMALL, emulated())


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13])
def test_steps_are_the_models(world: World, num_rows: int) -> None:
    words.steps_are_the_models(world, num_rows, steps=3)


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    words.a_row_has_the_same_bits_in_every_batch(world, (2, 4, 7, 9, 12))


@pytest.mark.parametrize(("num_rows", "build", "repeats"), [(1, 8, 8), (7, 8, 3), (5, 16, 2)])
def test_the_order_of_threads_changes_no_bit(
    world: World, num_rows: int, build: int, repeats: int
) -> None:
    words.repeats_have_the_same_bits(world, num_rows, build, repeats, steps=2)


def test_tokens_are_those_of_the_sampling_kernel(world: World) -> None:
    """Both are emulated."""
    words.tokens_are_those_of_the_sampling_kernel(
        world, num_rows=5, steps=2, rules=[(0.7, 1.0, 0), (1.5, 0.8, 0), (1.0, 1.0, 20)]
    )


def test_a_row_that_is_not_finite_ends_the_launch(world: World) -> None:
    words.a_row_that_is_not_finite_ends_the_launch(world)


def test_a_stuck_wait_is_reported_and_ends_the_launch() -> None:
    words.a_stuck_wait_is_reported_and_ends_the_launch(
        World(SMALL, emulated(Schedule(patient=True)))
    )
