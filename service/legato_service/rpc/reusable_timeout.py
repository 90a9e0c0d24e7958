"""A timeout for asyncio tasks that wait often."""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import Self


class ReusableTimeout:
    """Timeout for waits of the current asyncio task, each as `asyncio.timeout` would.

        with timeout.until(moment):
            await something  # raises TimeoutError at `moment`

    Moments are `time.monotonic()` seconds. Waits share one timer, because most end early and a
    timer for each would cost more than the wait. They must not nest; `close` it after the last one.
    """

    __slots__ = ("_cancelling", "_due", "_expired", "_loop", "_task", "_timer", "_until")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "needs an asyncio task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the timer fires
        self._until = math.inf  # the end of the current wait
        self._cancelling = 0
        self._expired = False

    def until(self, moment: float) -> Self:
        """Bound waits until a moment; infinity is no bound."""
        self._until = moment
        return self

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        self._cancelling = self._task.cancelling()
        if self._until < self._due:
            self._arm(self._until)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._until = math.inf
        if self._expired:
            self._expired = False
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def _arm(self, moment: float) -> None:
        self.close()
        self._due = moment
        if moment < math.inf:
            self._timer = self._loop.call_later(moment - time.monotonic(), self._on_timer)

    def _on_timer(self) -> None:
        """Expire, unless the timer was set for an earlier wait."""
        if self._until <= time.monotonic():
            self._arm(math.inf)
            self._expired = True
            self._task.cancel()
        else:
            self._arm(self._until)
