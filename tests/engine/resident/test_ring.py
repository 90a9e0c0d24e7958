"""The ring's protocol in random orders, and faults that it would not survive."""

from __future__ import annotations

import itertools
import random

import pytest
from legato_engine.kernels.cuda.resident import RING_STAGES, UNDER_WAY
from legato_engine.resident.ring_model import RingFault, RingModel, ring_problem

STAGES = 60


def faults(ring_stages: int, under_way: int, orders: int, *, early: bool = False) -> list[str]:
    found = []
    for seed in range(orders):
        try:
            RingModel(ring_stages, under_way, early=early).run(STAGES, random.Random(seed))
        except RingFault as fault:
            found.append(str(fault))
    return found


def test_accepted_rings_hand_every_stage_over_in_every_order() -> None:
    """Every ring of up to 12 stages, and those of the engine's builds among them."""
    accepted = [
        (ring, under_way)
        for ring, under_way in itertools.product(range(2, 13), range(1, 7))
        if ring_problem(ring, under_way) is None
    ]
    assert {(RING_STAGES[tiles], UNDER_WAY[tiles]) for tiles in RING_STAGES} <= set(accepted)
    for ring, under_way in accepted:
        assert not faults(ring, under_way, orders=6), (ring, under_way)


@pytest.mark.parametrize(("ring", "under_way"), [(11, 2), (11, 4), (9, 2)])
def test_a_refused_ring_stops(ring: int, under_way: int) -> None:
    """A producer takes a stage that the other one has filled again for one that never lands."""
    assert ring_problem(ring, under_way) is not None
    assert any("wait for ever" in fault for fault in faults(ring, under_way, orders=60))


@pytest.mark.parametrize("ring", [4, 8, 12])
def test_a_stage_let_go_before_its_reads_are_over_is_overwritten(ring: int) -> None:
    """The fault of the build for 32 rows: some order reads another stage's weights."""
    assert any(
        "in place of" in fault for fault in faults(ring, 3 if ring > 4 else 2, 60, early=True)
    )
