"""How long a request arriving now would wait."""

from __future__ import annotations

SMOOTHING = 0.1
"""Weight of the newest completion in the moving average."""


class WaitEstimate:
    """A moving average of service times, turned into a wait by the queue's length."""

    def __init__(self) -> None:
        self._service: float | None = None  # seconds; None until a request has completed

    def completed(self, seconds: float) -> None:
        """A request was served in `seconds`, from its prefill to its end."""
        if self._service is None:
            self._service = seconds
        else:
            self._service += SMOOTHING * (seconds - self._service)

    def predict(self, waiting: int, rows_free: int, num_rows: int) -> float | None:
        """Seconds until one more request would start; None while no request has completed.

        `num_rows` requests are served side by side, so one of them ends every `service / num_rows`
        seconds. Page shortage is left out: the estimate errs towards letting requests in.
        """
        if self._service is None:
            return None
        return max(0, waiting + 1 - rows_free) * self._service / num_rows
