"""The waiting queue: who goes first, who may pass whom, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import DeadlineUnreachable, QuotaExceeded
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence

from tests.engine.scheduler.world import World
from tests.fakes import FakeTask, make_sequence


def queue_of(*sequences: Sequence, max_overtakes: int = 16, seconds: float = 1.0) -> WaitingQueue:
    """A queue to which these were added in this order."""
    queue = WaitingQueue(max_overtakes=max_overtakes, priority_seconds=seconds)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def anybody(sequence: Sequence) -> bool:
    """Everybody fits."""
    return True


def drained(queue: WaitingQueue) -> list[int]:
    """Who leaves, in order, when everybody fits."""
    order = []
    while (sequence := queue.first(anybody)) is not None:
        queue.take(sequence)
        order.append(sequence.seq_id)
    return order


def test_a_higher_priority_goes_first() -> None:
    """Of those who came together the highest priority is served first, equals as they came."""
    priorities = [0, -100, 5, 0, 100, 5]
    queue = queue_of(*(make_sequence(n, priority=each) for n, each in enumerate(priorities)))
    assert drained(queue) == [4, 2, 5, 0, 3, 1]


def test_waiting_makes_up_for_priority() -> None:
    """`n` steps of priority pass who came less than `n * priority_seconds` before, nobody older."""
    low = make_sequence(0, arrival=10.0)
    sooner = make_sequence(1, arrival=14.9, priority=10)
    later = make_sequence(2, arrival=15.1, priority=10)
    assert drained(queue_of(low, sooner, later, seconds=0.5)) == [1, 0, 2]


def test_priorities_may_be_worth_nothing() -> None:
    """With 0 seconds a step the queue is first come, first served."""
    late, early = make_sequence(0, arrival=2.0, priority=100), make_sequence(1, arrival=1.0)
    assert drained(queue_of(late, early, seconds=0.0)) == [1, 0]


def test_who_goes_ahead_by_priority_overtakes_nobody() -> None:
    """A request that ranks first is no overtaker, and one that blocks does not block it."""
    large, small = make_sequence(0), make_sequence(1)
    urgent = make_sequence(2, priority=1)
    queue = queue_of(large, small, max_overtakes=1)

    def fits(sequence: Sequence) -> bool:
        return sequence is not large

    assert queue.first(fits) is small
    queue.take(small)
    queue.add(make_sequence(3))
    assert queue.first(fits) is None, "it was overtaken once, and blocks"
    queue.add(urgent)
    assert queue.first(fits) is urgent
    queue.take(urgent)
    assert queue.first(fits) is None
    assert queue.first(anybody) is large


def test_a_removed_sequence_overtook_nobody() -> None:
    """Who is given up while it waits does not count against those before it."""
    first, second, third = (make_sequence(n) for n in range(3))
    queue = queue_of(first, second, third, max_overtakes=1)
    queue.remove(second)
    assert queue.first(lambda sequence: sequence is third) is third


def test_who_lacks_an_adapter_slot_blocks_only_adapters() -> None:
    """Those without one pass, however many and however often; those with one wait their turn."""
    lacking = [make_sequence(n, adapter="x") for n in range(3)]
    served, plain = make_sequence(3, adapter="y"), make_sequence(4)
    queue = queue_of(*lacking, served, plain, max_overtakes=1)

    def lacks_slot(sequence: Sequence) -> bool:
        return sequence.adapter.key == "x"

    assert queue.first(anybody, lacks_slot) is served
    queue.take(served)
    other = make_sequence(5, adapter="y")
    queue.add(other)
    assert queue.first(anybody, lacks_slot) is plain, "overtaken once, adapters wait"
    queue.take(plain)
    assert queue.first(anybody, lacks_slot) is None
    queue.add(make_sequence(6))
    assert queue.first(lambda s: s is not lacking[0], lacks_slot) is not None
    assert queue.first(anybody) is lacking[0], "a slot is free again"


def test_adapters_beyond_the_slots_take_turns() -> None:
    """More adapters than slots are all served, while others with and without one come and go."""
    world = World(num_adapter_slots=1, num_rows=3, max_overtakes=2)
    for number in range(24):
        world.submit(FakeTask(seed=1, max_tokens=6), adapter=("x", "", "y", "x")[number % 4])
    world.drain()
    started = [int(key.caller_id[1:]) for key in world.sink.started_ids]
    adapted = [number for number in started if number % 4 != 1]
    assert started != sorted(started), "somebody went ahead of who lacked a slot"
    assert max(number - place for place, number in enumerate(adapted)) <= 2 * 24 // 4
    writes = [row for plan in world.runner.plans for row in plan.rows if row.work.write_adapter]
    assert len(writes) < len(adapted), "an adapter that stands in its slot is not written again"


sequences = st.lists(
    st.tuples(st.integers(-100, 100), st.integers(0, 50), st.sampled_from(["", "a", "b"])),
    min_size=1,
    max_size=20,
)


@given(drawn=sequences, taken=st.lists(st.integers(0, 19), max_size=20))
def test_positions_and_counts_are_those_of_a_sorted_list(
    drawn: list[tuple[int, int, str]], taken: list[int]
) -> None:
    """Order, positions and the tenants' counts agree with a plain list, whoever leaves."""
    made = [
        make_sequence(n, priority=priority, arrival=float(arrival), tenant=tenant)
        for n, (priority, arrival, tenant) in enumerate(drawn)
    ]
    model: list[Sequence] = []
    queue = WaitingQueue(max_overtakes=16, priority_seconds=1.0)

    def rank(sequence: Sequence) -> tuple[float, int]:
        return sequence.timing.arrival - sequence.request.priority, sequence.seq_id

    for sequence in made:
        ahead = sum(rank(other) < rank(sequence) for other in model)
        assert queue.num_ahead(sequence) == ahead
        queue.add(sequence)
        model = sorted([*model, sequence], key=rank)
    for index in taken:
        if index < len(model):
            queue.remove(model.pop(index))
    assert [queue.position(sequence) for sequence in model] == list(range(len(model)))
    for tenant in ("", "a", "b"):
        assert queue.num_of(tenant) == sum(s.request.tenant == tenant for s in model)
    assert drained(queue) == [sequence.seq_id for sequence in model]


@given(
    flood=st.integers(1, 100),
    priority=st.integers(-100, 99),
    every=st.floats(0.05, 1.0),
    large=st.booleans(),
)
def test_nobody_starves(flood: int, priority: int, every: float, large: bool) -> None:
    """A stream of higher priorities that never ends passes one below only for so long.

    One of them is served whenever the next one comes. The low one, even where it does not fit while
    others may pass it, goes before all who arrive later than what their priority is worth.
    """
    flood_priority = max(flood, priority + 1)
    low = make_sequence(0, arrival=0.0, priority=priority)
    queue = queue_of(low, max_overtakes=3)
    worth = (flood_priority - priority) * 1.0
    passed_late = 0
    for number in range(1, round((worth + 10) / every) + 10):
        arrival = number * every
        queue.add(make_sequence(number, arrival=arrival, priority=flood_priority))
        chosen = queue.first(lambda sequence: not (large and sequence is low))
        if chosen is None or chosen is low:
            assert arrival >= worth - every
            assert passed_late <= 3
            return
        passed_late += chosen.timing.arrival > worth
        queue.take(chosen)
    raise AssertionError("the low one was never served")


def test_a_tenant_has_its_own_share() -> None:
    """QUOTA_EXCEEDED names the quota and the tenant; other tenants still get in."""
    world = World(max_waiting_per_tenant=2)
    for tenant in ("a", "", "a", ""):
        world.submit(tenant=tenant)
    for tenant in ("a", ""):
        with pytest.raises(QuotaExceeded) as caught:
            world.submit(tenant=tenant)
        assert caught.value.metadata == {
            "quota": "waiting_per_tenant",
            "tenant": tenant,
            "limit": "2",
            "actual": "2",
            "retry_after_ms": "1",
        }
    world.submit(tenant="b")
    world.step()  # the first of "a" runs now, and waits no more
    world.submit(tenant="a")
    world.scheduler.drain()
    world.check_rest()


def test_a_high_priority_is_not_refused_for_those_behind_it() -> None:
    """Whether a deadline can be met is judged by who goes first, not by the whole queue."""
    world = World(num_rows=1)
    world.submit(FakeTask(max_tokens=1))
    world.step()
    world.clock.advance(10)
    world.scheduler.drain()  # one request took 10 s
    for _ in range(5):
        world.submit()
    deadline = world.clock.now() + 15
    with pytest.raises(DeadlineUnreachable):
        world.submit(deadline=deadline)
    urgent = world.submit(deadline=deadline, priority=1)
    assert world.scheduler.position(urgent) == 0
