"""Values and log-probabilities inside the resident kernel, on the emulated machine."""

from __future__ import annotations

import pytest

from tests.emulator.small import SMALL, emulated
from tests.resident import values
from tests.resident.values import World


@pytest.fixture(scope="module")
def world() -> World:
    return World(SMALL, emulated())


@pytest.mark.parametrize("num_rows", [1, 8])
def test_values_are_fed_back_as_the_model_does(world: World, num_rows: int) -> None:
    values.values_are_fed_back_as_the_model_does(world, num_rows, steps=3)


def test_values_are_the_likeliest_bins(world: World) -> None:
    values.values_are_the_likeliest_bins(world, num_rows=8, every=(1, 2))


def test_logprobs_are_those_of_the_logits(world: World) -> None:
    values.logprobs_are_those_of_the_logits(world, num_rows=8)


def test_a_row_has_the_same_bits_in_every_batch(world: World) -> None:
    values.a_row_has_the_same_bits_in_every_batch(world, (2, 5), steps=2)


def test_words_have_the_same_bits_by_both_builds(world: World) -> None:
    values.words_have_the_same_bits_by_both_builds(world, (5,))


def test_the_order_of_threads_changes_no_bit(world: World) -> None:
    values.repeats_have_the_same_bits(world, num_rows=6, repeats=3, steps=3)
