"""Values inside the megakernel, on the emulated machine."""

from __future__ import annotations

import dataclasses

import pytest
from legato_engine.kernels.megakernel.sizes import MOONDREAM2

from tests.emulator.small import EVEN, SMALL, emulated
from tests.megakernel import values
from tests.megakernel.values import World, bits_are_those_of_captured_steps, steps_are_captured_ones


@pytest.fixture(scope="module")
def world() -> World:
    return World(SMALL, emulated())


@pytest.mark.parametrize(
    "num_rows", [1, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (13, 16))]
)
def test_values_are_fed_back_as_the_model_does(world: World, num_rows: int) -> None:
    values.values_are_fed_back_as_the_model_does(world, num_rows, steps=3)


@pytest.mark.slow
def test_many_orders_of_threads_change_no_bit(world: World) -> None:
    for num_rows in (1, 8, 13):
        values.repeats_have_the_same_bits(world, num_rows, repeats=20)


def test_bins_are_those_of_the_decoders(world: World) -> None:
    values.bins_are_those_of_the_decoders(world, num_rows=8)


@pytest.mark.parametrize(
    ("num_rows", "parts"),
    [(5, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((13, 1), (1, 4), (13, 4)))],
)
def test_bits_are_those_of_captured_steps(num_rows: int, parts: int) -> None:
    """With bins that are sums of as many parts of the inner activations."""
    inner_dim = 4096 if parts > 1 else 4 * SMALL.dim
    world = World(dataclasses.replace(SMALL, num_layers=1), emulated(), inner_dim)
    assert world.values.sizes.parts == parts
    bits_are_those_of_captured_steps(world, num_rows)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 5, 13, 16])
def test_steps_are_captured_ones(num_rows: int) -> None:
    steps_are_captured_ones(World(EVEN, emulated()), num_rows, steps=3)


@pytest.mark.slow
def test_steps_of_moondream_2s_width_are_captured_ones() -> None:
    """One layer and fewer words: all else is as large as on a GPU."""
    sizes = dataclasses.replace(MOONDREAM2, num_layers=1, vocab_size=MOONDREAM2.dim)
    world = World(sizes, emulated())
    assert min(sizes.out_parts, world.values.sizes.parts) > 1
    steps_are_captured_ones(world, num_rows=9, steps=2)


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    values.a_row_has_the_same_bits_in_every_batch(world, (4,), steps=2)


def test_words_have_the_same_bits_by_both_builds(world: World) -> None:
    values.words_have_the_same_bits_by_both_builds(world, (5,))


def test_the_order_of_threads_changes_no_bit(world: World) -> None:
    values.repeats_have_the_same_bits(world, num_rows=6, repeats=2, steps=2)
