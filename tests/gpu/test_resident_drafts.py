"""Draft tokens inside the megakernel on a GPU: fewer steps, not one other bit.

What must hold is in `tests/resident/drafts.py`, which `tests/emulator` checks without a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2

from benchmarks.megakernel.drafts import DraftingRows
from tests.gpu.hopper import HOPPER
from tests.resident import drafts
from tests.resident.drafts import World

pytestmark = HOPPER

SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=3)


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.mark.parametrize(
    ("name", "count"),
    [("fixed", 1), ("fixed", 2), ("seed", 2), ("budget", 1), ("budget", 2)],
)
def test_drafts_change_no_bit(world: World, name: str, count: int) -> None:
    drafts.drafts_change_no_bit(world, name, count)


@pytest.mark.parametrize("count", [1, 2])
def test_pages_and_last_tokens_end_a_launch(world: World, count: int) -> None:
    drafts.pages_and_last_tokens_end_a_launch(world, count, (0, 1, 5, 20), (9, 17, 33))


@pytest.mark.parametrize("count", [1, 2])
def test_rows_that_have_ended_feed_nothing(world: World, count: int) -> None:
    drafts.rows_that_have_ended_feed_nothing(world, count)


def test_the_host_ends_a_launch_after_any_step(world: World) -> None:
    def stop_later(rows: DraftingRows, chance: random.Random) -> None:
        time.sleep(chance.random() * 3e-3)
        rows.ring.stop()

    lengths = drafts.the_host_ends_a_launch_after_any_step(
        world, 2, 40, stop_later, start_first=True
    )
    assert len(lengths) > 3


@pytest.mark.parametrize("count", [1, 2])
def test_repeats_have_the_same_bits(world: World, count: int) -> None:
    drafts.repeats_have_the_same_bits(world, count, repeats=30)


def test_late_warps_change_nothing() -> None:
    world = World(LEGATO_TINY)
    for count in (1, 2):
        drafts.late_warps_change_nothing(world, count, repeats=20)
