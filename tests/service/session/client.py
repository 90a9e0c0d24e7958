"""A client of one session, which checks that each frame has one outcome."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from legato.v1 import media_pb2, session_pb2, task_pb2
from legato_client._grpc.transport import ServerStatus

from tests.grammar import Grammar
from tests.service.fakes import FakeEngine, answer
from tests.service.harness import Running, image_message, refusal, until

DETECT = task_pb2.Task(task_id="cups", detect=task_pb2.DetectTask(object="cup"))
QUERY = task_pb2.Task(task_id="count", query=task_pb2.QueryTask(question="How many?"))
IMAGE = image_message()


def opening(**fields: Any) -> session_pb2.SessionOpen:
    """Return a valid opening with one standing task and these fields."""
    return session_pb2.SessionOpen(**{"standing_tasks": [DETECT], **fields})


class SessionClient:
    """Reads all messages in an asyncio task, and keeps them in the lists below."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._status = ServerStatus(call)
        self.opened = session_pb2.SessionOpened()
        self.messages: list[session_pb2.SessionResponse] = []
        self.sent: dict[int, media_pb2.FrameStamp] = {}
        self.accepted: list[int] = []
        self.results: dict[int, list[task_pb2.TaskResult]] = collections.defaultdict(list)
        self.whole: set[int] = set()
        self.dropped: dict[int, session_pb2.FrameDropped] = {}
        self.deltas: dict[tuple[int, str], Grammar] = collections.defaultdict(Grammar)
        self._news = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._reader = asyncio.create_task(self._read())

    # ------------------------------------------------------------ saying

    async def send(self, **fields: Any) -> None:
        """Send a message; a session that has ended loses it, and its reader has the status."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(session_pb2.SessionRequest(**fields))

    async def frame(self, sequence: int, **fields: Any) -> None:
        """Send a frame with a small image."""
        stamp = fields.pop("stamp", media_pb2.FrameStamp(frame_id="cam", sequence=sequence))
        self.sent[sequence] = stamp
        await self.send(frame=session_pb2.Frame(stamp=stamp, **{"image": IMAGE, **fields}))

    async def done(self) -> None:
        """Half-close."""
        await self.call.done_writing()

    def pause(self) -> None:
        """Stop reading."""
        self._reading.clear()

    def resume(self) -> None:
        """Read again."""
        self._reading.set()

    # ------------------------------------------------------------ hearing

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds; fail when the session ends before."""
        while not condition():
            assert not self._reader.done(), f"it ended with {await self.code()}"
            self._news.clear()
            waiting = asyncio.ensure_future(self._news.wait())
            await asyncio.wait({waiting, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()

    async def outcome(self, *sequences: int) -> None:
        """Wait until these frames have their outcomes."""
        await self.wait_for(lambda: set(sequences) <= self.whole | set(self.dropped))

    def kinds(self) -> list[str | None]:
        """Return the kinds of the messages, in order."""
        return [message.WhichOneof("message") for message in self.messages]

    async def end(self) -> None:
        """Wait for the end, which must be OK, with one outcome for each frame."""
        await self._reader
        assert await self.call.code() is grpc.StatusCode.OK
        self.balance()

    def balance(self) -> None:
        """Each frame that was sent has one outcome."""
        assert self.whole | set(self.dropped) == set(self.sent)

    async def failure(self) -> Any:
        """Wait for the end, which must be a failure."""
        return await refusal(self._reader, self._status)

    async def code(self) -> Any:
        """Return the status code."""
        return await self.call.code()

    # ------------------------------------------------------------ the reader

    async def _read(self) -> None:
        while True:
            await self._reading.wait()
            message = await self.call.read()
            if message is grpc.aio.EOF:
                if await self.call.code() is not grpc.StatusCode.OK:
                    await self.call  # raises
                return
            self._check(message)
            self._news.set()

    def _check(self, message: session_pb2.SessionResponse) -> None:
        assert message.index == len(self.messages)
        self.messages.append(message)
        kind = message.WhichOneof("message")
        assert (kind == "opened") == (message.index == 0)
        if kind == "opened":
            self.opened = message.opened
        elif kind == "accepted":
            assert message.accepted.sequence not in self.whole | set(self.dropped)
            self.accepted.append(message.accepted.sequence)
        elif kind == "dropped":
            sequence = message.dropped.sequence
            assert sequence not in set(self.results) | set(self.dropped)
            self.dropped[sequence] = message.dropped
            assert message.dropped.dropped_total == len(self.dropped)
        elif kind == "delta":
            grammar = self.deltas[message.delta.sequence, message.delta.task_id]
            grammar.feed(message.delta.event)
        elif kind == "result":
            self._check_result(message.result)

    def _check_result(self, message: session_pb2.FrameResult) -> None:
        sequence = message.stamp.sequence
        assert message.stamp == self.sent[sequence]
        assert sequence not in self.whole | set(self.dropped)
        self.results[sequence].append(message.result)
        if message.last_for_frame:
            self.whole.add(sequence)


@asynccontextmanager
async def session(server: Running, **fields: Any) -> AsyncIterator[SessionClient]:
    """Yield an open session, which is cancelled at the end unless it ended."""
    client = SessionClient(server.sessions.Session())
    await client.send(open=opening(**fields))
    await client.wait_for(lambda: client.messages)
    try:
        yield client
    finally:
        client.call.cancel()
        client._reader.cancel()
        await asyncio.wait({client._reader})


def seconds(value: float) -> duration_pb2.Duration:
    """A duration."""
    message = duration_pb2.Duration()
    message.FromMilliseconds(round(value * 1000))
    return message


def reason_of(result: task_pb2.TaskResult) -> str:
    """The reason of a failed task."""
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in result.error.details)
    return info.reason


async def settled(server: Running) -> None:
    """Check that nothing is held: no session, no request, no blob."""
    await until(lambda: len(server.server.requests) == 0 and len(server.server.sessions) == 0)
    assert not server.engine.streams
    assert len(server.engine.blobs) == 0


async def begun(server: Running, count: int = 1) -> None:
    """Wait until so many requests have reached the engine."""
    await until(lambda: len(server.engine.requests) >= count)


def answer_all(engine: FakeEngine) -> None:
    """Complete all requests of the engine."""
    for stream in list(engine.streams.values()):
        answer(engine, stream)
