"""Values beside drafts inside the megakernel, on the emulated machine."""

from __future__ import annotations

import pytest

from tests.emulator.small import NARROW, SMALL, emulated
from tests.resident.both import World, values_beside_drafts_change_no_bit
from tests.resident.drafts import Scene

SCENE = Scene(places=(44, 31), tokens=14, most=3, back=20)


def test_values_beside_drafts_change_no_bit() -> None:
    values_beside_drafts_change_no_bit(World(NARROW, SCENE, emulated()), "fixed", seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "seed", "budget"])
def test_values_beside_drafts_of_more_rows_change_no_bit(name: str) -> None:
    """Up to 16 tokens a step, of rows with several pages."""
    scene = Scene(places=(200, 65, 63, 64), tokens=24, most=3, back=40)
    values_beside_drafts_change_no_bit(World(SMALL, scene, emulated()), name)
