"""Requests of the engine by id."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from legato_engine.core.request_key import RequestKey
from legato_engine.engine.request_stages import Stage

_Future = concurrent.futures.Future[Any]


class RequestTable:
    """Every request and image lease that the engine has accepted and not finished.

    The next stage of a request is a new entry. Belongs to the engine's main thread; `wake` runs on
    the thread that completes a future.
    """

    def __init__(self, *, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._entries: dict[RequestKey, Stage] = {}
        self._completed: collections.deque[tuple[RequestKey, _Future]] = collections.deque()
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestKey) -> bool:
        return request_id in self._entries

    def add(self, entry: Stage) -> None:
        assert entry.request_id not in self._entries, (
            f"request id {entry.request_id.name} is in use"
        )
        self._entries[entry.request_id] = entry
        self._next_deadline = min(self._next_deadline, entry.deadline)
        self.watch(entry)

    def get(self, request_id: RequestKey) -> Stage | None:
        return self._entries.get(request_id)

    def remove(self, request_id: RequestKey) -> Stage | None:
        return self._entries.pop(request_id, None)

    def watch(self, entry: Stage) -> None:
        """Have `completed` yield the entry after each of its present futures."""
        for future in entry.futures:
            # The callback must not hold the future: the cycle would keep its image alive until a
            # full garbage collection, which hardly ever runs.
            future.add_done_callback(functools.partial(self._on_completed, entry.request_id))

    # ------------------------------------------------------------ completion

    @property
    def has_completed(self) -> bool:
        return bool(self._completed)

    def completed(self) -> Iterator[Stage]:
        """Yield an entry for each completed future."""
        while self._completed:
            request_id, future = self._completed.popleft()
            entry = self._entries.get(request_id)
            is_current = entry is not None and future in entry.futures
            del future  # its image must not outlive the request
            if entry is not None and is_current:
                yield entry

    # ------------------------------------------------------------ deadlines and capacity

    @property
    def next_deadline(self) -> float:
        """A lower bound of the entries' deadlines."""
        return self._next_deadline

    def expired(self, now: float) -> list[Stage]:
        """Return the entries whose deadline has passed, for the caller to remove."""
        if now < self._next_deadline:
            return []
        left = (each.deadline for each in self._entries.values() if each.deadline > now)
        self._next_deadline = min(left, default=math.inf)
        return [each for each in self._entries.values() if each.deadline <= now]

    def queued_tenants(self) -> list[str]:
        return [each.tenant for each in self._entries.values() if each.takes_queue_place]

    def newest(self, stage: type[Stage], tenant: str) -> Stage | None:
        newest_first = (self._entries[key] for key in reversed(self._entries))
        return next((e for e in newest_first if isinstance(e, stage) and e.tenant == tenant), None)

    def count(self, stage: type[Stage]) -> int:
        return sum(isinstance(each, stage) for each in self._entries.values())

    def _on_completed(self, request_id: RequestKey, future: _Future) -> None:
        self._completed.append((request_id, future))
        self._wake()
