"""Writes log lines in batches."""

from __future__ import annotations

import asyncio
import atexit
import select
import threading
from collections.abc import Iterator
from typing import IO


def num_dropped() -> int:
    """Lines that could not be written."""
    return 0


DELAY = 0.05  # seconds that a line may be buffered


class LogWriter:
    """A structlog logger that writes lines to a file, in order. Any thread may use it.

    Within an event loop, lines below a warning are buffered for up to `DELAY`. Warnings, errors and
    lines from outside a loop are written at once, after the buffered lines. Exit writes the rest.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._buffered: list[bytes] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # has scheduled a flush
        atexit.register(self.flush)

    def later(self, *lines: bytes) -> None:
        with self._lock:
            self._buffered += lines
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(DELAY, self.flush)

    def now(self, line: bytes) -> None:
        with self._lock:
            self._buffered.append(line)
        self.flush()

    def flush(self) -> None:
        with self._lock:
            self._loop = None
            lines, self._buffered = self._buffered, []
            for batch in _batches(lines):
                self._file.write(batch)
                self._file.flush()

    debug = info = msg = later
    warning = warn = error = err = critical = fatal = exception = failure = log = now


def _batches(lines: list[bytes]) -> Iterator[bytes]:
    """Join lines up to PIPE_BUF, because other processes may write to the same pipe."""
    begin = size = 0
    for at, length in enumerate(map(len, lines)):
        size += length + 1
        if size > select.PIPE_BUF and at > begin:
            yield b"\n".join((*lines[begin:at], b""))
            begin, size = at, length + 1
    if lines:
        yield b"\n".join((*lines[begin:], b""))
