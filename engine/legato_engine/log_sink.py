"""Log lines on their way to standard error, which may be slow, full, or gone.

A thread writes them, so that no caller ever waits for a reader or fails with the file. Lines that
find the queue full, or that the file refuses, are dropped and counted; a line says so when the file
takes lines again.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator

CAPACITY = 4 * 1024 * 1024  # bytes of queued lines
NEW_LINE = b"\r\x1b[2K"
"""Begins a line on a terminal: a progress bar may stand there, which draws itself again below."""

DELAY = 0.05  # seconds that a line may wait for others
EXIT_FLUSH = 0.5  # seconds that the end of the process waits for the file

_total_dropped = 0


def lines_dropped() -> int:
    """Log lines that this process has dropped."""
    return _total_dropped


class LogSink:
    """Writes lines to a file descriptor, in order. Any thread may use it; no method raises.

    `report` renders the line that tells how many were dropped.
    """

    def __init__(
        self, descriptor: int, report: Callable[[int], bytes], *, capacity: int = CAPACITY
    ) -> None:
        self._descriptor = descriptor
        self._report = report
        self._capacity = capacity
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._size = 0  # bytes of `_lines`
        self._untold = 0  # dropped lines that no line has reported
        self._thread: threading.Thread | None = None
        self._queued = threading.Event()
        self._hurry = threading.Event()
        self._writing = False
        atexit.register(self.flush, EXIT_FLUSH)

    def later(self, *lines: bytes) -> None:
        """Write within `DELAY`, together with others."""
        self._add(lines)

    def now(self, *lines: bytes) -> None:
        """Write as soon as the file takes it."""
        self._add(lines)
        self._hurry.set()

    def flush(self, seconds: float) -> bool:
        """Wait `seconds` at most for the file; return whether all lines are written or dropped."""
        until = time.monotonic() + seconds
        while self._busy():
            self._hurry.set()
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)
        return True

    debug = info = msg = later
    warning = warn = error = err = critical = fatal = exception = failure = log = now

    def _add(self, lines: tuple[bytes, ...]) -> None:
        with self._lock:
            for line in lines:
                if self._size + len(line) > self._capacity:
                    self._drop(1)
                else:
                    self._lines.append(line)
                    self._size += len(line) + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="legato-log", daemon=True)
                self._thread.start()
        if not self._queued.is_set():
            self._queued.set()

    def _busy(self) -> bool:
        with self._lock:
            return bool(self._lines) or self._writing

    def _drop(self, count: int) -> None:
        global _total_dropped
        _total_dropped += count
        self._untold += count

    def _run(self) -> None:
        while True:
            self._queued.wait()
            self._hurry.wait(DELAY)
            self._hurry.clear()
            self._queued.clear()
            with self._lock:
                lines, self._lines, self._writing = self._lines, [], True
                self._size = 0
            for batch in _batches(lines):
                self._write(batch)
            with self._lock:
                self._writing = False

    def _write(self, lines: list[bytes]) -> None:
        written = self._put(b"\n".join((*lines, b"")))
        with self._lock:
            if not written:
                self._drop(len(lines))
                return
            untold, self._untold = self._untold, 0
        if untold and not self._put(self._report(untold) + b"\n"):
            with self._lock:
                self._untold += untold

    def _put(self, data: bytes) -> bool:
        """Write all; the file may make this thread wait, or refuse."""
        try:
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another process made the file non-blocking
                    select.select((), (self._descriptor,), ())
        except (OSError, ValueError):
            return False
        return True


class SinkHandler(logging.Handler):
    """Sends the standard library's records to a sink."""

    def __init__(self, sink: LogSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self._sink.now(self.format(record).encode(errors="replace"))


def standard_error() -> int:
    """Return the descriptor of standard error, or of the null device without one."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # closed when this process was started
        descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        sys.stderr = open(descriptor, "w", closefd=False)  # noqa: SIM115 - open to the end
        return descriptor


def _batches(lines: list[bytes]) -> Iterator[list[bytes]]:
    """Group lines up to PIPE_BUF, because other processes may write to the same pipe."""
    begin = size = 0
    for at, length in enumerate(map(len, lines)):
        size += length + 1
        if size > select.PIPE_BUF and at > begin:
            yield lines[begin:at]
            begin, size = at, length + 1
    if lines:
        yield lines[begin:]
