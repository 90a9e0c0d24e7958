"""Decoding in processes that can be ended.

Image libraries are given bytes of strangers: what they take in time and memory is limited by the
kernel, and what they corrupt or crash is not the engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import numpy as np
import structlog

from legato_engine import failpoints, sandbox
from legato_engine.errors import ImageTooLarge, ImageUndecodable, InternalError, from_value
from legato_engine.images.decoding_worker import MAX_MESSAGE, Decoded, Job, NotDecoded, Reply
from legato_engine.images.headers import ImageHeader
from legato_engine.images.memory import PAGE, Allocate, Pixels

_SECONDS, _SECONDS_PER_PIXEL = 1.0, 250e-9
"""CPU time for an image, about ten times that of the slowest format."""

_WALL_FACTOR = 30.0
"""Time for each second of CPU time, which even a machine full of other work gives a worker of low
priority: only one that is stopped takes longer."""

_BYTES, _BYTES_PER_PIXEL, _BYTES_PER_BYTE = 64 * 1024 * 1024, 24, 4
"""Memory for an image in addition to its file and pixels; WebP takes most, 20 bytes per pixel."""

_MAX_LOGGED = 4096  # bytes of an event
_KEPT_BYTES = 16 * 1024 * 1024  # of shared memory between images; more is given back
_ATTEMPTS = 2
_EXIT_TIMEOUT = 0.5  # seconds for a process that has closed its connection to exit
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_COMMAND = (sys.executable, "-m", "legato_engine.images.decoding_worker")
_log = structlog.get_logger()


class DecodingWorkers:
    """Worker processes, started when they are needed and replaced when they die; thread-safe.

    There are as many as there are threads in `decode` at a time. `wall_factor` bounds the time for
    an image, in seconds for each second of CPU time.
    """

    def __init__(
        self, *, max_pixels: int, nice: int = 0, wall_factor: float = _WALL_FACTOR
    ) -> None:
        self._max_pixels = max_pixels
        self._nice = nice
        self._wall_factor = wall_factor
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [each.pid for each in self._all]

    def start(self, count: int) -> None:
        """Start workers ahead of need, without waiting for them."""
        self._idle += [self._new() for _ in range(count)]

    def decode(self, data: memoryview, header: ImageHeader, allocate: Allocate) -> Pixels:
        """Return the displayed pixels [H, W, C] in memory of `allocate`.

        Raises:
            ImageUndecodable: the file is corrupt, contradicts `header`, or crashes its decoder.
            ImageTooLarge: decoding takes too many scans, too much time or too much memory.
        """
        seconds = _SECONDS + _SECONDS_PER_PIXEL * header.num_pixels
        pixels_at = -(-len(data) // PAGE) * PAGE
        job = Job(
            header=header,
            num_bytes=len(data),
            pixels_at=pixels_at,
            memory_size=0,
            max_pixels=self._max_pixels,
            max_seconds=seconds,
            max_memory=_BYTES + _BYTES_PER_PIXEL * header.num_pixels + _BYTES_PER_BYTE * len(data),
        )
        for attempt in range(_ATTEMPTS):
            worker = self._take()
            pixels_HWC = self._run(worker, job, data, allocate)
            if pixels_HWC is not None:
                return pixels_HWC
            code = self._discard(worker)
            if self._closed:
                raise InternalError("the engine is closing")
            _log.warning(
                "image_decoder_died", exit_code=code, attempt=attempt, mime_type=header.mime_type
            )
            if worker.timed_out or code == -signal.SIGPROF:
                raise _too_slow(seconds)
            if code != -signal.SIGKILL:  # sent from outside; says nothing about the image
                break
        raise ImageUndecodable("the image crashes its decoder", field="image")

    def close(self) -> None:
        """End all workers; images under way fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            workers = list(self._all)
        for worker in workers:
            worker.kill()
        for worker in idle:
            self._discard(worker)

    def _run(
        self, worker: _Worker, job: Job, data: memoryview, allocate: Allocate
    ) -> Pixels | None:
        """Return the reply, or None if the worker has died or must be killed."""
        try:
            reply = worker.run(job, data, job.max_seconds * self._wall_factor)
            worker.log_stderr()
            pixels_HWC = worker.pixels(job, reply, allocate) if isinstance(reply, Decoded) else None
        except BaseException:
            self._discard(worker)
            raise
        if reply is None:
            return None
        worker.trim()
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
        if self._closed:
            self._discard(worker)
        if isinstance(reply, NotDecoded):
            raise from_value(reply.error)
        return pixels_HWC

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._new()

    def _new(self) -> _Worker:
        worker = _Worker(self._nice)
        with self._lock:
            self._all.add(worker)
            closed = self._closed
        if closed:
            self._discard(worker)
            raise InternalError("the engine is closing")
        return worker

    def _discard(self, worker: _Worker) -> int:
        """Kill a worker, free its resources and return its exit code."""
        with self._lock:
            self._all.discard(worker)
        return worker.end()


def _too_slow(seconds: float) -> ImageTooLarge:
    limit = f"{seconds:.3g}"
    return ImageTooLarge(
        f"decoding the image takes more than {limit} s", field="image", limit=limit, unit="seconds"
    )


class _Worker:
    """A worker process, and the memory that it shares with this one."""

    def __init__(self, nice: int) -> None:
        self._memory = os.memfd_create("legato-decoding", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Sealed: if the other process shrank the memory, this one would get a SIGBUS.
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._mapping: mmap.mmap | None = None
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.timed_out = False
        with theirs:
            self._process = subprocess.Popen(
                (
                    *_COMMAND,
                    *("--connection", str(theirs.fileno()), "--memory", str(self._memory)),
                    *("--parent", str(os.getpid()), "--nice", str(nice)),
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), self._memory),
                env=_environment(),
            )
        self.pid = self._process.pid
        assert self._process.stderr is not None
        self._stderr = self._process.stderr
        os.set_blocking(self._stderr.fileno(), False)

    def run(self, job: Job, data: memoryview, seconds: float) -> Reply | None:
        """Return the reply, or None if the process has died or was ended after `seconds`."""
        mapping = self._mapped(job.pixels_at + job.header.num_pixels * 3)
        mapping[: len(data)] = data
        job = msgspec.structs.replace(job, memory_size=len(mapping))
        self._connection.settimeout(seconds)
        try:
            self._connection.send(msgspec.msgpack.encode(job))
            message = self._connection.recv(MAX_MESSAGE)
        except TimeoutError:
            self.timed_out = True
            return None
        except OSError:
            return None
        return _REPLIES.decode(message) if message else None

    def pixels(self, job: Job, reply: Decoded, allocate: Allocate) -> Pixels:
        """Copy the pixels out of the shared memory."""
        assert self._mapping is not None
        size = job.header.num_pixels * 3
        pixels_HWC = allocate((reply.height, reply.width, 3))
        decoded_N = np.frombuffer(self._mapping, np.uint8, size, job.pixels_at)
        np.copyto(pixels_HWC, decoded_N.reshape(pixels_HWC.shape))
        return pixels_HWC

    def trim(self) -> None:
        """Free the memory of a large image."""
        if self._mapping is not None and len(self._mapping) > _KEPT_BYTES:
            self._mapping.madvise(mmap.MADV_REMOVE, _KEPT_BYTES, len(self._mapping) - _KEPT_BYTES)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Kill the process unless it has died; return its exit code."""
        if not self.timed_out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_TIMEOUT)  # it may be dying
        self._process.kill()
        code = self._process.wait()
        if self._memory >= 0:
            self.log_stderr()
            self._stderr.close()
            self._connection.close()
            os.close(self._memory)
            self._memory = -1
        return code

    def log_stderr(self) -> None:
        """Log the process's stderr: library warnings and crash stacks."""
        while written := self._stderr.read(_MAX_LOGGED):
            _log.info("image_decoder_stderr", pid=self.pid, text=written.decode(errors="replace"))

    def _mapped(self, size: int) -> mmap.mmap:
        if self._mapping is None or len(self._mapping) < size:
            size = max(_KEPT_BYTES, -(-size // PAGE) * PAGE)
            os.ftruncate(self._memory, size)
            self._mapping = mmap.mmap(self._memory, size)
        return self._mapping


def _environment() -> dict[str, str]:
    points = os.environ.get(failpoints.VARIABLE)
    return sandbox.environment(**({} if points is None else {failpoints.VARIABLE: points}))
