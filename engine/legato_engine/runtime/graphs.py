"""Captured CUDA graphs of fixed shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from legato_engine.device.base import CapturedGraph, Device
from legato_engine.kernels.accelerated import Switch

Work = Callable[[], None]


class GraphRunner:
    """Captures work once per shape and enqueues it on the compute stream.

    Captured work must use fixed addresses and read no device value on the host.
    """

    def __init__(self, device: Device, *, captures: bool = True) -> None:
        self._capture = device.capture if captures else _uncaptured
        self._compute = device.compute
        self._captured: dict[tuple[object, ...], Work] = {}
        self._parts: dict[tuple[object, ...], Work] = {}
        """Work as it was made: a graph reads its tensors, and must not outlive them."""

    def run(self, make: Callable[..., Work], *shape: int | bool) -> None:
        """Enqueue `make(*shape)`, made once for each shape."""
        self._compute.submit(self.captured(make, *shape))

    def switch(
        self, index: torch.Tensor, make: Callable[..., Work], shapes: Sequence[tuple[int, ...]]
    ) -> Work:
        """Work that runs `make(*shapes[index])`, chosen on the device when it runs.

        `index` is an int32 [1] on the device; beyond the shapes nothing runs, but a single shape
        always does. The work may be part of captured work.
        """
        works = [self.captured(make, *shape) for shape in shapes]
        graphs = [work.graph for work in works if isinstance(work, CapturedGraph)]
        if len(graphs) == len(works):
            return Switch(index, graphs)

        def chosen() -> None:
            which = int(index) if len(works) > 1 else 0
            if which < len(works):
                works[which]()

        return chosen

    def part(self, make: Callable[..., Work], *shape: int | bool) -> Work:
        """Return work that is captured only within other work, since it has switches.

        It is made once for each shape and allocates nothing but the switches.
        """
        key = (make, *shape)
        if key not in self._parts:
            self._parts[key] = make(*shape)
        return self._parts[key]

    def captured(self, make: Callable[..., Work], *shape: int | bool) -> Work:
        """Return the work of `run`, to be part of other work."""
        key = (make, *shape)
        if key not in self._captured:
            self._captured[key] = self._capture(self.part(make, *shape))
        return self._captured[key]


def _uncaptured(work: Work) -> Work:
    return work
