"""Callers that use the shipped client without a pause, and what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from legato_client import (
    AsyncClient,
    AsyncSession,
    Finished,
    FrameDropped,
    FrameResult,
    GoAway,
    LegatoError,
    QueryResult,
    QueryTask,
    Sampling,
    TextDelta,
)

from tests.service.harness import image_bytes

_IMAGE = image_bytes()
_LONG = QueryTask("How many?", sampling=Sampling(max_tokens=60))


@dataclasses.dataclass
class Traffic:
    """Written by the callers' thread."""

    answered: int = 0
    slowest: float = 0.0  # seconds
    finished: int = 0  # streams
    resumed: int = 0  # times that another server went on with one
    answers: set[str] = dataclasses.field(default_factory=set)  # of streams: theirs are all equal
    failures: list[str] = dataclasses.field(default_factory=list)
    stream_failures: list[str] = dataclasses.field(default_factory=list)
    frames: int = 0  # answered
    moved: int = 0  # sessions that were told to go away
    session_failures: list[str] = dataclasses.field(default_factory=list)

    def wait_for(self, answers: int) -> None:
        """Until that many more calls were answered."""
        goal = self.answered + answers
        while self.answered < goal:
            time.sleep(0.01)


@contextlib.contextmanager
def traffic(
    target: str, *, callers: int = 8, streams: int = 0, sessions: int = 0
) -> Iterator[Traffic]:
    """Calls, streams and sessions until the block ends; what runs then is waited for."""
    seen = Traffic()
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_call(target, seen, stop, callers, streams, sessions)),
        daemon=True,
    )
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


async def _call(
    target: str, seen: Traffic, stop: threading.Event, callers: int, streams: int, sessions: int
) -> None:
    async with AsyncClient(target) as client:
        calls = [_unary(client, seen, stop) for _ in range(callers)]
        calls += [_stream(client, seen, stop) for _ in range(streams)]
        calls += [_session(client, seen, stop, f"robot-{n}") for n in range(sessions)]
        await asyncio.gather(*calls)


async def _session(client: AsyncClient, seen: Traffic, stop: threading.Event, name: str) -> None:
    """A robot: a frame at a time, in another session once it is told to go away."""
    while not stop.is_set():
        try:
            async with client.session([QueryTask("How many?")], name=name) as session:
                await _frames(session, seen, stop)
        except LegatoError as error:
            seen.session_failures.append(f"{error.code} {error.reason} {error}")


async def _frames(session: AsyncSession, seen: Traffic, stop: threading.Event) -> None:
    going = False
    while not going and not stop.is_set():
        await session.send(_IMAGE)
        async for answer in session:
            if isinstance(answer, GoAway):
                going = True
                seen.moved += 1
            elif isinstance(answer, FrameResult):
                _ = answer.result
                seen.frames += 1
                break
            elif isinstance(answer, FrameDropped):
                assert going, f"dropped: {answer.reason}"
                break


async def _unary(client: AsyncClient, seen: Traffic, stop: threading.Event) -> None:
    while not stop.is_set():
        start = time.monotonic()
        try:
            await client.query(None, "How many?")
            seen.answered += 1
        except LegatoError as error:
            seen.failures.append(f"{error.code} {error.reason} {error}")
        seen.slowest = max(seen.slowest, time.monotonic() - start)


async def _stream(client: AsyncClient, seen: Traffic, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            told = ""
            async for event in client.generate(None, _LONG):
                if isinstance(event, TextDelta):
                    told += event.text
                elif isinstance(event, Finished):
                    assert isinstance(event.result, QueryResult)
                    assert told == event.result.answer, "a word was lost or doubled"
                    seen.resumed += event.result.info.resumptions
            seen.answers.add(told)
            seen.finished += 1
        except LegatoError as error:
            seen.stream_failures.append(f"{error.code} {error.reason} {error}")
