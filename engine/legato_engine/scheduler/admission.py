"""Who is let into the waiting queue."""

from __future__ import annotations

from collections.abc import Sized

from legato_engine.errors import DeadlineUnreachable, PromptTooLong, QueueFull
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.wait_estimate import WaitEstimate
from legato_engine.sequence import Sequence


class Admission:
    """Refuses early what could not be served: too long, too many, too late."""

    def __init__(
        self, manager: KVCacheManager, clock: Clock, queue: Sized, *, max_waiting: int
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._queue = queue
        self._max_waiting = max_waiting
        self._wait = WaitEstimate()

    def check(self, sequence: Sequence) -> None:
        """Raise `PromptTooLong`, `QueueFull` or `DeadlineUnreachable` unless it may queue."""
        if not self._manager.fits_ever(sequence):
            raise PromptTooLong(
                "prompt and max_tokens do not fit the context",
                limit=self._manager.max_length,
                actual=sequence.max_length,
            )
        self.check_queue(0)
        if sequence.request.deadline is not None:
            self._check_deadline(sequence.request.deadline)

    def check_queue(self, preparing: int) -> None:
        """Raise `QueueFull` when those who wait and `preparing` more leave no place for another."""
        if len(self._queue) + preparing >= self._max_waiting:
            raise QueueFull(
                "the waiting queue is full",
                limit=self._max_waiting,
                retry_after_ms=max(1, round(self.estimated_wait() * 1000)),
            )

    def completed(self, sequence: Sequence) -> None:
        """A sequence has just been served."""
        self._wait.completed(self._clock.now() - sequence.prefill_start)

    def estimated_wait(self) -> float:
        """Seconds a request arriving now would wait; 0 while nothing is known."""
        return self._predict_wait() or 0.0

    def _check_deadline(self, deadline: float) -> None:
        wait = self._predict_wait()
        if wait is not None and wait > deadline - self._clock.now():
            raise DeadlineUnreachable(
                "the predicted wait is longer than the time left",
                estimated_wait_ms=round(wait * 1000),
            )

    def _predict_wait(self) -> float | None:
        manager = self._manager
        return self._wait.predict(len(self._queue), manager.rows_free, manager.num_rows)
