"""How long to wait, for tasks that wait often."""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType
from typing import Self


class ReusableTimeout:
    """Bounds the current task's waits, one after another, each like `asyncio.timeout` would.

        with patience.until(moment):
            await something  # TimeoutError when it is not there by then

    One timer serves them all: most waits end early, and a timer made and dropped for each costs
    more than the wait. Moments are `time.monotonic()` seconds. Waits do not nest. `close` it.
    """

    __slots__ = ("_cancelling", "_due", "_expired", "_loop", "_task", "_timer", "_until")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only tasks wait"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # of the timer
        self._until = math.inf  # of the wait
        self._cancelling = 0
        self._expired = False

    def until(self, moment: float) -> Self:
        """The bound of the wait that follows; infinite for none."""
        self._until = moment
        return self

    def close(self) -> None:
        """Drop the timer."""
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
            self._timer = self._loop.call_later(moment - time.monotonic(), self._look)

    def _look(self) -> None:
        """The timer is that of a wait that ended, or of the one that has lasted long enough."""
        if self._until <= time.monotonic():
            self._arm(math.inf)
            self._expired = True
            self._task.cancel()
        else:
            self._arm(self._until)
