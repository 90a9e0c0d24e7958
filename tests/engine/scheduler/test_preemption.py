"""Preemption when pages run out: the victims, and that only their waiting time changes."""

import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.decode import RunningSequences, preemption_rank
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.sequence import Sequence, SequenceStatus
from legato_engine.types import FinishReason, RequestKey

from tests.engine.scheduler.tasks import LONG_SEED
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask, make_sequence

R0, R1 = RequestKey("r0"), RequestKey("r1")


def growing(world: World, *, priority: int = 0, constrained: bool = False) -> Sequence:
    """Submit a sequence that grows to 15 positions, four pages."""
    task = FakeTask(seed=LONG_SEED, max_tokens=14, constrained=constrained)
    return world.submit(task, priority=priority)


def preempted(world: World) -> list[Sequence]:
    """Return the sequences that were preempted at least once."""
    return [sequence for sequence in world.sequences if sequence.pages.num_preemptions]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("constrained", [False, True])
def test_the_newest_is_preempted_and_loses_no_token(depth: int, constrained: bool) -> None:
    """It starts once, reads every token once and in order, and ends as it would alone."""
    world = World(depth=depth, num_pages=7)
    both = [growing(world, constrained=constrained) for _ in range(2)]
    world.drain()
    assert preempted(world) == [both[1]]
    assert world.sink.started_ids == [R0, R1]
    for sequence in both:
        assert isinstance(sequence.task, FakeTask)
        assert world.tokens(sequence) == sequence.task.expected_tokens(sequence.prompt_length)
        assert world.sink.ended[sequence.request.request_id] is FinishReason.LENGTH


def test_priority_goes_before_age() -> None:
    """An older sequence is preempted for a newer one of higher priority."""
    world = World(num_pages=7)
    old, important = growing(world), growing(world, priority=3)
    world.drain()
    assert preempted(world) == [old]
    assert list(world.sink.ended) == [important.request.request_id, old.request.request_id]


def test_the_highest_rank_is_never_preempted() -> None:
    """The highest-ranked sequence runs to its end, however many compete for pages."""
    world = World(num_pages=7, num_rows=4)
    first, *others = [growing(world) for _ in range(6)]
    world.drain()
    assert not first.pages.num_preemptions
    assert preempted(world)
    assert next(iter(world.sink.ended)) == first.request.request_id
    assert all(sequence.finalized for sequence in others)


def test_a_victim_in_flight_waits_for_its_commits() -> None:
    """While a launch names it, it keeps row and pages and commits its token; then it waits."""
    world = World(num_pages=7)
    first, second = growing(world), growing(world)
    seen: list[tuple[int, int, int]] = []

    def on_delta(sequence: Sequence) -> None:
        if second.preempted and sequence is first:
            seen.append((second.row, second.inflight_refs, second.progress.num_launched))

    world.sink.on_delta = on_delta
    while not second.pages.num_preemptions:
        world.step()
    ((row, refs, launched),) = seen
    assert row >= 0
    assert refs == 1
    assert (second.status, second.preempted, second.row) == (SequenceStatus.WAITING, False, -1)
    assert second.num_committed == second.progress.num_launched == launched
    assert not first.finalized
    world.drain()


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_preempted_request_may_be_aborted_or_stopped(stops: bool, waits: bool) -> None:
    """While its last launch is in flight, or while it waits: it ends once, with its tokens."""
    world = World(num_pages=7)
    first, second = growing(world), growing(world)
    give_up = world.scheduler.stop if stops else world.scheduler.abort
    committed: list[int] = []

    def on_delta(sequence: Sequence) -> None:
        if not second.finalized and (second.pages.num_preemptions if waits else second.preempted):
            committed.extend(world.tokens(second))
            if not stops:
                world.aborted.add(second.request.request_id)
            give_up(second.request.request_id)

    world.sink.on_delta = on_delta
    world.drain()
    assert second.finalized
    assert world.tokens(second) == committed != []
    assert world.tokens(first) == FakeTask(seed=LONG_SEED, max_tokens=14).expected_tokens(2)
    assert world.sink.started_ids == [R0, R1]
    expected = FinishReason.CANCELLED if stops else None
    assert world.sink.ended.get(second.request.request_id) is expected


def test_an_image_is_computed_again_after_a_preemption() -> None:
    """Its prefix may be evicted while it waits; it is encoded again from the host's copy."""
    world = World(num_pages=12, crops_per_launch=2)
    first = world.submit(FakeTask(seed=LONG_SEED, max_tokens=14), priority=1)
    image = world.submit(
        FakeTask(seed=LONG_SEED, max_tokens=14), prefix_key="p", prefix_length=9, num_crops=5
    )
    big = world.submit(FakeTask(seed=LONG_SEED, num_prompt=8, max_tokens=14), priority=2)
    world.drain()
    assert image.pages.num_preemptions
    assert not big.pages.num_preemptions
    computed = [
        plan
        for plan in world.runner.plans
        for row in plan.rows
        if row.sequence is image and row.work.compute_pages and row.num_tokens
    ]
    assert len(computed) == 2
    assert first.finalized
    assert world.tokens(image) == FakeTask(seed=LONG_SEED, max_tokens=14).expected_tokens(10)


def test_a_sequence_without_a_lower_ranked_victim_stalls() -> None:
    """The lowest-ranked sequence keeps its pages and waits until another one ends."""
    queue = WaitingQueue[Sequence](max_overtakes=0, priority_seconds=1.0)
    manager = KVCacheManager(3, 4, 2)
    members = RunningSequences(manager, queue)
    both = [make_sequence(n, FakeTask(num_prompt=2)) for n in range(2)]
    for sequence in both:
        manager.admit(sequence)
        sequence.progress.last_position = sequence.length
        manager.mark_launched(sequence)
        members.add(sequence)
    assert preemption_rank(both[1]) < preemption_rank(both[0])
    members.grow([both[1]])
    assert (both[1].pages.capacity, list(members), len(queue)) == (4, both, 0)
    members.grow([both[0]])
    assert (both[0].pages.capacity, list(members), len(queue)) == (8, both[:1], 1)
    manager.check()
