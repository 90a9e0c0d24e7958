"""On a GPU: draft tokens inside the megakernel, beside rows with values too, change no answer."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2

from benchmarks.megakernel.drafts import DraftingRows
from tests.gpu.inputs import HOPPER
from tests.megakernel import both, drafts
from tests.megakernel.both import World as MixedWorld
from tests.megakernel.drafts import POLICIES, Scene, World

pytestmark = HOPPER


# ---------------------------------------------------------------- resident drafts
# Draft tokens inside the megakernel on a GPU: fewer steps, not one other bit.
#
# What must hold is in `tests/megakernel/drafts.py`, which `tests/emulator` checks without a GPU.

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


# ---------------------------------------------------------------- beside rows with values
# On a GPU: rows with values beside rows that draft, inside the megakernel.
#
# What must hold is in `tests/megakernel/both.py`, which `tests/emulator` checks without a GPU.

SHALLOWER = dataclasses.replace(MOONDREAM2, num_layers=2)
SCENES = {
    2: Scene(places=(300, 63), tokens=60, most=3, back=150),
    4: Scene(places=(333, 317, 255, 256), tokens=60, most=3, back=150),
}


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOWER], ids=["tiny", "moondream2"])
def worlds(request: pytest.FixtureRequest) -> dict[int, MixedWorld]:
    return {count: MixedWorld(request.param, scene) for count, scene in SCENES.items()}


@pytest.mark.parametrize("count", SCENES)
@pytest.mark.parametrize("name", POLICIES)
def test_values_beside_drafts_change_no_bit(
    worlds: dict[int, MixedWorld], name: str, count: int
) -> None:
    both.values_beside_drafts_change_no_bit(worlds[count], name, seeds=8)


def test_late_warps_change_nothing_beside_values(worlds: dict[int, MixedWorld]) -> None:
    both.late_warps_change_nothing(worlds[4], repeats=20)
