"""The open sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from legato_engine.core.request_key import RequestKey
from legato_engine.errors import Draining, LegatoError, Preempted

from legato_service.errors import SessionsFull
from legato_service.session.totals import SessionTotals


class OpenSession(Protocol):
    """A session from outside."""

    @property
    def waits_for_credits(self) -> bool:
        """Whether its client must grant credits for what waits to be sent."""
        ...

    def fail(self, error: LegatoError) -> None: ...

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Running work may go on for `time_left` seconds. None is no failure."""
        ...


class SessionRegistry:
    """At most `limit` sessions by key, including those that are being opened.

    Tenants may have sessions of the same id.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.totals = SessionTotals()
        self._sessions: dict[RequestKey, OpenSession | None] = {}  # None while being opened
        self._going_away: tuple[float, LegatoError | None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    @contextmanager
    def reserve(self, key: RequestKey) -> Iterator[None]:
        """Reserve a place for the length of the block.

        Raises:
            Draining: the server is shutting down.
            SessionsFull: the limit of sessions is reached.
        """
        if self._going_away is not None:
            raise Draining("the server is shutting down")
        if len(self._sessions) >= self._limit:
            raise SessionsFull(
                f"{self._limit} sessions are open, which is the limit", limit=self._limit
            )
        self._sessions[key] = None
        self._empty.clear()
        try:
            yield
        finally:
            del self._sessions[key]
            if not self._sessions:
                self._empty.set()

    def opened(self, key: RequestKey, session: OpenSession) -> None:
        """The session goes away at once if all have to."""
        self._sessions[key] = session
        if self._going_away is not None:
            session.go_away(*self._going_away)

    @property
    def num_waiting_for_credits(self) -> int:
        return sum(each is not None and each.waits_for_credits for each in self._sessions.values())

    def abort(self, target: RequestKey) -> int:
        """End matching sessions with ABORTED PREEMPTED; return how many were open."""
        matching = (each for key, each in self._sessions.items() if key.matches(target))
        return _abort(matching)

    def abort_all(self) -> int:
        return _abort(self._sessions.values())

    def fail_all(self, error: LegatoError) -> None:
        """End them without the results of their frames."""
        for session in self._sessions.values():
            if session is not None:
                session.fail(error)

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Sessions that open later go away too."""
        self._going_away = (time_left, reason)
        for session in self._sessions.values():
            if session is not None:
                session.go_away(time_left, reason)

    async def wait_empty(self) -> None:
        await self._empty.wait()


def _abort(sessions: Iterable[OpenSession | None]) -> int:
    opened = [session for session in sessions if session is not None]
    for session in opened:
        session.fail(Preempted("an operator stopped the session"))
    return len(opened)
