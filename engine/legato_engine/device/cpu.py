"""The CPU as a device: two streams, each a worker thread, synchronised by events.

Schedules overlap, and races show, as on a GPU.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable

import torch

from legato_engine.device.base import DeviceEvent


class CpuEvent:
    """Set by the stream's thread."""

    __slots__ = ("_error", "_passed", "_time_ns")

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._time_ns = 0
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._passed.wait()
        if self._error is not None:
            raise RuntimeError("device work failed") from self._error

    def query(self) -> bool:
        return self._passed.is_set()

    def time_ns(self) -> int:
        return self._time_ns

    def _set(self, error: BaseException | None) -> None:
        self._error = error
        self._time_ns = time.perf_counter_ns()
        self._passed.set()


class CpuStream:
    """One thread and its queue. After a failure, work is skipped and every event raises."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | CpuEvent | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._queue.put(functools.partial(_copy, destination, source))

    copy_rows = copy

    def record(self, reuse: DeviceEvent | None = None) -> CpuEvent:
        event = CpuEvent()
        self._queue.put(event)
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        self._queue.put(event.wait)

    def close(self) -> None:
        """Finish queued work and stop the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                if isinstance(item, CpuEvent):
                    item._set(self._error)
                elif self._error is None:
                    self._call(item)

    def _call(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the stream's events
            self._error = error


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)


class CpuDevice:
    """A host with `num_threads` cores for computing and one thread for copies."""

    def __init__(self, num_threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self.name = f"cpu ({num_threads} threads)"
        self.compute = CpuStream("legato-compute")
        self.copy = CpuStream("legato-copy")
        # Torch's setting is partly global and partly per thread, so the computing thread sets it.
        self.compute.submit(lambda: torch.set_num_threads(num_threads))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def free_memory(self) -> None:
        return

    def close(self) -> None:
        self.compute.close()
        self.copy.close()
