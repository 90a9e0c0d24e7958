"""Estimated wait of a new request."""

from __future__ import annotations

SMOOTHING = 0.1
"""Weight of the newest service time in the moving average."""


class WaitEstimate:
    """Predicts waits from a moving average of service times and the length of the queue."""

    def __init__(self) -> None:
        self._service: float | None = None  # seconds; None until a request has completed

    def completed(self, seconds: float) -> None:
        """Add a service time, from prefill to end."""
        if self._service is None:
            self._service = seconds
        else:
            self._service += SMOOTHING * (seconds - self._service)

    def predict(self, waiting: int, rows_free: int, num_rows: int) -> float | None:
        """Return the seconds until one more request would start, None while unknown.

        One of `num_rows` parallel requests ends every `service / num_rows` seconds. A shortage of
        pages is ignored, so the estimate may be too low.
        """
        if self._service is None:
            return None
        return max(0, waiting + 1 - rows_free) * self._service / num_rows
