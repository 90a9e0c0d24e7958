"""The device seam: streams, events, pinned buffers and captured work.

A stream runs what is submitted to it in order and apart from the caller; two streams run side by
side. That is all the pipeline needs, and a CPU can give it as truly as a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's order."""

    def wait(self) -> None:
        """Block the caller until the stream has passed this point; raises what failed before it."""
        ...

    def query(self) -> bool:
        """Whether the stream has passed this point."""
        ...

    def time_ns(self) -> int:
        """When the stream passed this point, on the clock of `time.perf_counter_ns`.

        Only after `wait` returned or `query` was true.
        """
        ...


class Stream(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue; returns before the work has run, so it may touch nothing the caller mutates."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between contiguous tensors of one size; nothing waits, pinned memory only.

        The host's side must stay as it is until the copy is done.
        """
        ...

    def record(self, reuse: Event | None = None) -> Event:
        """An event behind all that was submitted so far.

        `reuse` is an event of this device that nobody asks any more: it may become the new one.
        """
        ...

    def wait_event(self, event: Event) -> None:
        """What is submitted from now on runs after `event`; the caller does not block."""
        ...


class Device(Protocol):
    """One accelerator, or the CPU playing one."""

    torch_device: torch.device
    name: str

    @property
    def compute(self) -> Stream:
        """Where forwards and sampling run."""
        ...

    @property
    def copy(self) -> Stream:
        """Where copies run that the compute stream must not wait for."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed host tensor that copies to and from the device asynchronously."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` recorded for cheap replay at fixed addresses (a CUDA graph), or `work` itself."""
        ...

    def free_memory(self) -> int | None:
        """Bytes that could still be allocated; None where memory is not the device's own."""
        ...

    def close(self) -> None:
        """Stop the streams; pending work is finished first."""
        ...
