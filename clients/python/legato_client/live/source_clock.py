"""When a picture was taken, by a camera whose clock is another."""

from __future__ import annotations

_WINDOW_NS = 10_000_000_000


class SourceClock:
    """Maps a source's own times to this computer's, by the picture that arrived the fastest.

    What takes longer than that one, in the network or in decoding, counts as age. The fastest is
    that of the last 10 to 20 seconds, so that clocks may run apart.
    """

    def __init__(self) -> None:
        self._offset_ns: int | None = None  # the least of this window
        self._before_ns: int | None = None  # and of the one before
        self._window_ends_ns = 0

    def captured_ns(self, seconds: float, arrived_ns: int) -> int:
        """`seconds` are of the source's clock, the others count from the Unix epoch."""
        own_ns = round(seconds * 1e9)
        offset_ns = arrived_ns - own_ns
        if arrived_ns >= self._window_ends_ns or self._offset_ns is None:
            self._before_ns, self._offset_ns = self._offset_ns, offset_ns
            self._window_ends_ns = arrived_ns + _WINDOW_NS
        self._offset_ns = min(self._offset_ns, offset_ns)
        before_ns = self._offset_ns if self._before_ns is None else self._before_ns
        return own_ns + min(self._offset_ns, before_ns)
