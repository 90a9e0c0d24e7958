"""The device interface: streams, events, pinned buffers and captured work.

A stream runs its work in order and concurrently with the caller; two streams run concurrently with
each other. CPU and GPU both provide this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's order."""

    def wait(self) -> None:
        """Block until the stream has passed this point; raises the failure of earlier work."""
        ...

    def query(self) -> bool:
        """Whether the stream has passed this point."""
        ...

    def time_ns(self) -> int:
        """The time at which the stream passed, on the clock of `time.perf_counter_ns`.

        Valid after `wait` returned or `query` was true.
        """
        ...


class Stream(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue `work`, which runs later, so the caller must not mutate what it reads."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between contiguous tensors of one size, the host's in pinned memory.

        The host tensor must not change until the copy is done.
        """
        ...

    def record(self, reuse: Event | None = None) -> Event:
        """Record an event after all work submitted so far.

        `reuse` is an event of this device without other users, which may become the new one.
        """
        ...

    def wait_event(self, event: Event) -> None:
        """Run later work after `event`; the caller does not block."""
        ...


class Device(Protocol):
    """An accelerator, or the CPU as one."""

    torch_device: torch.device
    name: str

    @property
    def compute(self) -> Stream:
        """The stream of forwards and sampling."""
        ...

    @property
    def copy(self) -> Stream:
        """The stream of copies that the compute stream must not wait for."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a zeroed host tensor that is copied asynchronously."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` for replay at fixed addresses (a CUDA graph); return `work` itself on a
        CPU.
        """
        ...

    def free_memory(self) -> int | None:
        """Bytes that can still be allocated; None if the device shares the host's memory."""
        ...

    def close(self) -> None:
        """Finish pending work and stop the streams."""
        ...
