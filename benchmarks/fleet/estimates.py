"""Predictions of an engine's waits: by free rows, and by the rate of starts."""

from __future__ import annotations

from typing import Protocol

from legato_engine.scheduler.queue import SMOOTHING, WaitEstimate

from benchmarks.fleet.costs import ROWS

MARGIN = 1.1
"""By which a predicted wait is lengthened before it is compared with a deadline."""


class Estimate(Protocol):
    """Predicts from what an engine saw; all values are seconds."""

    def prefilled(self, now: float, prompts: int, waiting: int) -> None:
        """Add a launch with prompts, after which so many requests wait."""

    def completed(self, seconds: float) -> None:
        """Add the seconds from a request's prefill to its end."""

    def wait(self, waiting: int, running: int) -> float:
        """Return the seconds until one more request would start; 0 while unknown."""
        ...

    def until_checked(self, waiting: int, running: int) -> float:
        """Return the seconds that must be left before the deadline of one more request."""
        ...


class ByRows:
    """`running` of `ROWS` places, each free after a mean service time."""

    def __init__(self) -> None:
        self._estimate = WaitEstimate()

    def prefilled(self, now: float, prompts: int, waiting: int) -> None:
        pass

    def completed(self, seconds: float) -> None:
        self._estimate.completed(seconds)

    def wait(self, waiting: int, running: int) -> float:
        return self._estimate.predict(waiting, ROWS - running, ROWS) or 0.0

    def until_checked(self, waiting: int, running: int) -> float:
        return self.wait(waiting, running)


class ByRate:
    """A moving average of the seconds between starts while requests wait.

    The deadline is compared with the end of a request, not with its start.
    """

    def __init__(self) -> None:
        self._interval = 0.0
        self._service = 0.0
        self._last = -1.0  # the last launch after which requests waited; negative: none did

    def prefilled(self, now: float, prompts: int, waiting: int) -> None:
        if self._last >= 0:
            self._interval = _smoothed(self._interval, (now - self._last) / prompts)
        self._last = now if waiting else -1.0

    def completed(self, seconds: float) -> None:
        self._service = _smoothed(self._service, seconds)

    def wait(self, waiting: int, running: int) -> float:
        return waiting * self._interval

    def until_checked(self, waiting: int, running: int) -> float:
        return MARGIN * self.wait(waiting, running) + self._service


ESTIMATES: dict[str, type[ByRows] | type[ByRate]] = {"rows": ByRows, "rate": ByRate}


def _smoothed(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value
