"""Refinements among decodes and waiting requests."""

import pytest
from legato_engine.scheduler.batch import LaunchKind, Refinement

from tests.engine.scheduler.tasks import LONG_SEED
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

_, PREFILL, DECODE, REFINE = LaunchKind


def kinds(world: World) -> list[LaunchKind]:
    """Return the kinds of all launches, in order."""
    return [plan.kind for plan in world.runner.plans]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_refinement_alone_is_a_launch_like_any_other(depth: int) -> None:
    """The scheduler is not idle until the refinement is committed and has its answer."""
    world = World(depth=depth)
    refinement = world.refine()
    assert not world.scheduler.idle
    world.drain()
    assert kinds(world) == [REFINE]
    assert world.refined == [0]
    assert refinement.result == ("better", 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_alternate_with_refinements(depth: int) -> None:
    """Decodes wait for one refinement at a time, and refinements for one decode."""
    world = World(depth=depth)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    for _ in range(3):
        world.refine()
    world.drain()
    assert kinds(world)[:8] == [PREFILL, DECODE, REFINE, DECODE, REFINE, DECODE, REFINE, DECODE]


def test_a_refinement_goes_before_a_prefill() -> None:
    """A refinement ends a request, a prefill begins one."""
    world = World()
    world.submit(FakeTask(max_tokens=1))
    world.refine()
    world.drain()
    assert kinds(world) == [REFINE, PREFILL]


def test_a_refinement_needs_no_row() -> None:
    """Sequences may use all rows and pages meanwhile."""
    world = World(num_rows=1)
    world.submit(FakeTask(seed=LONG_SEED, max_tokens=14))
    world.step()
    world.refine()
    while REFINE not in kinds(world):
        world.step()
    assert world.scheduler.load().rows_used == 1
    world.drain()


def test_a_completed_refinement_may_submit_the_next() -> None:
    """A refinement may be submitted inside the commit of another."""
    world = World()
    first = world.refine()
    first_done = first.done

    def done(refinement: Refinement) -> None:
        first_done(refinement)
        if len(world.refinements) == 1:
            world.refine()

    first.done = done
    world.drain()
    assert world.refined == [0, 1]


def test_an_image_waits_for_its_prefill_across_a_refinement() -> None:
    """A refinement between two encodes of an image does not change its features."""
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
