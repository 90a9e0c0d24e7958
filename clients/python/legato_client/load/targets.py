"""The targets of a load, on bare stubs, which cost little."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message
from legato.v1 import media_pb2, session_pb2

from legato_client._errors import from_rpc_error
from legato_client._grpc.channel import GENERATE, OF_SKILLS, SESSION_PATH
from legato_client.load.plan import LoadPlan
from legato_client.load.report import RequestMeasurement

_RESPONSES: dict[str, type[Message]] = {
    method.path: method.response for method in (*OF_SKILLS.values(), GENERATE)
}
_PROGRESS = ("queued", "started", "heartbeat")  # events that answer nothing yet


class CallFailed(Exception):
    """A session's frame that got no results; the message is the reason."""


def reason_of(error: grpc.RpcError | CallFailed) -> str:
    """Return the error's reason, or its status if the server gave no reason."""
    if isinstance(error, CallFailed):
        return str(error)
    known = from_rpc_error(error)
    return known.reason or known.code


class CallTarget:
    """Target with one call for each request: unary, or Generate to its end."""

    def __init__(self, channel: grpc.aio.Channel, plan: LoadPlan) -> None:
        self._plan = plan
        self._streams = plan.kind == "stream"
        start: Any = channel.unary_stream if self._streams else channel.unary_unary
        path = GENERATE.path if self._streams else plan.path
        self._call = start(path, response_deserializer=_RESPONSES[path].FromString)

    async def open(self) -> None:
        pass

    async def send(self, watch: RequestMeasurement) -> None:
        """Send one request and record its messages. Raises `grpc.RpcError`."""
        plan = self._plan
        call = self._call(plan.request, timeout=plan.timeout, metadata=plan.security.metadata())
        if not self._streams:
            await call
            watch.message(answers=True)
            return
        async for response in call:
            watch.message(answers=response.WhichOneof("event") not in _PROGRESS)

    async def close(self) -> None:
        pass


class SessionTarget:
    """Frames over sessions that stay open, in turn."""

    def __init__(self, channel: grpc.aio.Channel, plan: LoadPlan, sessions: int) -> None:
        parse = session_pb2.SessionResponse.FromString
        start: Any = channel.stream_stream(SESSION_PATH, response_deserializer=parse)
        self._sessions = [_Session(start, plan) for _ in range(max(sessions, 1))]
        self._num_sent = 0

    async def open(self) -> None:
        """Open the session. Raises `grpc.RpcError` if it is refused."""
        await asyncio.gather(*(session.open() for session in self._sessions))

    async def send(self, watch: RequestMeasurement) -> None:
        session = self._sessions[self._num_sent % len(self._sessions)]
        self._num_sent += 1
        await session.send(watch)

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))


class _Session:
    """Open session with a reading task."""

    def __init__(self, start: Any, plan: LoadPlan) -> None:
        self._plan = plan
        self._start = start
        self._image = media_pb2.Image.FromString(plan.image)
        self._waiting: dict[int, tuple[RequestMeasurement, asyncio.Future[None]]] = {}
        self._sequence = 0
        self._ended = ""  # why, once no more results come
        self._writing = asyncio.Lock()  # grpc takes one write at a time
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._call = self._start(metadata=self._plan.security.metadata())
        await self._call.write(self._plan.request)
        opened = await self._call.read()
        if opened is grpc.aio.EOF:
            raise CallFailed(f"session ended with {(await self._call.code()).name}")
        self._reader = asyncio.create_task(self._read())

    async def send(self, watch: RequestMeasurement) -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._writing:
            if self._ended:
                raise CallFailed(self._ended)
            self._sequence += 1
            sequence = self._sequence
            self._waiting[sequence] = (watch, ended)
            frame = session_pb2.Frame(stamp=media_pb2.FrameStamp(sequence=sequence))
            frame.image.CopyFrom(self._image)
            await self._call.write(session_pb2.SessionRequest(frame=frame).SerializeToString())
        try:
            async with asyncio.timeout(self._plan.timeout):
                await ended
        except TimeoutError:
            raise CallFailed("NO_RESULT") from None
        finally:
            self._waiting.pop(sequence, None)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._call is not None:
            self._call.cancel()

    async def _read(self) -> None:
        reason = "SESSION_ENDED"
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self._take(response)
        except grpc.RpcError as error:
            reason = reason_of(error)
        finally:
            self._ended = reason
            for _, ended in self._waiting.values():
                _fail(ended, reason)

    def _take(self, response: session_pb2.SessionResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "dropped":
            name = session_pb2.DropReason.Name(response.dropped.reason)
            _, ended = self._waiting.get(response.dropped.sequence, (None, None))
            _fail(ended, name.removeprefix("DROP_REASON_"))
        elif kind in ("delta", "result"):
            last = kind == "result" and response.result.last_for_frame
            sequence = (
                response.delta.sequence if kind == "delta" else response.result.stamp.sequence
            )
            watch, ended = self._waiting.get(sequence, (None, None))
            if watch is not None:
                watch.message(answers=True)
            if last and ended is not None and not ended.done():
                ended.set_result(None)


def _fail(ended: asyncio.Future[None] | None, reason: str) -> None:
    if ended is not None and not ended.done():
        ended.set_exception(CallFailed(reason))


def make_target(channel: grpc.aio.Channel, plan: LoadPlan, share: int) -> LoadTarget:
    if plan.kind == "session":
        return SessionTarget(channel, plan, len(range(share, plan.sessions, plan.senders)))
    return CallTarget(channel, plan)


LoadTarget = CallTarget | SessionTarget
