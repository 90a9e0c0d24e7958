"""Work of fixed shape, captured on first use and replayed afterwards."""

from __future__ import annotations

from collections.abc import Callable

from legato_engine.device.base import Device

Work = Callable[[], None]


class GraphRunner:
    """Captures work once per shape and enqueues it on the compute stream.

    All captured work must use fixed addresses and read no device value on the host. Without
    `captures`, or on a device that cannot capture, the work itself runs each time.
    """

    def __init__(self, device: Device, *, captures: bool = True) -> None:
        self._capture = device.capture if captures else _uncaptured
        self._compute = device.compute
        self._captured: dict[tuple[object, ...], Work] = {}

    def run(self, make: Callable[..., Work], *shape: int | bool) -> None:
        """Enqueue `make(*shape)`; `make` is called once for each shape."""
        key = (make, *shape)
        if key not in self._captured:
            self._captured[key] = self._capture(make(*shape))
        self._compute.submit(self._captured[key])


def _uncaptured(work: Work) -> Work:
    return work
