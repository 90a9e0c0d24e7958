"""Admission control."""

from __future__ import annotations

from collections.abc import Collection

from legato_engine.errors import (
    DeadlineUnreachable,
    PromptTooLong,
    QueueFull,
    QuotaExceeded,
)
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.wait_estimate import WaitEstimate
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence


class Admission:
    """Refuses requests that are too long, exceed the queue or cannot start in time."""

    def __init__(
        self,
        manager: KVCacheManager,
        clock: Clock,
        queue: WaitingQueue,
        *,
        max_waiting: int,
        max_waiting_per_tenant: int,
    ) -> None:
        """`max_waiting_per_tenant` 0: no limit."""
        self._manager = manager
        self._clock = clock
        self._queue = queue
        self._max_waiting = max_waiting
        self._max_per_tenant = max_waiting_per_tenant
        self._wait = WaitEstimate()

    def check(self, sequence: Sequence) -> None:
        """Raise what `Scheduler.submit` documents."""
        if not self._manager.fits_ever(sequence):
            raise PromptTooLong(
                "prompt and max_tokens do not fit the context",
                limit=self._manager.max_length,
                actual=sequence.max_length,
            )
        if sequence.request.resumed is not None:
            return  # an earlier engine has admitted it
        self.check_queue(sequence.request.tenant, ())
        if sequence.request.deadline is not None:
            self._check_deadline(sequence, sequence.request.deadline)

    def check_queue(self, tenant: str, preparing: Collection[str]) -> None:
        """Check that the queue takes another request of `tenant`.

        Raises:
            QueueFull: `max_waiting` requests wait or are being prepared.
            QuotaExceeded: `max_waiting_per_tenant` of them are the tenant's.
        """
        if len(self._queue) + len(preparing) >= self._max_waiting:
            raise QueueFull(
                "the waiting queue is full",
                limit=self._max_waiting,
                retry_after_ms=self._retry_after_ms(),
            )
        if self._max_per_tenant:
            self._check_quota(tenant, self._queue.num_of(tenant) + list(preparing).count(tenant))

    def completed(self, sequence: Sequence) -> None:
        self._wait.completed(self._clock.now() - sequence.timing.prefill_start)

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

    def _check_deadline(self, sequence: Sequence, deadline: float) -> None:
        wait = self._predict_wait(self._queue.num_ahead(sequence))
        if wait is not None and wait > deadline - self._clock.now():
            raise DeadlineUnreachable(
                "the predicted wait is longer than the time left",
                estimated_wait_ms=round(wait * 1000),
            )

    def _predict_wait(self, ahead: int) -> float | None:
        manager = self._manager
        return self._wait.predict(ahead, manager.rows_free, manager.num_rows)
