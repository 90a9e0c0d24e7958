"""The waiting queue: admission, order, overtaking, fair shares and the wait estimate."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legato_engine.errors import (
    DeadlineUnreachable,
    InvalidField,
    PromptTooLong,
    QueueFull,
    QuotaExceeded,
)
from legato_engine.scheduler.queue import Admission, WaitEstimate, WaitingQueue
from legato_engine.sequence import Sequence
from legato_engine.types import CaptionSpec, Request, RequestKey

from tests.engine.scheduler.world import World, long_task
from tests.fakes import FakeClock, FakeTask, make_sequence

# ---------------------------------------------------------------- waiting queue
# The waiting queue: order, overtaking, and that no request starves.


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
    assert world.scheduler.queue.position(urgent) == 0


# ---------------------------------------------------------------- admission


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    """The error names the limit and the actual length."""
    world = World(num_pages=5)
    with pytest.raises(PromptTooLong) as caught:
        world.submit(FakeTask(num_prompt=10, max_tokens=7))
    assert caught.value.metadata == {"limit": "16", "actual": "17"}
    assert world.scheduler.idle


def test_a_full_queue_refuses() -> None:
    """The error says when to retry."""
    world = World(max_waiting=2)
    world.submit(long_task())
    world.submit(long_task())
    with pytest.raises(QueueFull) as caught:
        world.submit(long_task())
    assert caught.value.metadata == {"limit": "2", "retry_after_ms": "1"}
    world.steps(1)
    world.submit(long_task())
    world.scheduler.drain()
    world.check_rest()


def test_a_request_id_is_live_once() -> None:
    """An id cannot be submitted again while its request is live."""
    world = World()
    sequence = world.submit(long_task())
    with pytest.raises(InvalidField):
        world.scheduler.submit(sequence)


def test_the_wait_is_estimated_from_completions() -> None:
    """A deadline is refused only after a service time is known, and if it cannot be met."""
    world = World(num_rows=1)
    world.submit(long_task(max_tokens=2), deadline=world.clock.now() + 60.0)
    world.scheduler.step()
    assert world.scheduler.admission.estimated_wait() == 0.0
    world.clock.advance(4.0)
    world.scheduler.drain()
    assert world.scheduler.admission.estimated_wait() == 0.0  # the row is free
    world.submit(long_task())  # will take the row
    assert world.scheduler.admission.estimated_wait() == pytest.approx(4.0)
    with pytest.raises(DeadlineUnreachable) as caught:
        world.submit(long_task(), deadline=world.clock.now() + 3.9)
    assert caught.value.metadata == {"estimated_wait_ms": "4000"}
    world.submit(long_task(), deadline=world.clock.now() + 4.1)
    world.scheduler.drain()
    world.check_rest()


# ---------------------------------------------------------------- wait estimate


def test_nothing_is_predicted_before_a_completion() -> None:
    """Without a measured service time there is no estimate."""
    assert WaitEstimate().predict(waiting=100, rows_free=0, num_rows=4) is None


def test_a_free_row_means_no_wait() -> None:
    """Requests do not wait while there is a row for each."""
    estimate = WaitEstimate()
    estimate.record_completion(2.0)
    assert estimate.predict(waiting=0, rows_free=1, num_rows=4) == 0.0
    assert estimate.predict(waiting=3, rows_free=4, num_rows=4) == 0.0


def test_the_wait_grows_with_the_queue() -> None:
    """With all rows busy one request ends every `service / rows` seconds."""
    estimate = WaitEstimate()
    estimate.record_completion(2.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=4) == pytest.approx(0.5)
    assert estimate.predict(waiting=7, rows_free=0, num_rows=4) == pytest.approx(4.0)


def test_the_average_follows_slowly() -> None:
    """One outlier moves the estimate a little, many move it all the way."""
    estimate = WaitEstimate()
    estimate.record_completion(1.0)
    estimate.record_completion(11.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=1) == pytest.approx(2.0)
    for _ in range(100):
        estimate.record_completion(11.0)
    assert estimate.predict(waiting=0, rows_free=0, num_rows=1) == pytest.approx(11.0, rel=0.01)


def test_free_rows_do_not_help_while_prompts_wait_for_each_other() -> None:
    """Two requests start in each 0.4 s although most rows are free: the sixth waits 1 s."""
    estimate = WaitEstimate()
    estimate.record_completion(0.5)
    for launch in range(4):
        estimate.record_start(2, waiting=10 - 2 * launch, now=0.4 * launch)
    assert estimate.predict(waiting=5, rows_free=14, num_rows=16) == pytest.approx(1.0)


def test_time_without_a_queue_is_not_between_starts() -> None:
    estimate = WaitEstimate()
    estimate.record_completion(0.1)
    estimate.record_start(1, waiting=0, now=0.0)
    estimate.record_start(1, waiting=1, now=60.0)
    estimate.record_start(1, waiting=0, now=60.2)
    assert estimate.predict(waiting=2, rows_free=8, num_rows=8) == pytest.approx(0.4)


# ---------------------------------------------------------------- fairness
# Tenants share the queue and the rows fairly. In virtual time, so the shares are exact.

SEEDS = (0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4)))


@dataclasses.dataclass(eq=False)
class Job:
    """A request that takes `seconds` and claims `claimed` times as much."""

    request: Request
    arrival: float
    seconds: float
    claimed: float = 1.0
    start: float = 0.0
    adapter_key: str = ""
    was_started: bool = False

    @property
    def max_cost(self) -> int:
        """A unit is a millisecond."""
        return round(self.seconds * self.claimed * 1000)

    @property
    def cost(self) -> int:
        """What it costs once it has ended."""
        return round(self.seconds * 1000)


@dataclasses.dataclass(frozen=True)
class Load:
    """Arrivals of a tenant, `every` seconds in the mean."""

    tenant: str
    every: float
    seconds: float = 0.1
    claimed: float = 1.0
    priority: int = 0


class Served:
    """Rows and a queue in virtual time."""

    def __init__(self, num_rows: int, max_waiting: int = 256) -> None:
        self.num_rows = num_rows
        self.clock = FakeClock()
        self.queue = WaitingQueue[Job](max_overtakes=16, priority_seconds=1.0)
        self.admission = Admission(
            self.clock,
            self.queue,
            num_rows=num_rows,
            rows_free=lambda: self.rows_free,
            max_waiting=max_waiting,
            max_waiting_per_tenant=0,
        )
        self.running: list[tuple[float, int, Job]] = []
        self.ended: list[Job] = []
        self.refused: Counter[str] = Counter()
        self._numbers = itertools.count()

    @property
    def rows_free(self) -> int:
        """How many more may run."""
        return self.num_rows - len(self.running)

    def arrive(self, load: Load) -> None:
        """Queue a request of this load, or refuse it or another one."""
        now = self.clock.now()
        key = RequestKey(str(next(self._numbers)), load.tenant)
        request = Request(request_id=key, task=CaptionSpec(), priority=load.priority)
        try:
            displaced = self.admission.choose_displaced(load.tenant, load.priority, now)
        except QueueFull:
            self.refused[load.tenant] += 1
            return
        if displaced is not None:
            assert isinstance(displaced, Job)
            self.queue.remove(displaced)
            self.refused[displaced.request.tenant] += 1
        self.queue.add(Job(request, now, load.seconds, load.claimed))
        self._fill()

    def _fill(self) -> None:
        while self.rows_free and (job := self.queue.first(lambda _: True)) is not None:
            self.queue.dequeue(job)
            job.start = self.clock.now()
            heapq.heappush(self.running, (job.start + job.seconds, next(self._numbers), job))

    def run_until(self, moment: float) -> None:
        """End what ends by then."""
        while self.running and self.running[0][0] <= moment:
            end, _, job = heapq.heappop(self.running)
            self.clock.advance(end - self.clock.now())
            self.queue.refund(job)
            self.admission.wait.record_completion(job.seconds)
            self.ended.append(job)
            self._fill()
        self.clock.advance(moment - self.clock.now())

    def serve(self, loads: Iterable[Load], seconds: float, seed: int = 0) -> None:
        """Serve Poisson arrivals for so long."""
        source = random.Random(seed)
        arrivals = []
        for load in loads:
            moment = source.expovariate(1 / load.every)
            while moment < seconds:
                arrivals.append((moment, load))
                moment += source.expovariate(1 / load.every)
        for moment, load in sorted(arrivals, key=lambda each: each[0]):
            self.run_until(moment)
            self.arrive(load)
        self.run_until(seconds)

    def seconds_of(self, since: float = 0.0) -> dict[str, float]:
        """Row seconds by tenant, of requests that ended later."""
        total: dict[str, float] = defaultdict(float)
        for job in self.ended:
            if job.start >= since:
                total[job.request.tenant] += job.seconds
        return total


@pytest.mark.parametrize("seed", SEEDS)
def test_tenants_of_equal_demand_get_equal_shares_of_the_cost(seed: int) -> None:
    """Three tenants in overload, with requests of different costs and claims: shares within 5 %."""
    served = Served(num_rows=8)
    loads = [
        Load("cheap", every=0.002, seconds=0.05),
        Load("costly", every=0.01, seconds=0.5),
        Load("claims", every=0.004, seconds=0.1, claimed=8.0),
    ]
    served.serve(loads, 40.0, seed)
    for since in (10.0, 20.0, 30.0):
        window = [j for j in served.ended if since <= j.start < since + 10.0]
        shares = Counter[str]()
        for job in window:
            shares[job.request.tenant] += job.cost
        fair = sum(shares.values()) / 3
        for tenant, share in shares.items():
            assert abs(share / fair - 1) < 0.05, (since, tenant, share / fair)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_of_a_tenth_keeps_it_when_another_floods(seed: int) -> None:
    """80 a second are the capacity; one asks for 8, the other for 800: 95 % of the 8 are served.

    The queue holds 256, so without shares a request would wait for 3 s and mostly be refused.
    """
    served = Served(num_rows=8)
    served.serve([Load("greedy", every=1 / 800), Load("small", every=1 / 8)], 60.0, seed)
    small = [job for job in served.ended if job.request.tenant == "small"]
    asked = len(small) + served.refused["small"]
    assert asked > 400
    assert len(small) >= 0.95 * asked
    assert max(job.start - job.arrival for job in small) < 1.0
    assert len(served.ended) >= 0.95 * 60 * 80, "no capacity is lost"


def test_what_a_tenant_used_while_others_were_idle_is_not_held_against_it() -> None:
    """A tenant that had the rows alone shares equally with one that comes later."""
    served = Served(num_rows=4)
    served.serve([Load("first", every=0.005)], 20.0)
    start = served.clock.now()
    for _ in range(4000):
        for tenant in ("first", "second"):
            served.arrive(Load(tenant, every=0.0))
        served.run_until(served.clock.now() + 0.005)
    seconds = served.seconds_of(start + 1.0)
    assert seconds["first"] == pytest.approx(seconds["second"], rel=0.05)


def test_a_tenant_cannot_save_up_service() -> None:
    """One that comes back after long idleness does not get the rows for itself."""
    served = Served(num_rows=4)
    served.arrive(Load("idle", every=0.0))
    served.serve([Load("busy", every=0.005)], 20.0)
    start = served.clock.now()
    for _ in range(400):
        for tenant in ("busy", "idle"):
            served.arrive(Load(tenant, every=0.0))
        served.run_until(served.clock.now() + 0.005)
    seconds = served.seconds_of(start)
    assert seconds["idle"] < 0.6 * sum(seconds.values())


def test_a_higher_priority_goes_before_other_tenants_but_does_not_starve_them() -> None:
    """A flood of priority 5 delays another tenant by about 5 s per request, no more."""
    served = Served(num_rows=2)
    loads = [Load("urgent", every=0.01, priority=5), Load("patient", every=1.0)]
    served.serve(loads, 60.0)
    patient = [job for job in served.ended if job.request.tenant == "patient"]
    starts = [job.start for job in patient]
    assert starts, "a lower priority starves"
    gaps = [b - a for a, b in itertools.pairwise([0.0, *starts, 60.0])]
    assert max(gaps) < 7.5
    assert len(patient) < 20, "a priority counts for nothing"


@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(
        st.tuples(
            st.sampled_from(["", "a", "b", "c"]),
            st.integers(-20, 20),
            st.floats(0.01, 1.0),
            st.booleans(),
        ),
        min_size=1,
        max_size=60,
    ),
    max_waiting=st.integers(1, 12),
)
def test_every_request_is_served_or_told(
    drawn: list[tuple[str, int, float, bool]], max_waiting: int
) -> None:
    """Whatever arrives: nothing is lost, positions agree with the service, and nothing is kept."""
    served = Served(num_rows=2, max_waiting=max_waiting)
    for tenant, priority, seconds, then_wait in drawn:
        served.arrive(Load(tenant, every=0.0, seconds=seconds, priority=priority))
        assert len(served.queue) <= max_waiting
        entries = [entry.item for entry in served.queue._ordered()]
        assert [served.queue.position(item) for item in entries] == list(range(len(entries)))
        assert served.queue.num_by_tenant() == Counter(i.request.tenant for i in entries)
        if then_wait:
            served.run_until(served.clock.now() + 0.1)
    served.run_until(1e6)
    assert len(served.ended) + sum(served.refused.values()) == len(drawn)
    assert not served.queue._tenants, "a tenant is kept although nothing waits or runs"


# ---------------------------------------------------------------- a full queue


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.integers(0, 3)), max_size=40)
)
def test_a_request_that_starts_at_once_is_charged_as_one_that_waited(
    arrivals: list[tuple[str, int, int]],
) -> None:
    """`serve` leaves a queue that treats all that follows as after `add` and `take`."""
    orders = []
    for starts in (False, True):
        queue = WaitingQueue[Job](max_overtakes=0, priority_seconds=1.0)
        running: list[Job] = []
        for number, (tenant, units, ended) in enumerate(arrivals):
            request = Request(request_id=RequestKey(str(number), tenant), task=CaptionSpec())
            job = Job(request, float(number), units / 10, claimed=2.0)
            if starts:
                queue.serve(job)
            else:
                queue.add(job)
                queue.dequeue(job)
            running.append(job)
            for each in running[:ended]:
                queue.refund(each)
            del running[:ended]
        for number, tenant in enumerate("cbacba"):
            request = Request(request_id=RequestKey(f"w{number}", tenant), task=CaptionSpec())
            queue.add(Job(request, 100.0, 0.1))
        order = []
        while (served := queue.first(lambda _: True)) is not None:
            queue.dequeue(served)
            order.append(served.request.request_id)
        orders.append(order)
    assert orders[0] == orders[1]


def test_a_full_queue_gives_up_a_greedy_tenants_last_request() -> None:
    """It fails with QueueFull and the time to retry; the greedy tenant cannot take the place back.

    The request of the tenant with fewer waiting is next but one.
    """
    world = World(num_rows=1, max_waiting=4)
    greedy = [world.submit(long_task(), tenant="greedy") for _ in range(4)]
    small = world.submit(FakeTask(), tenant="small")
    assert isinstance(world.sink.ended[greedy[3].request.request_id], QueueFull)
    assert world.scheduler.queue.position(small) <= 1
    with pytest.raises(QueueFull):
        world.submit(long_task(), tenant="greedy")
    second = world.submit(FakeTask(), tenant="small")
    with pytest.raises(QueueFull):  # 2 and 2 wait
        world.submit(FakeTask(), tenant="small")
    world.drain()
    world.check_rest()
    assert second.finalized


def test_a_full_queue_gives_up_a_lower_priority() -> None:
    """Of one tenant a higher priority displaces the request that would be served last."""
    world = World(num_rows=1, max_waiting=2)
    low = world.submit(long_task(), priority=-5)
    world.submit(long_task())
    with pytest.raises(QueueFull):
        world.submit(long_task(), priority=-5)
    world.submit(long_task(), priority=100)
    assert isinstance(world.sink.ended[low.request.request_id], QueueFull)
    world.drain()
    world.check_rest()


def test_the_flood_of_a_high_priority_does_not_take_a_small_tenants_places() -> None:
    """A tenant with fewer requests keeps them, whatever the priority of the others'."""
    world = World(num_rows=1, max_waiting=4)
    for _ in range(3):
        world.submit(long_task(), tenant="greedy")
    small = world.submit(long_task(), tenant="small")
    for _ in range(8):
        try:
            world.submit(long_task(), tenant="greedy", priority=100)
        except QueueFull:
            break
    assert not small.finalized
    world.drain()
    world.check_rest()


def test_a_request_that_has_started_keeps_its_place() -> None:
    """A preempted request waits again, and is not given up for another tenant's."""
    world = World(num_pages=7, num_rows=2, max_waiting=2)
    first = [world.submit(long_task(), tenant="a") for _ in range(2)]
    while not first[1].pages.num_preemptions:
        world.step()
    assert world.scheduler.queue.position(first[1]) == 0
    last = world.submit(long_task(), tenant="a", priority=100)
    world.submit(long_task(), tenant="b")
    assert isinstance(world.sink.ended[last.request.request_id], QueueFull)
    world.drain()
    world.check_rest()
