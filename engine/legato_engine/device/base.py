"""The device interface.

A stream runs its work in order, concurrently with the caller and with other streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's order."""

    def wait(self) -> None:
        """Block until the stream has passed; raise the failure of earlier work."""
        ...

    def query(self) -> bool: ...

    def time_ns(self) -> int:
        """When the stream passed, on the clock of `time.perf_counter_ns`.

        Valid after `wait` returned or `query` was true.
        """
        ...


class Stream(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue `work`, which runs later: the caller must not mutate what it reads."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between contiguous tensors of one size, the host's in pinned memory.

        The host tensor must not change until the copy is done.
        """
        ...

    def record(self, reuse: Event | None = None) -> Event:
        """Record an event after earlier work, in `reuse` if it has no other user."""
        ...

    def wait_event(self, event: Event) -> None:
        """Run later work after `event`, without blocking the caller."""
        ...


class Device(Protocol):
    """An accelerator, or the CPU as one."""

    torch_device: torch.device
    name: str

    @property
    def compute(self) -> Stream:
        """Forwards and sampling."""
        ...

    @property
    def copy(self) -> Stream:
        """Copies that the compute stream must not wait for."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed, for asynchronous copies."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` for replay at fixed addresses (a CUDA graph); a CPU returns it."""
        ...

    def free_memory(self) -> int | None:
        """Bytes that can be allocated; None if the device shares the host's memory."""
        ...

    def close(self) -> None: ...
