"""The ring's protocol in random orders, and faults that it would not survive."""

from __future__ import annotations

import itertools
import random

import pytest
from legato_engine.kernels.megakernel.kernel import RING_STAGES, UNDER_WAY
from legato_engine.kernels.megakernel.sizes import ring_problem

from tests.megakernel_model.order import WEIGHTS, RingFault, RingModel, Takers

STAGES, WARPS = 60, 4


def plan_of(chance: random.Random) -> list[Takers]:
    """Plan weights and rows of attention in turns.

    A row's pages are each warp's in turns, from any one on; a short row leaves most warps without
    any.
    """
    plan: list[Takers] = []
    while len(plan) < STAGES:
        plan += [WEIGHTS] * chance.randrange(4)
        for _ in range(chance.randrange(1, 12)):
            first, pages = chance.randrange(WARPS), chance.choice((1, 1, 2, 3, 7))
            warps = [(first + page) % WARPS for page in range(pages)]
            plan += [tuple(warps[i : i + 2]) for i in range(0, pages, 2)]
    return [*plan, WEIGHTS]


def fault_of(
    plan: list[Takers], ring_stages: int, under_way: int, chance: random.Random, **planted: bool
) -> list[str]:
    try:
        RingModel(ring_stages, under_way, warps=WARPS, **planted).run(plan, chance)
    except RingFault as fault:
        return [str(fault)]
    return []


def faults(ring_stages: int, under_way: int, orders: int, **planted: bool) -> list[str]:
    """Return the faults of random plans and orders."""
    found = []
    for seed in range(orders):
        chance = random.Random(seed)
        found += fault_of(plan_of(chance), ring_stages, under_way, chance, **planted)
    return found


def test_accepted_rings_hand_every_stage_over_in_every_order() -> None:
    """Every ring of up to 12 stages, and those of the engine's builds among them."""
    accepted = [
        (ring, under_way)
        for ring, under_way in itertools.product(range(2, 13), range(1, 7))
        if ring_problem(ring, under_way) is None
    ]
    assert {(ring, UNDER_WAY) for ring in RING_STAGES.values()} <= set(accepted)
    for ring, under_way in accepted:
        assert not faults(ring, under_way, orders=6), (ring, under_way)


@pytest.mark.parametrize(("ring", "under_way"), [(11, 2), (11, 4), (9, 2)])
def test_a_refused_ring_stops(ring: int, under_way: int) -> None:
    """A loader takes a stage that the other one has filled again for one that never lands."""
    assert ring_problem(ring, under_way) is not None
    assert any("wait for ever" in fault for fault in faults(ring, under_way, orders=60))


@pytest.mark.parametrize("ring", [4, 8, 12])
def test_a_stage_let_go_before_its_reads_are_over_is_overwritten(ring: int) -> None:
    """Some order reads another stage's weights."""
    assert any(
        "in place of" in fault for fault in faults(ring, 3 if ring > 4 else 2, 60, early=True)
    )


@pytest.mark.parametrize("ring", [8, 10, 12])
@pytest.mark.parametrize(("fault", "after"), [("looks_at_lap", (1, 0)), ("meets", WEIGHTS)])
def test_a_warp_that_is_a_lap_ahead_takes_what_is_not_there(
    ring: int, fault: str, after: Takers
) -> None:
    """A warp goes past as many stages of others as the ring has, to one that looks full."""
    plan = [WEIGHTS, *[(0,)] * ring, after, WEIGHTS]

    def found(**planted: bool) -> list[str]:
        orders = map(random.Random, range(60))
        return [each for order in orders for each in fault_of(plan, ring, 3, order, **planted)]

    assert any("in place of" in each for each in found(**{fault: False}))
    assert not found()
