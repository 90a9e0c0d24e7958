"""A CUDA GPU: one compute stream, one copy stream, events, pinned memory and captured graphs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class CudaEvent:
    """A timing event on a CUDA stream."""

    __slots__ = ("_clock", "_event")

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock) -> None:
        self._clock = clock
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        """Block until the stream passed; a device fault is raised here by CUDA."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether the stream has passed."""
        return bool(self._event.query())

    def time_ns(self) -> int:
        """When the stream passed, on the host's `time.perf_counter_ns`."""
        return self._clock.to_host_ns(self._event)


class CudaClock:
    """Maps event times to the host clock by one event whose host time is known."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(stream)
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def to_host_ns(self, event: torch.cuda.Event) -> int:
        """Host time of a passed event; `elapsed_time` is in milliseconds."""
        return self._origin_ns + round(self._origin.elapsed_time(event) * 1e6)


class CudaStream:
    """Work enqueued from the calling thread onto one CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._clock = CudaClock(self.stream)

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` now on the host; its kernels go to this stream."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            work()

    def record(self) -> CudaEvent:
        """An event behind everything submitted so far."""
        return CudaEvent(self.stream, self._clock)

    def wait_event(self, event: CudaEvent) -> None:
        """Later work of this stream runs after `event`; the host does not block."""
        self.stream.wait_event(event._event)


class CudaDevice:
    """One CUDA GPU."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(index)
        self.compute = CudaStream(self.torch_device)
        self.copy = CudaStream(self.torch_device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed page-locked host tensor."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of `work`, which must use fixed addresses and never synchronise.

        `work` runs once for real first, so that lazy initialisation stays out of the graph.
        """
        self.compute.submit(work)
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, stream=self.compute.stream):
            work()
        return graph.replay

    def close(self) -> None:
        """Wait for pending work."""
        torch.cuda.synchronize(self.torch_device)
