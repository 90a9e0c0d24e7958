"""Waiting requests: admission, fair queueing by tenant, estimated wait."""

from __future__ import annotations

import dataclasses
import heapq
import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from legato_engine.errors import DeadlineUnreachable, QueueFull, QuotaExceeded
from legato_engine.scheduler.interfaces import Clock
from legato_engine.types import Request

SMOOTHING = 0.1
"""Weight of the newest value in the moving averages."""


class WaitEstimate:
    """Estimate of waits by moving averages of service times and of the time between starts.

    Either rows or prefills are the bottleneck: a request waits for a row, or for the prompts and
    images that are computed before its own while rows are free.
    """

    def __init__(self) -> None:
        self._service: float | None = None  # seconds; None until a request has completed
        self._interval: float | None = None  # seconds between starts while requests wait
        self._last_start: float | None = None  # None: nothing waited after it

    def record_completion(self, seconds: float) -> None:
        """Add the seconds from prefill to end."""
        self._service = _smoothed(self._service, seconds)

    def record_start(self, count: int, waiting: int, now: float) -> None:
        """Add a launch that starts `count` requests while `waiting` others remain."""
        if self._last_start is not None:
            self._interval = _smoothed(self._interval, (now - self._last_start) / count)
        self._last_start = now if waiting else None

    def predict(self, waiting: int, rows_free: int, num_rows: int) -> float | None:
        """Return the seconds until one more request would start, None while unknown.

        One of `num_rows` parallel requests ends every `service / num_rows` seconds. A shortage of
        pages shows only in the time between starts.
        """
        if self._service is None:
            return None
        for_row = max(0, waiting + 1 - rows_free) * self._service / num_rows
        return max(for_row, waiting * (self._interval or 0.0))


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + SMOOTHING * (value - mean)


# ---------------------------------------------------------------- waiting queue


class Waiting(Protocol):
    """A request that can wait."""

    @property
    def request(self) -> Request: ...

    @property
    def arrival(self) -> float:
        """Return monotonic seconds."""

    @property
    def adapter_key(self) -> str:
        """Return the adapter's key, empty without one."""

    @property
    def max_cost(self) -> int:
        """Return the maximum positions to compute, of prompt and output."""

    @property
    def cost(self) -> int:
        """Return the positions computed so far, if it has run."""

    @property
    def was_started(self) -> bool:
        """Return whether its caller saw it start; it waits again after a preemption."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


@dataclasses.dataclass(slots=True, eq=False)
class _Entry(Generic[WaitingT]):
    item: WaitingT
    rank: tuple[float, int]  # ascending order of service within the tenant; unique
    num_overtaken: int = 0  # times that a later one was served


_MAX_TENANTS = 4096
"""Idle tenants beyond this number are forgotten with their charges."""

_RANK = attrgetter("rank")
_Key = tuple[float, float, tuple[float, int]]


@dataclasses.dataclass(slots=True, eq=False)
class _Tenant(Generic[WaitingT]):
    """Waiting requests of a tenant, and the cost of the requests it was served."""

    served: float
    turn: float = 0.0  # when it was last served
    entries: list[_Entry[WaitingT]] = dataclasses.field(default_factory=list)  # by rank
    num_charged: int = 0  # dequeued and not refunded


class WaitingQueue(Generic[WaitingT]):
    """Ordered by priority, then fairly by tenant, with bounded overtaking.

    Of one tenant's requests, one step of priority counts as much as arriving `priority_seconds`
    earlier. So these ranks never change, and low priorities do not starve.

    Among tenants, the highest priority is next; of equal ones, the tenant that was served the least
    cost. `dequeue` charges the maximum cost, and `refund` returns what was not used. A tenant gets
    no credit for time without waiting requests. For each `priority_seconds` that a
    tenant has waited for its turn its priority rises by one, up to the highest that waits.

    A request that does not fit may be bypassed `max_overtakes` times; then it blocks all later
    ones. A search skips at most `max_overtakes` requests.

    Requests waiting for an adapter slot may be bypassed freely by requests without an adapter,
    which occupy no slots; they do not count as skipped.
    """

    def __init__(self, *, max_overtakes: int, priority_seconds: float) -> None:
        assert max_overtakes >= 0, f"{max_overtakes} overtakes"
        assert priority_seconds >= 0, f"{priority_seconds} seconds"
        self._max_overtakes = max_overtakes
        self._priority_seconds = priority_seconds
        self._tenants: dict[str, _Tenant[WaitingT]] = {}
        self._waiting: dict[str, _Tenant[WaitingT]] = {}  # those with entries
        self._charged: dict[WaitingT, int] = {}  # cost of requests dequeued and not refunded
        self._num_waiting = 0
        self._least_served = 0.0  # of the waiting tenants, at the last `dequeue`
        self._now = 0.0  # the latest arrival
        self._added = count()

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, item: WaitingT) -> None:
        name = item.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.entries:
            tenant = self._waiting[name] = self._joining(name)
        insort(tenant.entries, _Entry(item, (self._rank(item), next(self._added))), key=_RANK)
        self._now = max(self._now, item.arrival)
        self._num_waiting += 1

    def remove(self, item: WaitingT) -> None:
        """Remove a request that will not be served."""
        self._pop(item)
        self._forget(item.request.tenant)

    def first(
        self,
        fits: Callable[[WaitingT], bool],
        lacks_slot: Callable[[WaitingT], bool] = lambda item: False,
    ) -> WaitingT | None:
        num_skipped, slots_blocked = 0, False
        for entry in self._ordered():
            item = entry.item
            blocks = entry.num_overtaken >= self._max_overtakes
            if lacks_slot(item):
                slots_blocked = slots_blocked or blocks
            elif slots_blocked and item.adapter_key:
                continue
            elif fits(item):
                return item
            elif blocks or num_skipped == self._max_overtakes:
                return None
            else:
                num_skipped += 1
        return None

    def serve(self, item: WaitingT) -> None:
        """Charge a request that starts at once, as `add` and `dequeue` would.

        The queue must be empty.
        """
        assert not self._num_waiting, "it would overtake waiting requests"
        self._now = max(self._now, item.arrival)
        tenant = self._joining(item.request.tenant)
        self._least_served = tenant.served
        self._charge(item, tenant)

    def dequeue(self, item: WaitingT) -> None:
        """Remove a request to serve it; it overtakes all before it."""
        for entry in self._ordered():
            if entry.item is item:
                break
            entry.num_overtaken += 1
        least = min([tenant.served for tenant in self._waiting.values()])
        self._least_served = max(self._least_served, least)
        self._charge(item, self._pop(item))

    def refund(self, item: WaitingT) -> None:
        """Refund an ended request's unused cost; ignore a request that was not dequeued."""
        charged = self._charged.pop(item, None)
        if charged is None:
            return
        name = item.request.tenant
        tenant = self._tenants[name]
        tenant.served += item.cost - charged
        tenant.num_charged -= 1
        self._forget(name)

    # ------------------------------------------------------------ positions and counts

    def position(self, item: WaitingT) -> int:
        if len(self._waiting) == 1:
            return self._index(self._waiting[item.request.tenant], item)
        return next(index for index, entry in enumerate(self._ordered()) if entry.item is item)

    def num_ahead(self, item: WaitingT) -> int:
        """Estimate how many requests would precede one that is not queued yet.

        Assumes equal costs: each other tenant has as many turns as the request's own tenant.
        """
        tenant = self._waiting.get(item.request.tenant)
        own = 0
        if tenant is not None:
            own = bisect_right(tenant.entries, (self._rank(item), math.inf), key=_RANK)
        others = [each for each in self._waiting.values() if each is not tenant]
        return own + sum([min(len(each.entries), own + 1) for each in others])

    def num_of(self, tenant: str) -> int:
        waiting = self._waiting.get(tenant)
        return 0 if waiting is None else len(waiting.entries)

    def num_by_tenant(self) -> Counter[str]:
        return Counter({name: len(each.entries) for name, each in self._waiting.items()})

    # ------------------------------------------------------------ a full queue

    def last_of(self, tenant: str) -> WaitingT | None:
        """Return the tenant's last request that has not started."""
        waiting = self._waiting.get(tenant)
        entries = waiting.entries if waiting is not None else []
        return next((each.item for each in reversed(entries) if not each.item.was_started), None)

    def last_below(
        self, tenant: str, priority: int, arrival: float, counts: Mapping[str, int]
    ) -> WaitingT | None:
        """Return the last request, if one of this priority and arrival would precede it.

        Tenants with fewer requests than `tenant` are spared.
        """
        own = counts.get(tenant, 0)
        tenants = (name for name in self._waiting if counts.get(name, 0) >= own)
        found = [item for name in tenants if (item := self.last_of(name)) is not None]
        last = max(found, key=self._rank, default=None)
        rank = arrival - priority * self._priority_seconds
        return last if last is not None and self._rank(last) > rank else None

    # ------------------------------------------------------------ order

    def _ordered(self) -> Iterable[_Entry[WaitingT]]:
        """Return the order of service if every request fits and no other arrives."""
        tenants = list(self._waiting.values())
        return tenants[0].entries if len(tenants) == 1 else self._interleave(tenants)

    def _interleave(self, tenants: Sequence[_Tenant[WaitingT]]) -> Iterator[_Entry[WaitingT]]:
        priorities = [_priorities(tenant.entries) for tenant in tenants]
        highest = max((each[0] for each in priorities), default=0)

        def key(number: int, index: int, served: float, turn: float) -> _Key:
            entry, priority = tenants[number].entries[index], priorities[number][index]
            aged = self._aged(priority, max(turn, entry.item.arrival), highest)
            return -aged, served, entry.rank

        heap = [(key(n, 0, each.served, each.turn), n, 0) for n, each in enumerate(tenants)]
        heapq.heapify(heap)
        while heap:
            (_, served, _), number, index = heap[0]
            entries = tenants[number].entries
            yield entries[index]
            if index + 1 == len(entries):
                heapq.heappop(heap)
                continue
            item = entries[index].item
            served += 0 if item in self._charged else item.max_cost
            next_key = key(number, index + 1, served, self._now)
            heapq.heapreplace(heap, (next_key, number, index + 1))

    def _aged(self, priority: int, since: float, highest: int) -> float:
        if not self._priority_seconds:
            return 0.0
        return min(highest, priority + max(0.0, self._now - since) // self._priority_seconds)

    def _rank(self, item: WaitingT) -> float:
        return item.arrival - item.request.priority * self._priority_seconds

    def _index(self, tenant: _Tenant[WaitingT], item: WaitingT) -> int:
        index = bisect_right(tenant.entries, (self._rank(item), -1), key=_RANK)
        while tenant.entries[index].item is not item:
            index += 1
        return index

    def _joining(self, name: str) -> _Tenant[WaitingT]:
        """Return a tenant without waiting requests; it gets no credit for that time."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._least_served)
        elif tenant.served < self._least_served:
            tenant.served = self._least_served
        return tenant

    def _charge(self, item: WaitingT, tenant: _Tenant[WaitingT]) -> None:
        tenant.turn = self._now
        if item not in self._charged:
            cost = self._charged[item] = item.max_cost
            tenant.served += cost
            tenant.num_charged += 1

    def _pop(self, item: WaitingT) -> _Tenant[WaitingT]:
        name = item.request.tenant
        tenant = self._waiting[name]
        del tenant.entries[self._index(tenant, item)]
        self._num_waiting -= 1
        if not tenant.entries:
            del self._waiting[name]
        return tenant

    def _forget(self, name: str) -> None:
        """Forget an idle tenant without excess charges, and all when nothing waits or runs."""
        if not (self._num_waiting or self._charged):
            self._tenants.clear()
            self._least_served = 0.0
            return
        tenant = self._tenants.get(name)
        if tenant is not None and _is_idle(tenant) and tenant.served <= self._least_served:
            del self._tenants[name]
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants = {k: each for k, each in self._tenants.items() if not _is_idle(each)}


def _is_idle(tenant: _Tenant[WaitingT]) -> bool:
    return not (tenant.entries or tenant.num_charged)


def _priorities(entries: Sequence[_Entry[WaitingT]]) -> list[int]:
    """Return each entry's priority, raised to that of entries waiting for it."""
    backwards = (each.item.request.priority for each in reversed(entries))
    return list(accumulate(backwards, max))[::-1]


# ---------------------------------------------------------------- admission


@dataclasses.dataclass(slots=True, eq=False)
class Admission(Generic[WaitingT]):
    """Admission control: refuses requests that exceed the queue or cannot start in time.

    A full queue displaces a request for one of a tenant with fewer requests or of a higher
    priority, but never a request that has started.
    """

    clock: Clock
    queue: WaitingQueue[WaitingT]
    num_rows: int
    rows_free: Callable[[], int]
    max_waiting: int
    max_waiting_per_tenant: int  # 0: no limit
    wait: WaitEstimate = dataclasses.field(default_factory=WaitEstimate, init=False)

    def choose_displaced(
        self, tenant: str, priority: int, arrival: float, preparing: Collection[str] = ()
    ) -> WaitingT | str | None:
        """Choose what must end so that the queue accepts another request; None if there is room.

        That is a waiting request or, if the requests in preparation fill the queue, the tenant of
        one of them. `preparing` are their tenants.

        Raises:
            QueueFull: `max_waiting` requests wait or are prepared, none of which may be displaced.
            QuotaExceeded: `max_waiting_per_tenant` of them are the tenant's.
        """
        queue = self.queue
        if self.max_waiting_per_tenant:
            self._check_quota(tenant, queue.num_of(tenant) + list(preparing).count(tenant))
        if len(queue) + len(preparing) < self.max_waiting:
            return None
        counts = queue.num_by_tenant() + Counter(preparing)
        largest = max(counts, key=counts.__getitem__, default=tenant)
        if counts[largest] > counts[tenant] + 1:  # it should give up a request for `tenant`
            displaced = queue.last_of(largest)
            if displaced is not None or largest in preparing:
                return displaced or largest
        lower = queue.last_below(tenant, priority, arrival, counts)
        if lower is None:
            raise self.queue_full("the waiting queue is full")
        return lower

    def queue_full(self, message: str) -> QueueFull:
        return QueueFull(message, limit=self.max_waiting, retry_after_ms=self._retry_after_ms())

    def displaced_error(self) -> QueueFull:
        return self.queue_full("the waiting queue is full, and another request has a better claim")

    def check_deadline(self, item: WaitingT) -> None:
        """Check that a request that is not queued yet may start in time.

        Raises:
            DeadlineUnreachable: the predicted wait is longer than the time left.
        """
        deadline = item.request.deadline
        if deadline is None:
            return
        wait = self._predict_wait(self.queue.num_ahead(item))
        if wait is not None and wait > deadline - self.clock.now():
            raise DeadlineUnreachable(
                "the predicted wait is longer than the time left",
                estimated_wait_ms=round(wait * 1000),
            )

    def record_start(self, count: int) -> None:
        """Add a launch that starts `count` requests; they have left the queue."""
        self.wait.record_start(count, len(self.queue), self.clock.now())

    def estimated_wait(self) -> float:
        """Return the estimated wait in seconds; 0 while unknown."""
        return self._predict_wait(len(self.queue)) or 0.0

    def _check_quota(self, tenant: str, waiting: int) -> None:
        if waiting >= self.max_waiting_per_tenant:
            raise QuotaExceeded(
                f"at most {self.max_waiting_per_tenant} requests of a tenant may wait",
                quota="waiting_per_tenant",
                tenant=tenant,
                limit=self.max_waiting_per_tenant,
                actual=waiting,
                retry_after_ms=self._retry_after_ms(),
            )

    def _retry_after_ms(self) -> int:
        return max(1, round(self.estimated_wait() * 1000))

    def _predict_wait(self, ahead: int) -> float | None:
        return self.wait.predict(ahead, self.rows_free(), self.num_rows)
