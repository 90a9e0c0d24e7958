"""The waiting queue: order, overtaking, and that no request starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import DeadlineUnreachable, QuotaExceeded
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.sequence import Sequence

from tests.engine.scheduler.world import World
from tests.fakes import FakeTask, make_sequence


def queue_of(
    *sequences: Sequence, max_overtakes: int = 16, seconds: float = 1.0
) -> WaitingQueue[Sequence]:
    """Return a queue to which these were added in this order."""
    queue = WaitingQueue[Sequence](max_overtakes=max_overtakes, priority_seconds=seconds)
    for sequence in sequences:
        queue.add(sequence)
    return queue


def any_fits(sequence: Sequence) -> bool:
    """Let every sequence fit."""
    return True


def drained(queue: WaitingQueue[Sequence]) -> list[int]:
    """Return the order of service when every sequence fits."""
    order = []
    while (sequence := queue.first(any_fits)) is not None:
        queue.dequeue(sequence)
        order.append(sequence.seq_id)
    return order


def test_a_higher_priority_goes_first() -> None:
    """Of simultaneous requests the highest priority is first; equal ones keep their order."""
    priorities = [0, -100, 5, 0, 100, 5]
    queue = queue_of(*(make_sequence(n, priority=each) for n, each in enumerate(priorities)))
    assert drained(queue) == [4, 2, 5, 0, 3, 1]


def test_waiting_makes_up_for_priority() -> None:
    """`n` steps of priority are worth arriving `n * priority_seconds` earlier, no more."""
    low = make_sequence(0, arrival=10.0)
    sooner = make_sequence(1, arrival=14.9, priority=10)
    later = make_sequence(2, arrival=15.1, priority=10)
    assert drained(queue_of(low, sooner, later, seconds=0.5)) == [1, 0, 2]


def test_priorities_may_be_ignored() -> None:
    """With 0 seconds per step of priority the queue is first come, first served."""
    late, early = make_sequence(0, arrival=2.0, priority=100), make_sequence(1, arrival=1.0)
    assert drained(queue_of(late, early, seconds=0.0)) == [1, 0]


def test_going_first_by_priority_is_no_overtaking() -> None:
    """A request that ranks first does not overtake, and is not blocked by a later one."""
    large, small = make_sequence(0), make_sequence(1)
    urgent = make_sequence(2, priority=1)
    queue = queue_of(large, small, max_overtakes=1)

    def fits(sequence: Sequence) -> bool:
        return sequence is not large

    assert queue.first(fits) is small
    queue.dequeue(small)
    queue.add(make_sequence(3))
    assert queue.first(fits) is None, "it was overtaken once, and blocks"
    queue.add(urgent)
    assert queue.first(fits) is urgent
    queue.dequeue(urgent)
    assert queue.first(fits) is None
    assert queue.first(any_fits) is large


def test_a_removed_sequence_does_not_overtake() -> None:
    """A request aborted while it waits does not count as overtaking."""
    first, second, third = (make_sequence(n) for n in range(3))
    queue = queue_of(first, second, third, max_overtakes=1)
    queue.remove(second)
    assert queue.first(lambda sequence: sequence is third) is third


def test_a_missing_adapter_slot_blocks_only_adapters() -> None:
    """Sequences without an adapter overtake without limit; ones with an adapter are blocked."""
    lacking = [make_sequence(n, adapter="x") for n in range(3)]
    served, plain = make_sequence(3, adapter="y"), make_sequence(4)
    queue = queue_of(*lacking, served, plain, max_overtakes=1)

    def lacks_slot(sequence: Sequence) -> bool:
        return sequence.adapter.key == "x"

    assert queue.first(any_fits, lacks_slot) is served
    queue.dequeue(served)
    other = make_sequence(5, adapter="y")
    queue.add(other)
    assert queue.first(any_fits, lacks_slot) is plain, "overtaken once, adapters wait"
    queue.dequeue(plain)
    assert queue.first(any_fits, lacks_slot) is None
    queue.add(make_sequence(6))
    assert queue.first(lambda s: s is not lacking[0], lacks_slot) is not None
    assert queue.first(any_fits) is lacking[0], "a slot is free again"


def test_adapters_beyond_the_slots_take_turns() -> None:
    """More adapters than slots are all served, among requests with and without adapters."""
    world = World(num_adapter_slots=1, num_rows=3, max_overtakes=2)
    for number in range(24):
        world.submit(FakeTask(seed=1, max_tokens=6), adapter=("x", "", "y", "x")[number % 4])
    world.drain()
    started = [int(key.caller_id[1:]) for key in world.sink.started_ids]
    adapted = [number for number in started if number % 4 != 1]
    assert started != sorted(started), "no request overtook one without a slot"
    assert max(number - index for index, number in enumerate(adapted)) <= 2 * 24 // 4
    writes = [row for plan in world.runner.plans for row in plan.rows if row.work.write_adapter]
    assert len(writes) < len(adapted), "an adapter was written again although it was in its slot"


sequences = st.lists(
    st.tuples(st.integers(-100, 100), st.integers(0, 50)),
    min_size=1,
    max_size=20,
)


@given(drawn=sequences, taken=st.lists(st.integers(0, 19), max_size=20))
def test_positions_and_counts_are_those_of_a_sorted_list(
    drawn: list[tuple[int, int]], taken: list[int]
) -> None:
    """One tenant's order and positions agree with a sorted list, whatever is removed."""
    made = [
        make_sequence(n, priority=priority, arrival=float(arrival))
        for n, (priority, arrival) in enumerate(drawn)
    ]
    model: list[Sequence] = []
    queue = WaitingQueue[Sequence](max_overtakes=16, priority_seconds=1.0)

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
    assert queue.num_of("") == len(queue) == len(model)
    assert drained(queue) == [sequence.seq_id for sequence in model]


@given(
    flood=st.integers(1, 100),
    priority=st.integers(-100, 99),
    every=st.floats(0.05, 1.0),
    large=st.booleans(),
)
def test_no_request_starves(flood: int, priority: int, every: float, large: bool) -> None:
    """An endless stream of higher priorities overtakes a low one only for a limited time.

    One of them is served per arrival. The low one, even if it does not fit while others may
    overtake it, is served before all that arrive later than their priority is worth.
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
        queue.dequeue(chosen)
    raise AssertionError("the low one was never served")


def test_a_tenant_has_its_own_quota() -> None:
    """QUOTA_EXCEEDED names quota and tenant; other tenants are still admitted."""
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
    world.step()  # the first of "a" runs now
    world.submit(tenant="a")
    world.scheduler.drain()
    world.check_rest()


def test_a_deadline_is_judged_by_the_requests_ahead() -> None:
    """A high priority is not refused because of requests after it in the queue."""
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
