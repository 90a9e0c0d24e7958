"""On a GPU: rows with values beside rows that draft, inside the megakernel.

What must hold is in `tests/resident/both.py`, which `tests/emulator` checks without a GPU.
"""

from __future__ import annotations

import dataclasses

import pytest
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2

from tests.gpu.hopper import HOPPER
from tests.resident import both
from tests.resident.both import World
from tests.resident.drafts import POLICIES, Scene

pytestmark = HOPPER

SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=2)
SCENES = {
    2: Scene(places=(300, 63), tokens=60, most=3, back=150),
    4: Scene(places=(333, 317, 255, 256), tokens=60, most=3, back=150),
}


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def worlds(request: pytest.FixtureRequest) -> dict[int, World]:
    return {count: World(request.param, scene) for count, scene in SCENES.items()}


@pytest.mark.parametrize("count", SCENES)
@pytest.mark.parametrize("name", POLICIES)
def test_values_beside_drafts_change_no_bit(
    worlds: dict[int, World], name: str, count: int
) -> None:
    both.values_beside_drafts_change_no_bit(worlds[count], name, seeds=8)


def test_late_warps_change_nothing(worlds: dict[int, World]) -> None:
    both.late_warps_change_nothing(worlds[4], repeats=20)
