"""Draft tokens inside the megakernel, beside rows with values too, on the emulated machine."""

from __future__ import annotations

import random

import pytest

from benchmarks.megakernel.drafts import DraftingRows
from tests.emulator.module import Schedule
from tests.emulator.small import NARROW, SMALL, emulated
from tests.megakernel import drafts
from tests.megakernel.both import World as MixedWorld
from tests.megakernel.both import values_beside_drafts_change_no_bit
from tests.megakernel.drafts import Scene, World

# ---------------------------------------------------------------- drafts
# Draft tokens inside the megakernel, on the emulated machine.
#
# What the kernel settles and places is compared with `ReferenceDrafts`.

# A warp's second page of a row begins at position 512.
SCENE = Scene(places=(557, 31), tokens=14, most=3, back=20)
LONG_BLOCKS = Scene(places=(44,), tokens=30, most=11, back=40)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return Schedule()


@pytest.fixture(scope="module")
def world(schedule: Schedule) -> World:
    return World(NARROW, SCENE, emulated(schedule))


@pytest.mark.parametrize(
    ("name", "count"), [("fixed", 1), pytest.param("budget", 2, marks=pytest.mark.slow)]
)
def test_drafts_change_no_bit(world: World, name: str, count: int) -> None:
    drafts.drafts_change_no_bit(world, name, count, (0.0, 0.6, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("fixed", 2), ("seed", 2), ("budget", 1), ("budget", 2)]
)
def test_long_drafts_change_no_bit(name: str, count: int) -> None:
    """Up to 16 tokens a step, of rows with several pages."""
    scene = Scene(places=(200, 64), tokens=24, most=7, back=40)
    world = World(NARROW, scene, emulated())
    drafts.drafts_change_no_bit(world, name, count)


@pytest.mark.slow
def test_many_orders_of_threads_change_no_bit(world: World) -> None:
    for count in (1, 2):
        drafts.repeats_have_the_same_bits(world, count, repeats=20)


@pytest.mark.slow
def test_more_tokens_than_attention_takes_at_once_change_no_bit() -> None:
    """A row with 12 tokens in a step is two units of attention."""
    drafts.drafts_change_no_bit(World(NARROW, LONG_BLOCKS, emulated()), "fixed", 1, (0.7, 1.0))


def test_pages_and_last_tokens_end_a_launch(world: World) -> None:
    drafts.pages_and_last_tokens_end_a_launch(world, 2, (0, 5), (7,))


def test_rows_that_have_ended_feed_nothing(world: World) -> None:
    drafts.rows_that_have_ended_feed_nothing(world, 2)


def test_the_host_ends_a_launch_after_any_step(world: World, schedule: Schedule) -> None:
    def stop_later(rows: DraftingRows, chance: random.Random) -> None:
        left = chance.randrange(400)

        def host() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                rows.ring.stop()

        schedule.host, schedule.host_every = host, 5000

    lengths = drafts.the_host_ends_a_launch_after_any_step(
        world, 2, 5, stop_later, start_first=False
    )
    schedule.host = None
    assert len(lengths) > 2


# ---------------------------------------------------------------- beside rows with values

NEAR_SCENE = Scene(places=(44, 31), tokens=14, most=3, back=20)


def test_values_beside_drafts_change_no_bit() -> None:
    values_beside_drafts_change_no_bit(MixedWorld(NARROW, NEAR_SCENE, emulated()), "fixed", seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "seed", "budget"])
def test_values_beside_drafts_of_more_rows_change_no_bit(name: str) -> None:
    """Up to 16 tokens a step, of rows with several pages."""
    scene = Scene(places=(200, 65, 63, 64), tokens=24, most=3, back=40)
    values_beside_drafts_change_no_bit(MixedWorld(SMALL, scene, emulated()), name)
