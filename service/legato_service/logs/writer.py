"""Log lines on their way out: those of an instant are written together."""

from __future__ import annotations

import asyncio
import atexit
import select
import threading
from collections.abc import Iterator
from typing import IO

DELAY = 0.05  # seconds that a line may wait for others


class LogWriter:
    """Writes lines to a file, in order; a logger of structlog's kind.

    Within an event loop a line below a warning waits for others, at most `DELAY`. Warnings and
    worse, and lines from elsewhere, leave at once and take with them what waited. What still waits
    when the process ends in order is written then.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # that will flush
        atexit.register(self.flush)

    def later(self, *lines: bytes) -> None:
        """Lines that can wait."""
        with self._lock:
            self._waiting += lines
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(DELAY, self.flush)

    def now(self, line: bytes) -> None:
        """A line that cannot."""
        with self._lock:
            self._waiting.append(line)
        self.flush()

    def flush(self) -> None:
        """Write all that waits."""
        with self._lock:
            self._loop = None
            lines, self._waiting = self._waiting, []
            for batch in _batches(lines):
                self._file.write(batch)
                self._file.flush()

    debug = info = msg = later
    warning = warn = error = err = critical = fatal = exception = failure = log = now


def _batches(lines: list[bytes]) -> Iterator[bytes]:
    """The lines in pieces that a pipe takes whole: other processes may write to the same one."""
    begin = size = 0
    for at, length in enumerate(map(len, lines)):
        size += length + 1
        if size > select.PIPE_BUF and at > begin:
            yield b"\n".join((*lines[begin:at], b""))
            begin, size = at, length + 1
    if lines:
        yield b"\n".join((*lines[begin:], b""))
