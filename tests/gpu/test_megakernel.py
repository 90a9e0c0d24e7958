"""On a GPU: the megakernel's steps are the model's, and have one result however they run.

What must hold of words, of values and of draft tokens is in `tests/megakernel`, which
`tests/emulator` checks without a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2

from benchmarks.megakernel.drafts import DraftingRows
from tests.gpu.inputs import HOPPER
from tests.megakernel import both, drafts, values, words
from tests.megakernel.drafts import POLICIES, Scene
from tests.megakernel.words import World, bits_are_those_of_captured_steps

pytestmark = [pytest.mark.gpu, HOPPER]


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


SHALLOWER = dataclasses.replace(MOONDREAM2, num_layers=2)


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOWER], ids=["tiny", "moondream2"])
def value_world(request: pytest.FixtureRequest) -> values.World:
    return values.World(request.param)


@pytest.fixture(scope="module", params=[LEGATO_TINY, MOONDREAM2], ids=["tiny", "moondream2"])
def one_layer(request: pytest.FixtureRequest) -> values.World:
    return values.World(dataclasses.replace(request.param, num_layers=1))


@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16])
def test_values_are_fed_back_as_the_model_does(value_world: values.World, num_rows: int) -> None:
    values.values_are_fed_back_as_the_model_does(value_world, num_rows)


@pytest.mark.parametrize("num_rows", [1, 8, 16])
def test_bins_are_those_of_the_decoders(value_world: values.World, num_rows: int) -> None:
    values.bins_are_those_of_the_decoders(value_world, num_rows)


@pytest.mark.parametrize("num_rows", [1, 5, 8, 13, 16])
def test_bits_of_values_are_those_of_captured_steps(one_layer: values.World, num_rows: int) -> None:
    values.bits_are_those_of_captured_steps(one_layer, num_rows)


@pytest.mark.parametrize("num_rows", [1, 5, 8, 13, 16])
def test_steps_are_captured_ones(value_world: values.World, num_rows: int) -> None:
    values.steps_are_captured_ones(value_world, num_rows)


def test_a_row_with_values_has_the_same_bits_in_every_batch(value_world: values.World) -> None:
    """1 to 16 greedy rows, by both builds."""
    values.a_row_has_the_same_bits_in_every_batch(value_world, (2, 5, 8, 9, 16))


def test_words_have_the_same_bits_by_both_builds(value_world: values.World) -> None:
    values.words_have_the_same_bits_by_both_builds(value_world, (1, 8, 13, 16))


@pytest.mark.parametrize(("num_rows", "repeats"), [(1, 100), (8, 100), (13, 40), (16, 40)])
def test_repeats_with_values_have_the_same_bits(
    value_world: values.World, num_rows: int, repeats: int
) -> None:
    values.repeats_have_the_same_bits(value_world, num_rows, repeats)


def test_late_warps_change_no_value() -> None:
    values.late_warps_change_nothing(values.World(LEGATO_TINY), repeats=60)


# ---------------------------------------------------------------- resident drafts
# Draft tokens inside the megakernel on a GPU: fewer steps, not one other bit.


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def draft_world(request: pytest.FixtureRequest) -> drafts.World:
    return drafts.World(request.param)


@pytest.mark.parametrize(
    ("name", "count"),
    [("fixed", 1), ("fixed", 2), ("seed", 2), ("budget", 1), ("budget", 2)],
)
def test_drafts_change_no_bit(draft_world: drafts.World, name: str, count: int) -> None:
    drafts.drafts_change_no_bit(draft_world, name, count)


@pytest.mark.parametrize("count", [1, 2])
def test_pages_and_last_tokens_end_a_launch(draft_world: drafts.World, count: int) -> None:
    drafts.pages_and_last_tokens_end_a_launch(draft_world, count, (0, 1, 5, 20), (9, 17, 33))


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_have_ended_feed_nothing(draft_world: drafts.World, count: int) -> None:
    drafts.rows_that_have_ended_feed_nothing(draft_world, count)


def test_the_host_ends_a_launch_with_drafts_after_any_step(draft_world: drafts.World) -> None:
    def stop_later(rows: DraftingRows, chance: random.Random) -> None:
        time.sleep(chance.random() * 3e-3)
        rows.ring.stop()

    lengths = drafts.the_host_ends_a_launch_after_any_step(
        draft_world, 2, 40, stop_later, start_first=True
    )
    assert len(lengths) > 3


@pytest.mark.parametrize("count", [1, 2])
def test_repeats_with_drafts_have_the_same_bits(draft_world: drafts.World, count: int) -> None:
    drafts.repeats_have_the_same_bits(draft_world, count, repeats=30)


def test_late_warps_change_nothing_with_drafts() -> None:
    draft_world = drafts.World(LEGATO_TINY)
    for count in (1, 2):
        drafts.late_warps_change_nothing(draft_world, count, repeats=20)


# ---------------------------------------------------------------- beside rows with values
# On a GPU: rows with values beside rows that draft, inside the megakernel.

MIXED_SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=2)
SCENES = {
    2: Scene(places=(300, 63), tokens=60, most=3, back=150),
    4: Scene(places=(333, 317, 255, 256), tokens=60, most=3, back=150),
}


@pytest.fixture(scope="module", params=[LEGATO_TINY, MIXED_SHALLOW], ids=["tiny", "moondream2"])
def worlds(request: pytest.FixtureRequest) -> dict[int, both.World]:
    return {count: both.World(request.param, scene) for count, scene in SCENES.items()}


@pytest.mark.parametrize("count", SCENES)
@pytest.mark.parametrize("name", POLICIES)
def test_values_beside_drafts_change_no_bit(
    worlds: dict[int, both.World], name: str, count: int
) -> None:
    both.values_beside_drafts_change_no_bit(worlds[count], name, seeds=8)


def test_late_warps_change_nothing_beside_values(worlds: dict[int, both.World]) -> None:
    both.late_warps_change_nothing(worlds[4], repeats=20)
