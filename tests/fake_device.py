"""The CPU as a device that launches from the calling thread and captures, as a GPU does."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from legato_engine.device.base import DeviceEvent
from torch.utils._python_dispatch import _disable_current_modes


class PassedEvent:
    """An event that has passed."""

    def __init__(self) -> None:
        self._time_ns = time.perf_counter_ns()

    def wait(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Always true."""
        return True

    def time_ns(self) -> int:
        """When it was recorded."""
        return self._time_ns


class InlineStream:
    """Runs work at once; copies are no operations of torch, as on a GPU."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run it."""
        with torch.inference_mode():
            work()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between contiguous tensors."""
        assert destination.is_contiguous()
        assert source.is_contiguous()
        self.copy_rows(destination, source)

    def copy_rows(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tensors of one shape."""
        assert destination.shape == source.shape
        with _disable_current_modes(), torch.inference_mode():
            destination.copy_(source)

    def record(self, reuse: DeviceEvent | None = None) -> PassedEvent:
        """Return an event that has passed."""
        del reuse
        return PassedEvent()

    def wait_event(self, event: DeviceEvent) -> None:
        """Return at once."""


class GraphDevice:
    """Runs captured work once before, as a GPU does; replays are no operations of torch."""

    torch_device = torch.device("cpu")
    name = "graphs"

    def __init__(self) -> None:
        self.compute, self.copy = InlineStream(), InlineStream()
        self.num_captured = 0

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work, and return its replay."""
        self.num_captured += 1
        self.compute.submit(work)

        def replay() -> None:
            with _disable_current_modes():
                work()

        return replay

    def free_memory(self) -> None:
        """Shared with the host."""

    def close(self) -> None:
        """Nothing is open."""
