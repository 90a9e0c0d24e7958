"""The servers that serve now, as their replicas say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_AGE = 5.0
"""Seconds after which a replica that says nothing more is not listed."""


@dataclass(frozen=True)
class _Entry:
    health_address: str
    time: float  # of the clock


class Directory:
    """An actor of this class is where replicas and writers of endpoints meet.

    It may lose everything: replicas repeat themselves, and a writer drops no server that serves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def put(self, address: str, health_address: str) -> None:
        """List a serving server. To be repeated more often than every `MAX_AGE`."""
        self._entries[address] = _Entry(health_address, self._clock())

    def drop(self, address: str) -> None:
        """Remove a server that is about to stop, or does not serve."""
        self._entries.pop(address, None)

    def servers(self) -> Mapping[str, str]:
        """Health addresses by address."""
        oldest = self._clock() - MAX_AGE
        self._entries = {a: e for a, e in self._entries.items() if e.time >= oldest}
        return {address: entry.health_address for address, entry in self._entries.items()}
