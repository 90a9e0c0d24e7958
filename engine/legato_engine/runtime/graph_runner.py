"""Work of fixed shape, captured when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable

from legato_engine.device.base import Stream

Work = Callable[[], None]


class GraphRunner:
    """Runs what `make` gives for a shape, captured once for each `make` and shape."""

    def __init__(self, capture: Callable[[Work], Work], compute: Stream) -> None:
        self._capture = capture
        self._compute = compute
        self._captured: dict[tuple[object, ...], Work] = {}

    def run(self, make: Callable[..., Work], *shape: int | bool) -> None:
        """Enqueue `make(*shape)`."""
        key = (make, *shape)
        if key not in self._captured:
            self._captured[key] = self._capture(make(*shape))
        self._compute.submit(self._captured[key])
