"""A session of the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import grpc.aio
from legato.v1 import session_pb2

from legato_client._client_methods import ClientMethods
from legato_client._errors import (
    LegatoError,
    from_rpc_error,
)
from legato_client._grpc import channel
from legato_client._grpc.transport import AsyncTransport, ServerStatus
from legato_client._images.sources import ImageInput, SharedFrame
from legato_client._session.state import SessionPlan, SessionState
from legato_client._types import tasks as _tasks
from legato_client._types.results import FrameStamp, TrackNow
from legato_client._types.server import Answer, SessionStats, SessionTerms

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


class AsyncSession:
    """A stream of frames and their results; made by `AsyncClient.session`.

        async with client.session([DetectTask("cup")], max_frame_age=0.2) as session:
            await session.send(frame)
            async for answer in session:
                ...

    Send in one task and iterate in another, or in one task if you keep reading, because the
    server's credits limit the frames in flight. Reading and writing have tasks of their own, so
    that cancelling a caller does not end the stream: gRPC ends a call when one of its reads or
    writes is cancelled.

    Iterating ends when the session is finished or closed.

    Raises:
        LegatoError: From iterating and sending, once the session has failed.
    """

    def __init__(self, calls: ClientMethods, connection: AsyncTransport, plan: SessionPlan) -> None:
        self._calls = calls
        self._connection = connection
        self._plan = plan
        self._state = SessionState(plan.window, plan.opening.standing_tasks, plan.max_frame_age)
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()  # None: the end
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: half-close
        self._progress = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: _Call | None = None

    @property
    def terms(self) -> SessionTerms:
        """Return the terms that the server granted."""
        return self._state.granted()

    @property
    def stats(self) -> SessionStats:
        """Frames so far."""
        return self._state.stats

    @property
    def credits(self) -> int:
        """Frames that could be sent now without waiting."""
        return self._state.credits_left

    async def __aenter__(self) -> AsyncSession:
        pooled = self._connection.channel()
        start: grpc.aio.StreamStreamMultiCallable[Any, bytes] = pooled.channel.stream_stream(
            channel.SESSION_PATH
        )
        near = channel.of(self._plan.opening)
        self._call = call = start(metadata=self._connection.metadata(near))
        pooled.carry(call)
        self._requests.put_nowait(self._plan.first_message())
        self._tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
        ]
        try:
            await self._until_opened()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ sending

    async def send(
        self,
        image: ImageInput,
        *,
        stamp: FrameStamp | None = None,
        extra_tasks: Sequence[_tasks.Task] = (),
        skip_standing_tasks: bool = False,
        must_run: bool = False,
    ) -> int | None:
        """Send a frame; its sequence, or None when it was left out for want of room.

        A `stamp` comes back with the answers; without a sequence of its own it gets the next one.
        `extra_tasks` are for this frame only, and a frame that `must_run` is never dropped. A
        `SharedFrame` that was sent is released by the session, as soon as the server has it.

        Raises DeadlineExceeded when there was no room in time, and SessionProtocol for a sequence
        that does not grow.
        """
        if not await self._has_room():
            self._state.skip()
            return None
        self._state.reserve()
        slot = image if isinstance(image, SharedFrame) else None
        try:
            shown = await self._calls.image_message(image)
            self._state.check_takes_frames()
            sequence, message = self._state.frame(
                shown, slot, stamp, extra_tasks, skip_standing_tasks, must_run
            )
        except BaseException:
            self._state.release()
            raise
        self._requests.put_nowait(message)
        return sequence

    async def wait_for_credit(self, timeout: float) -> bool:  # noqa: ASYNC109  # as of the other face
        """Wait until a frame could be sent; False after `timeout` seconds without a credit.

        So the frame to send can be chosen when there is room for it. Raises once no frame can be
        sent any more.
        """
        self._state.check_takes_frames()
        try:
            async with asyncio.timeout(timeout):
                while not self._state.has_credit:
                    await self._next_message()
                    self._state.check_takes_frames()
        except TimeoutError:
            return False
        return True

    async def cancel(self, *, sequence: int | None = None, task_id: str | None = None) -> None:
        """Stop a frame, or all running tasks of an id; naming what has ended does nothing."""
        self._say(self._state.cancel(sequence, task_id))

    async def update_tasks(self, tasks: Sequence[_tasks.Task]) -> None:
        """Replace the standing tasks, from the next frame on."""
        self._say(self._state.update(tasks))

    async def finish(self) -> None:
        """Stop sending; iteration ends once the frames in flight are answered."""
        self._state.check_open()
        self._state.finish()
        self._requests.put_nowait(None)

    async def close(self) -> None:
        """End the session now; unanswered frames are given up. Does nothing the second time."""
        self._state.close()
        self._wake()
        if self._call is not None:
            self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ reading

    def now(self, at_ns: int | None = None) -> tuple[TrackNow, ...]:
        """Predict the tracked objects of all standing tasks, with their uncertainty.

        From the results received so far, also those not read yet. `at_ns` is the moment, on the
        clock of the stamps' capture times; None is `time.time_ns()`. An object that was not found
        in the last `Tracking.max_unseen` seconds is not among them.
        """
        return self._state.tracks.now(at_ns)

    def __aiter__(self) -> AsyncSession:
        return self

    async def __anext__(self) -> Answer:
        answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)  # so that a further read ends too
            self._state.raise_end()
            raise StopAsyncIteration
        self._state.read(answer)
        self._grant()
        return answer

    # ------------------------------------------------------------ how

    def _grant(self) -> None:
        grant = self._state.grant()
        if grant is not None:
            self._requests.put_nowait(grant)

    def _say(self, message: bytes) -> None:
        self._state.check_open()
        self._requests.put_nowait(message)

    async def _has_room(self) -> bool:
        """Wait for a credit as the plan says; False to leave the frame out."""
        self._state.check_takes_frames()
        if not self._state.has_credit and self._plan.when_full == "drop":
            return False
        try:
            async with asyncio.timeout(self._plan.send_timeout):
                while not self._state.has_credit:
                    await self._next_message()
                    self._state.check_takes_frames()
        except TimeoutError:
            raise self._plan.credit_timeout_error() from None
        return True

    async def _until_opened(self) -> None:
        try:
            async with asyncio.timeout(self._plan.open_timeout):
                while not self._state.is_open:
                    await self._next_message()
        except TimeoutError:
            raise self._plan.open_timeout_error() from None
        self._state.check_open()

    async def _next_message(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _wake(self) -> None:
        self._progress.set()
        if self._state.is_over:
            self._answers.put_nowait(None)

    def _end(self, error: LegatoError | None) -> None:
        self._state.end(error)
        self._wake()

    async def _read(self, call: _Call) -> None:
        status = ServerStatus(call)
        try:
            await self._read_all(call)
            self._end(None)
        except grpc.aio.AioRpcError as error:
            ended = await status.resolve(error)
            self._end(None if ended.code() is grpc.StatusCode.OK else from_rpc_error(ended))
        except LegatoError as error:
            call.cancel()
            self._end(error)
        finally:
            self._end(self._state.broken())

    async def _read_all(self, call: _Call) -> None:
        """Read until the stream ends with OK; raise when it ends otherwise, or falls silent.

        Iterate: `read` discards what has arrived as soon as a write has failed.
        """
        messages = aiter(call)
        while True:
            try:
                async with asyncio.timeout(self._state.patience):
                    data = await anext(messages, None)
            except TimeoutError:
                raise self._state.silence() from None
            if data is None:
                return
            message = channel.message_of(session_pb2.SessionResponse, data)
            answer = self._state.receive(message)
            if answer is not None:
                self._answers.put_nowait(answer)
            self._grant()
            self._wake()

    async def _write(self, call: _Call) -> None:
        # A write to an ended call fails; the reader finds out why it ended.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while (message := await self._requests.get()) is not None:
                await call.write(message)
            await call.done_writing()
