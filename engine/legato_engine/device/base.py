"""The device interface."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """Work that replays a graph, which is kept so that others may include a copy of it."""

    graph: torch.cuda.CUDAGraph  # noqa: TID251 - a part of the CUDA device that needs no bindings

    def __call__(self) -> None:
        self.graph.replay()


# ---------------------------------------------------------------- event clock

_PERIOD_NS = 1_000_000_000
_MOST_DRIFT = 1e-4  # of one clock beside the other; 15e-6 was seen


class EventClock:
    """Maps times since an anchor, an event, to the clock of `time.perf_counter_ns`.

    The clocks of device and host drift apart, so two facts keep the times true: no event passes
    before it is recorded, and none after the host has seen it. Where the device waits for the host
    an event passes as soon as it is recorded; where the host waits for the device it sees an event
    at once. A time is wrong by as much as the host is late, at most.
    """

    def __init__(self, anchor_ns: int) -> None:
        self._anchor_ns = anchor_ns
        self._soonest = math.inf  # nanoseconds after which the host saw an event, since the anchor

    def date(self, elapsed_ms: float, recorded_ns: int) -> int:
        """Return an event's host time, at least `recorded_ns`, from its distance to the anchor."""
        host_ns = self._anchor_ns + round(elapsed_ms * 1e6)
        if host_ns < recorded_ns:
            self._anchor_ns += recorded_ns - host_ns
            return recorded_ns
        return host_ns

    def saw(self, host_ns: int, seen_ns: int) -> bool:
        """Note when the host saw an event of this time; True: the event is the anchor from now on.

        The host saw no event earlier than `_soonest` after its time. More than the clocks can have
        drifted means that it was always late, which says nothing.
        """
        self._soonest = min(self._soonest, seen_ns - host_ns)
        if host_ns - self._anchor_ns <= _PERIOD_NS:
            return False
        if self._soonest <= _MOST_DRIFT * (host_ns - self._anchor_ns):
            host_ns += int(self._soonest)
        self._anchor_ns, self._soonest = host_ns, math.inf
        return True


# ---------------------------------------------------------------- device

# A stream runs its work in order, concurrently with the caller and with other streams.


class DeviceEvent(Protocol):
    """A point in a stream's order."""

    def wait(self) -> None:
        """Block until the stream has passed; raise the failure of earlier work."""

    def query(self) -> bool: ...

    def time_ns(self) -> int:
        """Return the completion time on the clock of `time.perf_counter_ns`.

        Valid after `wait` returned or `query` was true.
        """


class Stream(Protocol):
    """An ordered queue of work."""

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue `work`, which runs later: the caller must not mutate what it reads."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between contiguous tensors of one size, the host's in pinned memory.

        The host tensor must not change until the copy is done.
        """

    def copy_rows(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy likewise, between matrices of one shape whose rows may be apart."""

    def record(self, reuse: DeviceEvent | None = None) -> DeviceEvent:
        """Record an event after earlier work, in `reuse` if it has no other user."""

    def wait_event(self, event: DeviceEvent) -> None:
        """Run later work after `event`, without blocking the caller."""


class Device(Protocol):
    """An accelerator, or the CPU as one."""

    torch_device: torch.device
    name: str

    @property
    def compute(self) -> Stream:
        """Forwards and sampling."""

    @property
    def copy(self) -> Stream:
        """Copies that the compute stream must not wait for."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed, for asynchronous copies."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` for replay at fixed addresses (a CUDA graph); a CPU returns it."""

    def free_memory(self) -> int | None:
        """Bytes that can be allocated; None if the device shares the host's memory."""

    def close(self) -> None: ...
