"""The open sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from legato_engine.errors import Draining, LegatoError, Preempted

from legato_service.errors import SessionsFull


class OpenSession(Protocol):
    """The ways to end a session from outside."""

    def fail(self, error: LegatoError) -> None: ...

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Running work may go on for `time_left` seconds. None is no failure."""
        ...


class SessionRegistry:
    """At most `limit` sessions, including those that are being opened."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, OpenSession | None] = {}  # None while being opened
        self._going_away: tuple[float, LegatoError | None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    @contextmanager
    def reserve(self, session_id: str) -> Iterator[None]:
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
        self._sessions[session_id] = None
        self._empty.clear()
        try:
            yield
        finally:
            del self._sessions[session_id]
            if not self._sessions:
                self._empty.set()

    def opened(self, session_id: str, session: OpenSession) -> None:
        """The session goes away at once if all have to."""
        self._sessions[session_id] = session
        if self._going_away is not None:
            session.go_away(*self._going_away)

    def abort(self, session_id: str) -> bool:
        """End one session with ABORTED PREEMPTED; return whether it was open."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.fail(Preempted("an operator stopped the session"))
        return session is not None

    def abort_all(self) -> int:
        return sum(self.abort(session_id) for session_id in list(self._sessions))

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
