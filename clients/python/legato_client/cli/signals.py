"""The end of a command that runs until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def calling(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop`, which must not wait. For the main thread."""
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
