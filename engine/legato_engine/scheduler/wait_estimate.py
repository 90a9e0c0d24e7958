"""Estimated wait of a new request."""

from __future__ import annotations

SMOOTHING = 0.1
"""Weight of the newest value in the moving averages."""


class WaitEstimate:
    """Predicts waits from moving averages of service times and of the time between starts.

    Either rows or prefills are the bottleneck: a request waits for a row, or for the prompts and
    images that are computed before its own while rows are free.
    """

    def __init__(self) -> None:
        self._service: float | None = None  # seconds; None until a request has completed
        self._interval: float | None = None  # seconds a start while requests wait
        self._last_start: float | None = None  # None: nothing waited after it

    def completed(self, seconds: float) -> None:
        """Add the seconds from prefill to end."""
        self._service = _smoothed(self._service, seconds)

    def started(self, count: int, waiting: int, now: float) -> None:
        """Add a launch that `count` requests start with, while `waiting` others remain."""
        if self._last_start is not None:
            self._interval = _smoothed(self._interval, (now - self._last_start) / count)
        self._last_start = now if waiting else None

    def predict(self, waiting: int, rows_free: int, num_rows: int) -> float | None:
        """Seconds until one more request would start, None while unknown.

        One of `num_rows` parallel requests ends every `service / num_rows` seconds. A shortage of
        pages is seen only by the time between starts.
        """
        if self._service is None:
            return None
        for_row = max(0, waiting + 1 - rows_free) * self._service / num_rows
        return max(for_row, waiting * (self._interval or 0.0))


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + SMOOTHING * (value - mean)
