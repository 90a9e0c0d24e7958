"""Tenants share the queue and the rows fairly. In virtual time, so the shares are exact."""

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
from legato_engine.errors import QueueFull
from legato_engine.scheduler.queue import Admission, WaitingQueue
from legato_engine.types import CaptionTask, Request, RequestKey

from tests.engine.scheduler.tasks import long_task
from tests.engine.scheduler.world import World
from tests.fakes import FakeClock, FakeTask

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
        request = Request(request_id=key, task=CaptionTask(), priority=load.priority)
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
            self.admission.record_completion(job.seconds)
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
            request = Request(request_id=RequestKey(str(number), tenant), task=CaptionTask())
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
            request = Request(request_id=RequestKey(f"w{number}", tenant), task=CaptionTask())
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
    assert world.scheduler.position(small) <= 1
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
    assert world.scheduler.position(first[1]) == 0
    last = world.submit(long_task(), tenant="a", priority=100)
    world.submit(long_task(), tenant="b")
    assert isinstance(world.sink.ended[last.request.request_id], QueueFull)
    world.drain()
    world.check_rest()
