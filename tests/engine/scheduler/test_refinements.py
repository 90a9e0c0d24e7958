"""Refinements among those who decode and those who wait."""

import pytest
from legato_engine.scheduler.launch import LaunchKind, Refinement

from tests.engine.scheduler.tasks import LONG_SEED
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

_, PREFILL, DECODE, REFINE = LaunchKind


def kinds(world: World) -> list[LaunchKind]:
    """What was launched, in order."""
    return [plan.kind for plan in world.runner.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_refinement_alone_is_a_launch_like_any_other(depth: int) -> None:
    """The scheduler is busy with it until it is committed, and then has its answer."""
    world = World(depth=depth)
    refinement = world.refine()
    assert not world.scheduler.idle
    world.drain()
    assert kinds(world) == [REFINE]
    assert world.refined == [0]
    assert refinement.answer == ("better", 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_alternate_with_refinements(depth: int) -> None:
    """Whoever decodes waits for one at a time, and none waits for longer than a decode."""
    world = World(depth=depth)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    for _ in range(3):
        world.refine()
    world.drain()
    assert kinds(world)[:8] == [PREFILL, DECODE, REFINE, DECODE, REFINE, DECODE, REFINE, DECODE]


def test_a_refinement_goes_before_a_prefill() -> None:
    """It ends a request; a prefill begins one."""
    world = World()
    world.submit(FakeTask(max_tokens=1))
    world.refine()
    world.drain()
    assert kinds(world) == [REFINE, PREFILL]


def test_a_refinement_holds_no_row() -> None:
    """All rows and pages may be taken by others meanwhile."""
    world = World(num_rows=1)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    world.refine()
    while REFINE not in kinds(world):
        world.step()
    assert world.scheduler.load().rows_used == 1
    world.drain()


def test_whoever_is_told_may_ask_for_the_next() -> None:
    """A refinement may begin inside the commit of another."""
    world = World()
    first = world.refine()
    told = first.done

    def done(refinement: Refinement) -> None:
        told(refinement)
        if len(world.refinements) == 1:
            world.refine()

    first.done = done
    world.drain()
    assert world.refined == [0, 1]


def test_a_picture_waits_for_its_prefill_across_a_refinement() -> None:
    """An outline refined between two groups of crops leaves the features of both alone."""
    world = World(crops_per_launch=2)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    world.submit(FakeTask(max_tokens=2), prefix_key="p", prefix_length=9, num_crops=6)
    while LaunchKind.ENCODE not in kinds(world):
        world.step()
    world.refine()
    world.drain()
    order = [kind for kind in kinds(world)[1:] if kind is not DECODE]
    encode = LaunchKind.ENCODE
    assert order == [encode, REFINE, encode, encode, PREFILL] or order == [
        encode,
        encode,
        REFINE,
        encode,
        PREFILL,
    ]
