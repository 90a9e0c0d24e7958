"""When to look for the outputs of a loop's next step."""

from __future__ import annotations

import time
from collections.abc import Iterator

_POLL_SECONDS = 2e-5
_ASLEEP, _LONGEST = 0.7, 5e-3  # the share of a step, and the most seconds, without a look


class Looks:
    """Steps of a loop take about as long as each other."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Another loop, whose first step may wait for a whole launch."""
        self._found_at = self._step_seconds = 0.0

    def found(self) -> None:
        now = time.perf_counter()
        if self._found_at > 0.0:
            self._step_seconds = now - self._found_at
        self._found_at = now

    def pauses(self) -> Iterator[float]:
        """Seconds after each look: first most of a step, as the last one took, then little."""
        rest = self._found_at + _ASLEEP * self._step_seconds - time.perf_counter()
        yield min(max(rest, _POLL_SECONDS), _LONGEST)
        while True:
            yield _POLL_SECONDS
