"""The sessions that are open on this server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from legato_engine.errors import Draining, LegatoError, Preempted

from legato_service.errors import SessionsFull


class Endable(Protocol):
    """A session, as whoever ends it sees it."""

    def fail(self, error: LegatoError) -> None:
        """End it now with this error; its running work is aborted."""
        ...

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Announce its end; running work may go on for `time_left` seconds. None is no failure."""
        ...


class SessionRegistry:
    """Knows the sessions by their ids, at most `limit` at a time, those being opened included."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, Endable | None] = {}
        self._going: tuple[float, LegatoError | None] | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        """Whether a session of this id is open."""
        return session_id in self._sessions

    @contextmanager
    def place(self, session_id: str) -> Iterator[None]:
        """Keep a place for the length of the block. Raises `Draining` or `SessionsFull`."""
        if self._going is not None:
            raise Draining("the server is shutting down")
        if len(self._sessions) >= self._limit:
            raise SessionsFull("as many sessions are open as may be", limit=self._limit)
        self._sessions[session_id] = None
        self._empty.clear()
        try:
            yield
        finally:
            del self._sessions[session_id]
            if not self._sessions:
                self._empty.set()

    def opened(self, session_id: str, session: Endable) -> None:
        """The session of this place is open; it is told at once to go where all were told so."""
        self._sessions[session_id] = session
        if self._going is not None:
            session.go_away(*self._going)

    def abort(self, session_id: str) -> bool:
        """End one session with ABORTED PREEMPTED; whether there is one of this id."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.fail(Preempted("an operator stopped the session"))
        return session is not None

    def abort_all(self) -> int:
        """End all of them so; how many there were."""
        return sum(self.abort(session_id) for session_id in list(self._sessions))

    def go_away(self, time_left: float, reason: LegatoError | None) -> None:
        """Announce the end of all sessions, and of any that opens later."""
        self._going = (time_left, reason)
        for session in self._sessions.values():
            if session is not None:
                session.go_away(time_left, reason)

    async def wait_empty(self) -> None:
        """Until the last session has ended."""
        await self._empty.wait()
