"""Sessions of both clients: calls written once as coroutines, and how each waits and reads."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import grpc
import grpc.aio
from legato.v1 import session_pb2

from legato_client._client_methods import ClientMethods
from legato_client._errors import DeadlineExceeded, LegatoError, from_rpc_error
from legato_client._grpc import channel
from legato_client._grpc.transport import AsyncTransport, BlockingTransport, ServerStatus, run
from legato_client._images.sources import ImageInput, SharedFrame
from legato_client._session.state import SessionPlan, SessionState
from legato_client._types import tasks as _tasks
from legato_client._types.results import FrameStamp, TrackNow
from legato_client._types.server import Answer, SessionStats, SessionTerms

P = ParamSpec("P")
ValueT = TypeVar("ValueT")

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
_END_TIMEOUT_S = 5.0


class BaseSession:
    """State of a session, under a lock that only the blocking one needs."""

    def __init__(
        self,
        calls: ClientMethods,
        plan: SessionPlan,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._calls = calls
        self._plan = plan
        self._lock = lock
        self._state = SessionState(plan.window, plan.opening.standing_tasks, plan.max_frame_age)

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

    def now(self, at_ns: int | None = None) -> tuple[TrackNow, ...]:
        """Predict the tracked objects of all standing tasks, with their uncertainty.

        From the results received so far, also those not read yet. `at_ns` is the moment, on the
        clock of the stamps' capture times; None is `time.time_ns()`. An object that was not found
        in the last `Tracking.max_unseen` seconds is not among them.
        """
        with self._lock:
            return self._state.tracks.now(at_ns)

    def _put(self, message: bytes | None) -> None:
        """Queue a message to the server; None ends this side of the stream."""
        raise NotImplementedError

    async def _wait(self, end: float) -> None:
        """Wait for a message of the server, at most until `end` of `time.monotonic()`."""
        raise NotImplementedError

    async def _until(self, is_met: Callable[[], bool], seconds: float) -> bool:
        """Wait until that holds; return False after so many seconds."""
        end = time.monotonic() + seconds
        while not is_met():
            await self._wait(end)
            if time.monotonic() >= end:
                return is_met()
        return True

    async def _until_opened(self) -> None:
        with self._lock:
            state, seconds = self._state, self._plan.open_timeout
            if not await self._until(lambda: state.is_over or state.terms is not None, seconds):
                raise DeadlineExceeded(f"the session was not opened within {seconds:g} s")
            state.check_open()

    def _may_send(self) -> bool:
        """Return whether there is a credit. Raises once no frame can be sent any more."""
        self._state.check_takes_frames()
        return self._state.credits_left > 0

    async def _has_room(self) -> bool:
        """Wait for a credit as the plan says; False to leave the frame out."""
        if not self._may_send() and self._plan.when_full == "drop":
            return False
        if not await self._until(self._may_send, self._plan.send_timeout):
            raise DeadlineExceeded(
                f"the server took no further frame within {self._plan.send_timeout:g} s: read the "
                "answers, send fewer frames, or use when_full='drop'"
            )
        return True

    def _say(self, message: bytes) -> None:
        self._state.check_open()
        self._put(message)

    def _grant(self) -> None:
        grant = self._state.grant()
        if grant is not None:
            self._put(grant)


class SessionMethods(BaseSession):
    """The calls; `AsyncSession` and `Session` show these methods as their own."""

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
        with self._lock:
            if not await self._has_room():
                self._state.count("skipped")
                return None
            self._state.reserve()
        slot = image if isinstance(image, SharedFrame) else None
        try:
            shown = await self._calls._image_message(image)
            with self._lock:
                self._state.check_takes_frames()
                sequence, message = self._state.frame(
                    shown, slot, stamp, extra_tasks, skip_standing_tasks, must_run
                )
                self._put(message)
        except BaseException:
            with self._lock:
                self._state.release()
            raise
        return sequence

    async def wait_for_credit(self, timeout: float) -> bool:  # noqa: ASYNC109 - a wait of its own
        """Wait until a frame could be sent; False after `timeout` seconds without a credit.

        So the frame to send can be chosen when there is room for it. Raises once no frame can be
        sent any more.
        """
        with self._lock:
            return await self._until(self._may_send, timeout)

    async def cancel(self, *, sequence: int | None = None, task_id: str | None = None) -> None:
        """Stop a frame, or all running tasks of an id; naming what has ended does nothing."""
        with self._lock:
            self._say(self._state.cancel(sequence, task_id))

    async def update_tasks(self, tasks: Sequence[_tasks.Task]) -> None:
        """Replace the standing tasks, from the next frame on."""
        with self._lock:
            self._say(self._state.update(tasks))

    async def finish(self) -> None:
        """Stop sending; iteration ends once the frames in flight are answered."""
        with self._lock:
            self._state.check_open()
            self._state.finish()
            self._put(None)


class AsyncSession(SessionMethods):
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
        super().__init__(calls, plan, contextlib.nullcontext())
        self._connection = connection
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()  # None: the end
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: half-close
        self._progress = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._call: _Call | None = None

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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session now; unanswered frames are given up. Does nothing the second time."""
        self._state.close()
        self._wake()
        if self._call is not None:
            self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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

    def _put(self, message: bytes | None) -> None:
        self._requests.put_nowait(message)

    async def _wait(self, end: float) -> None:
        self._progress.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
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


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, ValueT]],
) -> Callable[Concatenate[Session, P], ValueT]:
    @functools.wraps(method)
    def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> ValueT:
        return run(method(self, *args, **kwargs))

    return call


class Session(BaseSession):
    """A stream of frames and their results; made by `Client.session`.

        with client.session([DetectTask("cup")], max_frame_age=0.2) as session:
            session.send(frame)
            for answer in session:
                ...

    Send from one thread and iterate in another, or in one thread if you keep reading, because the
    server's credits limit the frames in flight. One thread reads the stream and one of gRPC's
    threads writes it, so that neither direction blocks the other.

    Iterating ends when the session is finished or closed.

    Raises:
        LegatoError: From iterating and sending, once the session has failed.
    """

    def __init__(
        self, calls: ClientMethods, connection: BlockingTransport, plan: SessionPlan
    ) -> None:
        self._changed = threading.Condition()  # guards the state and the two below
        super().__init__(calls, plan, self._changed)
        self._connection = connection
        self._answers: collections.deque[Answer] = collections.deque()
        self._last_heard = time.monotonic()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: half-close
        self._call: Any = None
        self._reader: threading.Thread | None = None

    send = _blocking(SessionMethods.send)
    wait_for_credit = _blocking(SessionMethods.wait_for_credit)
    cancel = _blocking(SessionMethods.cancel)
    update_tasks = _blocking(SessionMethods.update_tasks)
    finish = _blocking(SessionMethods.finish)

    def __enter__(self) -> Session:
        start: grpc.StreamStreamMultiCallable[bytes, bytes] = (
            self._connection.channel.stream_stream(channel.SESSION_PATH)
        )
        self._requests.put(self._plan.first_message())
        metadata = self._connection.metadata(channel.of(self._plan.opening))
        self._call = start(iter(self._requests.get, None), metadata=metadata)
        self._reader = threading.Thread(target=self._read, name="legato-session", daemon=True)
        self._reader.start()
        try:
            run(self._until_opened())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session now; unanswered frames are given up. Does nothing the second time."""
        with self._changed:
            self._state.close()
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._requests.put(None)  # ends gRPC's writing thread
        if self._reader is not None:
            # gRPC has been seen to leave a cancelled call waiting for its next message for ever,
            # after a server that drained; the reader is a daemon, and a session is over without it.
            self._reader.join(_END_TIMEOUT_S)

    def __iter__(self) -> Session:
        return self

    def __next__(self) -> Answer:
        with self._changed:
            while not self._answers:
                if self._state.is_over:
                    self._state.raise_end()
                    raise StopIteration
                run(self._wait())
            answer = self._answers.popleft()
            self._state.read(answer)
            self._grant()
        return answer

    def _put(self, message: bytes | None) -> None:
        self._requests.put(message)

    async def _wait(self, end: float = math.inf) -> None:
        """End the session, too, if the server has fallen silent."""
        patience = self._state.patience
        until = end if patience is None else min(end, self._last_heard + patience)
        self._changed.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        if patience is not None and time.monotonic() - self._last_heard >= patience:
            self._call.cancel()
            self._state.end(self._state.silence())

    def _read(self) -> None:
        error: LegatoError | None = self._state.broken()
        try:
            for data in self._call:
                message = channel.message_of(session_pb2.SessionResponse, data)
                with self._changed:
                    self._last_heard = time.monotonic()
                    answer = self._state.receive(message)
                    if answer is not None:
                        self._answers.append(answer)
                    self._grant()
                    self._changed.notify_all()
            error = None
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except LegatoError as failure:
            self._call.cancel()
            error = failure
        finally:
            with self._changed:
                self._state.end(error)
                self._changed.notify_all()
            self._requests.put(None)  # ends gRPC's writing thread
