"""Pictures from the thread that takes them to the thread that sends them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from legato_client.live.shot import Shot


class Mailbox:
    """Holds one picture. A newer one takes its place, or waits for it where `every` is to be sent.

    One thread puts and one takes. What is held when it closes can still be taken.
    """

    def __init__(self, every: bool) -> None:
        self._every = every
        self._changed = threading.Condition()
        self._shot: Shot | None = None
        self._closed = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is held, and nothing will be."""
        with self._changed:
            return self._closed and self._shot is None

    def put(self, shot: Shot) -> int:
        """Return how many pictures will never be taken because of this: an older one, or this."""
        with self._changed:
            if self._every:
                self._changed.wait_for(lambda: self._shot is None or self._closed)
            if self._closed:
                return 1
            replaced = int(self._shot is not None)
            self._shot = shot
            self._changed.notify_all()
            return replaced

    def take(self, gives_up: Callable[[], bool]) -> Shot | None:
        """Wait for a picture; None once it is closed, or `gives_up` at a `nudge`."""
        with self._changed:
            self._changed.wait_for(lambda: self._shot is not None or self._closed or gives_up())
            if gives_up():
                return None
            shot, self._shot = self._shot, None
            self._changed.notify_all()
            return shot

    def nudge(self) -> None:
        """Let a thread that takes ask again whether it gives up."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> int:
        """Close, and return how many pictures were held."""
        with self._changed:
            held, self._shot = int(self._shot is not None), None
            self._closed = True
            self._changed.notify_all()
            return held
