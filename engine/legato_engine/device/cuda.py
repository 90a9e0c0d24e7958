"""A CUDA GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from cuda.bindings import runtime

from legato_engine.device.base import CapturedGraph, DeviceEvent, EventClock
from legato_engine.errors import InternalError, InvalidField

_ANY_DIRECTION = runtime.cudaMemcpyKind.cudaMemcpyDefault


class CudaClock(EventClock):
    """Dates events by their distance from an anchor, an event as well.

    Elapsed times are float32 milliseconds; moving the anchor keeps them below about a second and
    exact to some 60 ns.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.anchor = timing_event()
        self.anchor.record(stream)
        self.anchor.synchronize()
        super().__init__(time.perf_counter_ns())


class CudaEvent:
    """A timing event."""

    __slots__ = ("_clock", "_host_ns", "_recorded_ns", "_seen_ns", "event")

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        self._host_ns: int | None = None
        self._recorded_ns = self._seen_ns = 0  # by the host; 0: not yet
        self.event = timing_event()

    def record(self, stream: torch.cuda.Stream) -> None:
        self._host_ns, self._seen_ns = None, 0
        self._recorded_ns = time.perf_counter_ns()
        self.event.record(stream)

    def wait(self) -> None:
        """Block until the stream passed; CUDA raises device faults here."""
        self.event.synchronize()
        self._seen()

    def query(self) -> bool:
        passed: bool = self.event.query()  # type: ignore[no-untyped-call]  # torch leaves it bare
        if passed:
            self._seen()
        return passed

    def _seen(self) -> None:
        if not self._seen_ns:
            self._seen_ns = time.perf_counter_ns()

    def time_ns(self) -> int:
        """Return the completion time.

        The event that the host waits for, a launch's last, becomes the anchor, so all of them share
        it.
        """
        if self._host_ns is None:
            clock = self._clock
            self._host_ns = clock.date(elapsed_ms(clock.anchor, self.event), self._recorded_ns)
            if self._seen_ns and clock.saw(self._host_ns, self._seen_ns):
                clock.anchor, self.event = self.event, timing_event()
        return self._host_ns


class CudaStream:
    """A stream that the calling thread enqueues work to."""

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock) -> None:
        self.stream = stream
        self._handle = stream.cuda_stream
        self._index = stream.device_index
        self._clock = clock

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` now on the host; its kernels go to this stream.

        Cheapest if this is the thread's current stream, as the compute stream is.
        """
        with torch.inference_mode():
            if torch._C._cuda_getCurrentRawStream(self._index) == self._handle:
                work()
                return
            with torch.cuda.stream(self.stream):
                work()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy through CUDA, which starts several times faster than torch's."""
        (result,) = runtime.cudaMemcpyAsync(
            destination.data_ptr(), source.data_ptr(), source.nbytes, _ANY_DIRECTION, self._handle
        )
        _check_started(result)

    def copy_rows(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy through CUDA, for which torch needs memory and a kernel."""
        assert destination.shape == source.shape, "matrices of different shapes"
        assert destination.stride(1) == source.stride(1) == 1, "rows that are not contiguous"
        num_rows, width = source.shape[0], source.shape[1] * source.element_size()
        places = []
        for each in (destination, source):
            places += [each.data_ptr(), max(each.stride(0) * each.element_size(), width)]
        (result,) = runtime.cudaMemcpy2DAsync(
            *places, width, num_rows, _ANY_DIRECTION, self._handle
        )
        _check_started(result)

    def record(self, reuse: DeviceEvent | None = None) -> CudaEvent:
        event = reuse if isinstance(reuse, CudaEvent) else CudaEvent(self._clock)
        event.record(self.stream)
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent), "an event of another device"
        self.stream.wait_event(event.event)


class CudaDevice:
    """One CUDA GPU."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(index)
        compute = _stream(self.torch_device)
        torch.cuda.set_stream(compute)  # of the thread that opens the device and runs its steps
        self._pool = torch.cuda.graph_pool_handle()
        clock = CudaClock(compute)
        self.compute = CudaStream(compute, clock)
        self.copy = CudaStream(_stream(self.torch_device), clock)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` as a CUDA graph; it must use fixed addresses and never synchronise.

        `work` runs once before, so that lazy initialisation stays out of the graph, and after all
        other streams, because it may share their scratch memory.
        """
        torch.cuda.synchronize(self.torch_device)
        self.compute.submit(work)
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Graphs share one memory pool: they run one after another, and results that outlive one are
        # copied to the caller's tensors.
        stream = self.compute.stream
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=stream)
        with no_collections(), torch.inference_mode(), capturing:
            work()
        return CapturedGraph(graph)

    def free_memory(self) -> int:
        """Include what torch caches."""
        free: int = torch.cuda.mem_get_info(self.torch_device)[0]
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return free + reserved - torch.cuda.memory_allocated(self.torch_device)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class JpegDecoder:
    """A decoder on the GPU: nvJPEG, through torchvision. Thread-safe.

    Colours stored at half the resolution are repeated, where libjpeg-turbo interpolates them.
    """

    def __init__(self, device: torch.device) -> None:
        """Decode one image of the largest size, so that later ones allocate no device memory.

        Raises:
            InvalidField: torchvision is not installed, or has no nvJPEG.
        """
        try:
            from torchvision.io import ImageReadMode, decode_jpeg
        except ImportError as error:
            raise _no_nvjpeg("needs the package torchvision") from error
        self._decode = functools.partial(decode_jpeg, mode=ImageReadMode.RGB, device=device)
        self._stream = _stream(device)
        largest_HWC = np.zeros((2048, 2048, 3), np.uint8)
        if not self(simplejpeg.encode_jpeg(largest_HWC), largest_HWC):
            raise _no_nvjpeg("needs a torchvision with nvJPEG")

    def __call__(self, data: bytes | memoryview, pixels_HWC: npt.NDArray[np.uint8]) -> bool:
        """Decode into `pixels_HWC`; return False if nvJPEG refuses the file or its size differs."""
        height, width, channels = pixels_HWC.shape
        with torch.cuda.stream(self._stream):
            try:
                decoded_CHW = self._decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            except RuntimeError:
                return False
            if decoded_CHW.shape != (channels, height, width):
                return False
            pixels = torch.from_numpy(pixels_HWC)
            pixels.copy_(decoded_CHW.permute(1, 2, 0), non_blocking=True)
        self._stream.synchronize()
        return True


def _no_nvjpeg(problem: str) -> InvalidField:
    return InvalidField(
        f"jpeg_decoder gpu {problem}: install it, or use jpeg_decoder cpu", field="jpeg_decoder"
    )


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Pause garbage collection: freeing another engine's graphs would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_started(result: runtime.cudaError_t) -> None:
    if result != runtime.cudaError_t.cudaSuccess:
        raise InternalError(f"a copy cannot be started: {result.name}")


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it bare


def elapsed_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    elapsed: float = begin.elapsed_time(end)
    return elapsed


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it bare
