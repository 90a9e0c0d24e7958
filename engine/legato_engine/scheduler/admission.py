"""Admission to the waiting queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from legato_engine.errors import DeadlineUnreachable, QueueFull, QuotaExceeded
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.wait_estimate import WaitEstimate
from legato_engine.scheduler.waiting_queue import Waiting, WaitingQueue

WaitingT = TypeVar("WaitingT", bound=Waiting)


class Rows(Protocol):
    """The places of requests that run."""

    @property
    def rows_free(self) -> int: ...

    @property
    def num_rows(self) -> int: ...


class Admission(Generic[WaitingT]):
    """Refuses requests that exceed the queue or cannot start in time.

    A full queue gives up a request for one with a better claim: of a tenant with fewer requests, or
    of a higher priority. A request that has started keeps its place.
    """

    def __init__(
        self,
        rows: Rows,
        clock: Clock,
        queue: WaitingQueue[WaitingT],
        *,
        max_waiting: int,
        max_waiting_per_tenant: int,
    ) -> None:
        """`max_waiting_per_tenant` 0: no limit."""
        self._rows = rows
        self._clock = clock
        self._queue = queue
        self._max_waiting = max_waiting
        self._max_per_tenant = max_waiting_per_tenant
        self._wait = WaitEstimate()

    def displaced_by(
        self, tenant: str, priority: int, arrival: float, preparing: Collection[str] = ()
    ) -> WaitingT | str | None:
        """Return what has to end so that the queue takes another request; None if there is room.

        That is a waiting request or, where the requests in preparation fill the queue, the tenant
        of one of them. `preparing` are their tenants.

        Raises:
            QueueFull: `max_waiting` requests wait or are prepared, all with as good a claim.
            QuotaExceeded: `max_waiting_per_tenant` of them are the tenant's.
        """
        queue = self._queue
        if self._max_per_tenant:
            self._check_quota(tenant, queue.num_of(tenant) + list(preparing).count(tenant))
        if len(queue) + len(preparing) < self._max_waiting:
            return None
        counts = queue.num_by_tenant() + Counter(preparing)
        greedy = queue.most_over_share(tenant, counts)
        if greedy is not None:
            displaced = queue.last_of(greedy)
            if displaced is not None or greedy in preparing:
                return displaced or greedy
        lower = queue.last_below(tenant, priority, arrival, counts)
        if lower is None:
            raise self.queue_full("the waiting queue is full")
        return lower

    def queue_full(self, message: str) -> QueueFull:
        return QueueFull(message, limit=self._max_waiting, retry_after_ms=self._retry_after_ms())

    def displacement(self) -> QueueFull:
        """The error of a request that ends for another."""
        return self.queue_full("the waiting queue is full, and another request has a better claim")

    def check_deadline(self, item: WaitingT) -> None:
        """Check that a request that is not queued yet may start in time.

        Raises:
            DeadlineUnreachable: the predicted wait is longer than the time left.
        """
        deadline = item.request.deadline
        if deadline is None:
            return
        wait = self._predict_wait(self._queue.num_ahead(item))
        if wait is not None and wait > deadline - self._clock.now():
            raise DeadlineUnreachable(
                "the predicted wait is longer than the time left",
                estimated_wait_ms=round(wait * 1000),
            )

    def started(self, count: int) -> None:
        """Add a launch that `count` requests start with; they have left the queue."""
        self._wait.started(count, len(self._queue), self._clock.now())

    def completed(self, seconds: float) -> None:
        """Add the seconds from the prefill to the end of a request."""
        self._wait.completed(seconds)

    def estimated_wait(self) -> float:
        """In seconds; 0 while unknown."""
        return self._predict_wait(len(self._queue)) or 0.0

    def _check_quota(self, tenant: str, waiting: int) -> None:
        if waiting >= self._max_per_tenant:
            raise QuotaExceeded(
                f"at most {self._max_per_tenant} requests of a tenant may wait",
                quota="waiting_per_tenant",
                tenant=tenant,
                limit=self._max_per_tenant,
                actual=waiting,
                retry_after_ms=self._retry_after_ms(),
            )

    def _retry_after_ms(self) -> int:
        return max(1, round(self.estimated_wait() * 1000))

    def _predict_wait(self, ahead: int) -> float | None:
        rows = self._rows
        return self._wait.predict(ahead, rows.rows_free, rows.num_rows)
